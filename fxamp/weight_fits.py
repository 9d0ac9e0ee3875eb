"""Whether the weights of a graph still fit into the low dtype as they did when their precision was decided.

A layer scale of 1e-8 or a bias of -1e9 keeps a node in float32. A checkpoint that is loaded later may bring such
numbers, so weights that were looked at are looked at again once they were written: by load_state_dict, or by anything
else between two calls without an optimizer's step. What training does to them step by step is not followed, because
reading numbers from a device makes the host wait.
"""

import operator
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from fxamp import recorded
from fxamp.ir import ENGINE
from fxamp.passes.literals import Fit, fit_in
from fxamp.paths import kept_in
from fxamp.runtime.optimizer_steps import steps_taken
from fxamp.runtime.writes import versions_of

_found: Any = WeakIdKeyDictionary()


def fit_of_weight(path: str, weight: Any, low: torch.dtype) -> Fit:
    """How a weight fits into `low`.

    While a CUDA graph is recorded nobody can wait for its numbers: it fits as it did when a graph last asked.

    Raises:
        RecordedTooSoonError: none has.
    """
    if not isinstance(weight, torch.Tensor):
        return fit_in(weight, low)
    known: dict[torch.dtype, Fit] = _found.setdefault(weight, {})
    if not recorded.is_capturing(weight.device):
        known[low] = fit_in(weight, low)
    elif low not in known:
        raise recorded.RecordedTooSoonError(
            f"a CUDA graph is recorded around a model that was not called before, and what {path!r} holds cannot be "
            "looked at meanwhile. Call the model once before you record it."
        )
    return known[low]


class WeightFits:
    """A condition of a graph.

    Args:
        fits: path of each weight that was looked at -> how it fitted.
        low: the dtype it was compared with.
    """

    def __init__(self, fits: Mapping[str, Fit], low: torch.dtype) -> None:
        self._fits, self._low = dict(fits), low
        self._seen: weakref.WeakKeyDictionary[nn.Module, _Seen] = weakref.WeakKeyDictionary()

    def __call__(self, module: nn.Module) -> bool:
        """Whether the graph may run. A few comparisons, unless somebody wrote to a weight."""
        if not self._fits:
            return True
        seen = self._seen.get(module)
        if seen is None:
            seen = self._seen[module] = self._unseen(module)
        if seen.is_written(module):
            now = seen.tensors()
            with _disable_current_modes():  # make_fx traces no look at numbers
                seen.holds = all(fit_in(now[at], self._low) == fit for at, fit in enumerate(self._fits.values()))
        return seen.holds

    def note(self, module: nn.Module) -> None:
        """The graph was made for this model as it is now: its weights are those that were looked at.

        Any other model that shares the graph, a copy, is looked at when it is first called.
        """
        if self._fits:
            seen = self._seen[module] = self._unseen(module)
            seen.note(module)

    def _unseen(self, module: nn.Module) -> "_Seen":
        return _Seen([kept_in(module, path) for path in self._fits])

    def forget(self, module: nn.Module) -> None:
        """Look again at the next call: the model's parts are other objects than they were."""
        self._seen.pop(module, None)


class _Seen:
    """The weights of one model as they were at its last call."""

    def __init__(self, places: list[tuple[dict[str, Any], str]]) -> None:
        self.holds = True
        self._places = places
        self._state: tuple[list[Any], list[Any]] | None = None  # None: not known since the last optimizer step
        self._steps, self._loads, self._writes = -1, -1, 0  # as if loaded just now

    def note(self, module: nn.Module) -> None:
        """Take the weights as they are for looked at."""
        self._steps, self._loads, self._state = steps_taken(), _loads_of(module), self._now()

    def tensors(self) -> list[Any]:
        return [owner.get(name) for owner, name in self._places]

    def is_written(self, module: nn.Module) -> bool:
        """Whether to look at the numbers. Writes that go on and on are looked at ever more rarely.

        While a CUDA graph is recorded nobody can wait for numbers, and torch.export shows none: what was loaded is
        looked at in a later call.
        """
        steps, loads = steps_taken(), _loads_of(module)
        is_loaded, is_stepped = loads != self._loads, steps != self._steps
        if is_loaded and self._is_recorded():
            return False
        self._steps, self._loads = steps, loads
        if is_loaded or is_stepped:
            self._state = self._now() if is_loaded else None
            return is_loaded
        before, now = self._state, self._now()
        self._state = now
        if before is None or (_are_the_same(before[0], now[0]) and before[1] == now[1]) or self._is_recorded():
            return False
        self._writes += 1
        return self._writes & (self._writes - 1) == 0

    def _is_recorded(self) -> bool:
        found = [tensor for tensor in self.tensors() if tensor is not None]
        return any(isinstance(tensor, FakeTensor) or recorded.is_capturing(tensor.device) for tensor in found)

    def _now(self) -> tuple[list[Any], list[Any]]:
        tensors = [tensor for tensor in self.tensors() if tensor is not None]
        return list(map(weakref.ref, tensors)), versions_of(tensors)  # the reference to a tensor is one, while it lives


def _loads_of(module: nn.Module) -> int:
    """How often a state dict was loaded into the model."""
    return getattr(module.__dict__.get(ENGINE), "loads", 0)


def _are_the_same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(map(operator.is_, before, now))
