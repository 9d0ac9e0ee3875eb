"""The entries of an optimizer's state and groups around a step that is recorded."""

from typing import Any

import torch

from fxamp.runtime.optimizer_trees import OpaqueStateError, copied, is_same, is_torchs, own_attributes


class Entries:
    """The entries of an optimizer's state and groups before a step that is recorded, and not run.

    Such a step may change numbers on the host, and put tensors into the state that hold nothing. Those of the device
    that stood there hold what they held, and are not copied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._own = {} if is_torchs(optimizer) else {key: _kept(v) for key, v in own_attributes(optimizer).items()}
        states = {key: each for key, each in optimizer.state.items() if isinstance(each, dict)}
        dicts: list[dict[Any, Any]] = [*states.values(), *optimizer.param_groups]
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
