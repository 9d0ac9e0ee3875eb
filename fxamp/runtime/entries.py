"""The entries of an optimizer's state and groups around a step that is recorded."""

from collections.abc import Iterable
from typing import Any

import torch

from fxamp.runtime.optimizer_trees import OpaqueStateError, copied, is_same, is_torchs, own_attributes


class Entries:
    """The entries of an optimizer's state and groups, and of other dicts, before a step that is recorded, and not run.

    Such a step may change numbers on the host, and put tensors into the state that hold nothing. Those of the device
    that stood there hold what they held, and are not copied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, others: list[dict[str, Any]]) -> None:
        self._optimizer = optimizer
        self._own = {} if is_torchs(optimizer) else {key: _kept(v) for key, v in own_attributes(optimizer).items()}
        states = {key: each for key, each in optimizer.state.items() if isinstance(each, dict)}
        dicts: list[dict[Any, Any]] = [*states.values(), *optimizer.param_groups, *others]
        self._places = [(place, {key: (value, _kept(value)) for key, value in place.items()}) for place in dicts]
        kept = {key: (each, each if key in states else _kept(each)) for key, each in optimizer.state.items()}
        self._places.append((optimizer.state, kept))

    def are_changed(self) -> bool:
        """Whether a replay, which runs no Python, would leave out something that the step did."""
        for place, before in self._places:
            if place.keys() != before.keys() or not all(_is_held(place[key], *each) for key, each in before.items()):
                return True
        now = vars(self._optimizer)
        return not all(key in now and is_same(now[key], value) for key, value in self._own.items())

    def put_back(self) -> None:
        """What stood there stands there again."""
        for place, before in self._places:
            for key in [key for key in place if key not in before]:
                del place[key]
            for key, (value, kept) in before.items():
                if not _is_held(place.get(key), value, kept):
                    place[key] = kept
        vars(self._optimizer).update(self._own)


class Numbers:
    """The numbers, flags and texts that modules hold on the host, before a step that is recorded, and not run."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._held = [
            (module, {name: each for name, each in vars(module).items() if _is_number(each)}) for module in modules
        ]

    def changed(self) -> list[str]:
        """The attributes that hold another one now, or a first one: a replay would leave them as they were."""
        return [
            f"{type(module).__qualname__}.{name}"
            for module, held in self._held
            for name, now in vars(module).items()
            if _is_number(now) and not (name in held and _is_the_same(now, held[name]))
        ]

    def put_back(self) -> None:
        """What stood there stands there again."""
        for module, held in self._held:
            for name in [name for name, now in vars(module).items() if _is_number(now) and name not in held]:
                del vars(module)[name]
            vars(module).update(held)


def _is_the_same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and bool(now == before))


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex | str)


def _kept(value: Any) -> Any:
    """A copy of what a step changes in place, on the host."""
    if isinstance(value, torch.Tensor):
        return value.clone() if value.device.type == "cpu" and not value.requires_grad else value
    try:
        return copied(value, lambda tensor: tensor) if type(value) in (dict, list, tuple, set) else value
    except OpaqueStateError:
        return value


def _is_held(now: Any, value: Any, kept: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return now is value and (kept is value or torch.equal(value, kept))
    return now is value and is_same(now, kept)
