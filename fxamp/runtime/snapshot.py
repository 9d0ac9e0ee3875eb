"""What an optimizer's step changes: a copy from before, and the way back to it."""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from fxamp import recorded
from fxamp.runtime import distributed
from fxamp.runtime.copies import Skipped, select_
from fxamp.runtime.flat_copies import FlatCopies, HostCopies
from fxamp.runtime.layouts import Layouts
from fxamp.runtime.optimizer_trees import OpaqueStateError, copied, is_same, is_torchs, own_attributes

ABSENT: Any = object()
"""Stands where there was nothing before the step."""

LAYOUTS = "_fxamp_layouts"
"""Where an optimizer keeps how its copies lie."""


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return distributed.local(tensor.detach()).clone()


class Snapshot:
    """What an optimizer has before a step.

    Parameters with gradients, their state, state under other keys, and group values; of another package's optimizer
    other parameters that are trained, and what it keeps on itself, too (`self.total_steps`).

    Args:
        device: of the flag that will say whether the step counts. What is on the host, and the flag not, is put back
            by the host.

    Raises:
        OpaqueStateError: there is an object that is no tensor, number, text or container of these: another optimizer
            that this one is around, or an object with counters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._undo: list[Callable[[], None]] = []
        self._trees: list[tuple[Any, Any, Any]] = []  # (container, key, a copy of what stands there)
        self._keys: list[tuple[dict[Any, Any], dict[Any, None]]] = []
        is_known = is_torchs(optimizer)
        self._stepped = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None or (parameter.requires_grad and not is_known)
        ]
        self._entries: list[tuple[torch.Tensor, dict[Any, Any], dict[Any, Any]]] = []  # (parameter, state, what it has)
        if not is_known:
            self._note_attributes()
            self._note_entries()
        self._states = self._note_states()
        self._names, self._counts = _keys_of(self._states)
        self._tensors = [  # (state, key, what stands there)
            (state, key, value) for state in self._states for key, value in state.items() if _is_tensor(value)
        ]
        if len(self._tensors) < len(self._names):
            self._note_numbers()
        for group in optimizer.param_groups:
            self._note_all(group, [name for name in group if name not in ("params", "param_names")])
        self._hosts = [each for each in self._tensors if each[2].is_cpu] if device.type != "cpu" else []
        devices = [each for each in self._tensors if not each[2].is_cpu] if self._hosts else self._tensors
        self._parameters = distributed.locals_of(self._stepped)
        self._addresses = _addresses(self._parameters)
        layouts = None if recorded.is_capturing(device) else vars(optimizer).setdefault(LAYOUTS, Layouts())
        self._on_host = HostCopies(distributed.locals_of([tensor for _, _, tensor in self._hosts]))
        self._on_device = FlatCopies(
            [*self._parameters, *distributed.locals_of([tensor for _, _, tensor in devices])], layouts
        )

    def _note_attributes(self) -> None:
        optimizer = self._optimizer
        if not hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
            raise OpaqueStateError(f"{type(optimizer).__name__} did not call Optimizer.__init__")
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._note_all(
            vars(optimizer),
            own_attributes(optimizer),
            lambda tensor: tensor if id(tensor) in parameters else _copy_of(tensor),
        )

    def _note_entries(self) -> None:
        for parameter in self._stepped:
            if isinstance(state := self._optimizer.state.get(parameter), dict):
                self._entries.append((parameter, state, _with_copies(state)))

    def _note_states(self) -> list[dict[Any, Any]]:
        """The states of the parameters that are stepped; what is kept for other things is noted."""
        every = self._optimizer.state
        found = [every.get(parameter) for parameter in self._stepped]
        states = [state for state in found if isinstance(state, dict)]
        others: list[Any] = []
        if len(set(map(id, states))) != len(every):
            stepped = set(map(id, self._stepped))
            have = {id(p) for p, state in zip(self._stepped, found, strict=True) if isinstance(state, dict)}
            others = [key for key in every if id(key) not in have and (id(key) in stepped or not _is_tensor(key))]
        self._note_all(every, others)
        return states

    def _note_numbers(self) -> None:
        for state in self._states:
            for key, value in state.items():
                if not _is_tensor(value):
                    self._trees.append((state, key, copied(value, _copy_of)))

    def _note_all(
        self,
        container: dict[Any, Any],
        keys: Iterable[Any],
        copy_of: Callable[[torch.Tensor], torch.Tensor] = _copy_of,
    ) -> None:
        """Note what stands at these keys, and that no others are there."""
        self._keys.append((container, dict.fromkeys(container)))
        self._trees.extend((container, key, copied(container[key], copy_of)) for key in keys)

    def select_back(self, found_inf: torch.Tensor) -> None:
        """Give parameters and state tensors their old values where found_inf is above 0, on the device. Once."""
        every = self._optimizer.state
        for parameter, state, had in self._entries:
            if every.get(parameter) is not state:  # `self.state[p] = {...}`
                self._trees.append((every, parameter, self._before(had)))
        for state, key, tensor in self._tensors:
            if state.get(key) is not tensor:
                self._trees.append((state, key, self._value_before(tensor)))
        if self._on_host.are_changed():
            self._undo.append(functools.partial(_put_all, self._hosts, self._on_host))
        self._look_for_new_keys()
        pairs = list(self._moved_parameters())
        for container, key, before in self._trees:
            pairs.extend(self._compare(container, key, before, found_inf.device))
        skipped = Skipped(found_inf)
        self._on_device.select_back(skipped)
        select_(pairs, skipped)  # last: what stands at another key now, has there what stood there
        self._tensors, self._trees, self._stepped, self._states, self._parameters = [], [], [], [], []
        self._entries = []

    def _before(self, had: dict[Any, Any]) -> dict[Any, Any]:
        return {key: self._value_before(value) if _is_tensor(value) else value for key, value in had.items()}

    def _value_before(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a state's tensor held before the step."""
        copies = self._on_host if id(tensor) in self._ids_on_host else self._on_device
        return copies.value_of(distributed.local(tensor))

    @functools.cached_property
    def _ids_on_host(self) -> set[int]:
        return {id(tensor) for _, _, tensor in self._hosts}

    def _look_for_new_keys(self) -> None:
        if _keys_of(self._states) != (self._names, self._counts):
            names = iter(self._names)
            for state, count in zip(self._states, self._counts, strict=True):
                self._keys.append((state, dict.fromkeys(itertools.islice(names, count))))
        for container, keys in self._keys:
            if len(container) != len(keys) or not all(map(operator.is_, container, keys)):
                self._trees.extend((container, key, ABSENT) for key in container if key not in keys)

    def _moved_parameters(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters that the step has given other memory (`p.data = ...`), and what they held."""
        parameters = distributed.locals_of(self._stepped)
        addresses = _addresses(parameters)
        if addresses != self._addresses:
            for place, parameter in enumerate(parameters):
                if addresses[place] != self._addresses[place]:
                    yield parameter.detach(), self._on_device.value_of(self._parameters[place])

    def drop(self) -> None:
        """Give the copies' memory back: the step has failed."""
        self._on_device.drop()

    def host_changes(self) -> list[Callable[[], None]]:
        """How to put back what only the host can; empty in the steady state of torch's optimizers."""
        return self._undo

    def _compare(
        self, container: Any, key: Any, before: Any, device: torch.device
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Tensor pairs to select on the device; everything else that changed goes to the undo list."""
        if not _has(container, key):
            if before is not ABSENT:
                self._undo.append(lambda: _put(container, key, before))
            return
        now, optimizer = container[key], self._optimizer
        if now is before:
            return
        if isinstance(now, torch.Tensor):
            now = distributed.local(now.detach())
        if before is ABSENT:
            self._undo.append(lambda: _remove(optimizer, container, key, now))
        elif isinstance(before, torch.Tensor):
            if _is_selectable(now, before, device):
                yield now, before
            elif not _is_equal_on_host(now, before):
                self._undo.append(lambda: _put(container, key, before))
        elif isinstance(before, dict) and isinstance(now, dict):
            for name in {**before, **now}:
                yield from self._compare(now, name, before.get(name, ABSENT), device)
        elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
            for index, item in enumerate(before):
                yield from self._compare(now, index, item, device)
        elif not is_same(now, before):
            self._undo.append(lambda: _put_unless_changed(container, key, before, now))


def _keys_of(states: list[dict[Any, Any]]) -> tuple[list[Any], list[int]]:
    return [*itertools.chain.from_iterable(states)], [*map(len, states)]


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where the numbers of dense tensors are; 0 for any other, whose memory is not exchanged."""
    return [t.data_ptr() if type(t) in distributed.PLAIN and t.layout is torch.strided else 0 for t in tensors]


def _with_copies(state: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value if _is_tensor(value) else copied(value, _copy_of) for key, value in state.items()}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_equal_on_host(now: Any, before: torch.Tensor) -> bool:
    if not isinstance(now, torch.Tensor) or now.device.type != "cpu" or before.device.type != "cpu":
        return False
    return now.dtype == before.dtype and torch.equal(now, before)


def _has(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict) else key < len(container)


def _is_selectable(now: Any, before: torch.Tensor, device: torch.device) -> bool:
    """A host tensor beside a device flag cannot be selected without waiting: the next step puts it back."""
    if not isinstance(now, torch.Tensor) or now.shape != before.shape or now.dtype != before.dtype:
        return False
    return now.device == before.device and (now.device.type != "cpu" or device.type == "cpu")


def _put(container: Any, key: Any, before: Any) -> None:
    if isinstance(container, dict):
        if isinstance(container.get(key), torch.Tensor) and isinstance(before, torch.Tensor):
            current = distributed.local(container[key].detach())
            if current.shape == before.shape and current.dtype == before.dtype:
                current.copy_(before)
                return
        container[key] = before
    else:
        container[key:] = [before]


def _put_all(places: list[tuple[dict[Any, Any], Any, torch.Tensor]], copies: HostCopies) -> None:
    for state, key, tensor in places:
        _put(state, key, copies.value_of(distributed.local(tensor)))


def _put_unless_changed(container: Any, key: Any, before: Any, after: Any) -> None:
    """An LR scheduler may have set a group's value since the step: its value stands."""
    if is_same(container[key], after):
        container[key] = before


def _remove(optimizer: torch.optim.Optimizer, container: Any, key: Any, created: Any) -> None:
    """Take away what the step created; a state entry may have been moved to another key meanwhile."""
    if isinstance(created, dict):
        created.clear()
    if isinstance(container, dict) and key in container:
        del container[key]
    elif created is not None and container is optimizer.state:
        for other in [other for other, value in optimizer.state.items() if value is created]:
            del optimizer.state[other]
