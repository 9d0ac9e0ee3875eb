"""Notice that a model is no longer the one that was captured: modules exchanged, classes changed, hooks added, all
parameters cast, the model moved to a device of another type.

The check runs at every call, so it compares lists that were laid out once: for 300 modules about 30 microseconds.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fxamp.capture.leaves import is_boundary, is_leaf
from fxamp.module_hooks import has_hooks, hook_dictionaries
from fxamp.tree import every_module


class Structure:
    """What a graph takes for granted of one model.

    Attributes:
        fingerprint: paths, classes and hooked modules, which of them are one, and the parameters' dtypes and types of
            device: equal for a copy of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(every_module(model))
        traced = [module for path, module in modules.items() if path and not is_leaf(module)]
        self._ends = _ends_of(modules.values())
        self.fingerprint = (
            tuple((path, type(module), has_hooks(module)) for path, module in modules.items() if path),
            _sharing(modules.values()),
            tuple(map(_kind, model.parameters())),
        )
        self._children = [module._modules for module in modules.values() if module._modules]
        self._childless = [module._modules for module in modules.values() if not module._modules]
        self._values = [tuple(children.values()) for children in self._children]
        self._traced = traced
        self._classes = [type(module) for module in traced]
        # Dynamo enters leaves, too.
        entered = [module for path, module in modules.items() if path and not is_boundary(module)]
        self._hooks = [hooks for module in entered for hooks in hook_dictionaries(module) if not hooks]
        self._used_hooks = [hooks for path, m in modules.items() if path for hooks in hook_dictionaries(m) if hooks]
        self._used_counts = [len(hooks) for hooks in self._used_hooks]

    def holds(self) -> bool:
        """Whether nothing that a graph takes for granted has changed since."""
        return (
            not any(self._hooks)
            and not any(self._childless)
            and all(
                (weight := weights.get(name)) is None
                or (weight.dtype is dtype and (weight.device == device or weight.device.type == device.type))
                for weights, name, dtype, device in self._ends
            )
            and [len(hooks) for hooks in self._used_hooks] == self._used_counts
            and [type(module) for module in self._traced] == self._classes
            and [tuple(children.values()) for children in self._children] == self._values
        )


def _sharing(modules: Iterable[nn.Module]) -> tuple[int, ...]:
    """For each module the place of the first one that is the same: a graph reads the weights of both in one place."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(module), place) for place, module in enumerate(modules))


def _ends_of(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str, torch.dtype, torch.device]]:
    """The first and the last floating parameter, by where they are kept, with their dtypes and devices.

    `model.half()` and `model.cuda()` change every parameter: two tell of it without a look at hundreds.
    """
    found = [
        (module._parameters, name, weight.dtype, weight.device)
        for module in modules
        if type(module._parameters) is dict  # a scripted module keeps its own behind a wrapper
        for name, weight in module._parameters.items()
        if weight is not None and weight.is_floating_point()
    ]
    return [*found[:1], *found[1:][-1:]]


def _kind(weight: torch.Tensor) -> tuple[torch.dtype, str]:
    """What decides on kernels and dtypes: which of several GPUs a weight is on does not."""
    return weight.dtype, weight.device.type
