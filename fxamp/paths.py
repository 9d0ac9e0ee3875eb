"""What stands at a path of a model: modules, parameters, buffers, plain attributes, and tensors in containers.

layers.0.weight
encoder.hidden[0]['cell']
"""

import ast
from typing import Any

from torch import nn

from fxamp.tree import every_parameter


def submodule(root: nn.Module | None, path: str) -> nn.Module:
    """The submodule at a dotted path; "" is the root."""
    assert root is not None, "a graph with modules needs its root"
    return root.get_submodule(path)


def module_at(root: nn.Module, path: str) -> nn.Module:
    """The same by steps that Dynamo follows, and that cost little at every call."""
    for name in path.split(".") if path else ():
        root = root._modules[name]  # type: ignore[assignment]
    return root


def attribute_at(root: nn.Module | None, path: Any) -> Any:
    """The parameter, buffer or plain attribute at a dotted path, None where there is none.

    A module of a class of its own may name weights after no part of it, and refuse to be asked for one.
    """
    value: Any = root
    try:
        for step in str(path).split("."):
            name, keys = (step, []) if "[" not in step or hasattr(value, step) else name_and_keys(step)
            value = getattr(value, name, None)
            for key in keys:
                value = value[key]
    except Exception:  # by that class's own __getattr__
        named = {} if root is None else dict(every_parameter(root))
        value = named.get(str(path))
    return value


def name_and_keys(step: str) -> tuple[str, list[Any]]:
    """The name of an attribute, and the keys behind it of a tensor in a container that it is: `hidden[0]['cell']`."""
    name, *keys = step.split("[")
    return name, [ast.literal_eval(key.removesuffix("]")) for key in keys]


class _Inside:
    """The attributes of a module, in which a tensor is found by the name of a container and the keys in it."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self._entries = entries

    def __getitem__(self, step: str) -> Any:
        name, keys = name_and_keys(step)
        value = self._entries[name]
        try:
            for key in keys:
                value = value[key]
        except (LookupError, TypeError):
            raise KeyError(step) from None
        return value

    def get(self, step: str) -> Any:
        """None for nothing."""
        try:
            return self[step]
        except KeyError:
            return None


def kept_in(root: nn.Module, path: str) -> tuple[Any, str]:
    """Where the parameter, buffer or plain attribute at a dotted path is kept: a dictionary of its module, and the key.

    What is there may be exchanged between calls; the dictionary stays. What is found in a container is asked for from
    the module's attributes on.
    """
    owner, _, name = path.rpartition(".")
    module = root.get_submodule(owner)
    own = next((each for each in (module._parameters, module._buffers) if name in each), module.__dict__)
    return _Inside(own) if "[" in name and name not in own else own, name
