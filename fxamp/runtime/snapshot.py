"""What an optimizer's step changes: a copy from before, and the way back to it."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fxamp.runtime import distributed
from fxamp.runtime.copies import Skipped, is_plain, select_
from fxamp.runtime.flat_copies import FlatCopies
from fxamp.runtime.optimizer_trees import OpaqueStateError, copied, is_same, is_torchs, own_attributes

ABSENT: Any = object()
"""Stands where there was nothing before the step."""


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return distributed.local(tensor.detach()).clone()


class Snapshot:
    """What an optimizer has before a step.

    Parameters with gradients, their state, state under other keys, and group values; of another package's optimizer
    what it keeps on itself, too (`self.total_steps`).

    Args:
        device: of the flag that will say whether the step counts. What is on the host, and the flag not, is put back
            by the host.

    Raises:
        OpaqueStateError: there is an object that is no tensor, number, text or container of these: another optimizer
            that this one is around, or an object with counters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._is_flag_elsewhere = device.type != "cpu"
        self._undo: list[Callable[[], None]] = []
        self._tensors: list[tuple[dict[Any, Any], Any, torch.Tensor]] = []  # (state, key, what stands there)
        self._trees: list[tuple[Any, Any, Any]] = []  # (container, key, a copy of what stands there)
        self._keys: list[tuple[dict[Any, Any], dict[Any, None]]] = []
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._memory = {parameter: distributed.local(parameter.detach()) for parameter in stepped}
        if not is_torchs(optimizer):
            self._note_attributes()
        self._note_state()
        for group in optimizer.param_groups:
            self._note_all(group, [name for name in group if name not in ("params", "param_names")])
        tensors = [distributed.local(tensor) for _, _, tensor in self._tensors]
        on_device = [tensor for tensor in tensors if not self._is_the_hosts(tensor)]
        self._on_device = FlatCopies([*self._memory.values(), *on_device])
        self._on_host = FlatCopies([tensor for tensor in tensors if self._is_the_hosts(tensor)])

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

    def _note_state(self) -> None:
        every = self._optimizer.state
        of_parameters = {key: every[key] for key in self._memory if isinstance(every.get(key), dict)}
        are_noted = [key for key in every if key not in of_parameters and (key in self._memory or not _is_tensor(key))]
        self._note_all(every, are_noted)
        for state in of_parameters.values():
            self._tensors.extend((state, key, value) for key, value in state.items() if _is_tensor(value))
            self._note_all(state, [key for key, value in state.items() if not _is_tensor(value)])

    def _note_all(
        self,
        container: dict[Any, Any],
        keys: Iterable[Any],
        copy_of: Callable[[torch.Tensor], torch.Tensor] = _copy_of,
    ) -> None:
        """Note what stands at these keys, and that no others are there."""
        self._keys.append((container, dict.fromkeys(container)))
        self._trees.extend((container, key, copied(container[key], copy_of)) for key in keys)

    def _is_the_hosts(self, tensor: torch.Tensor) -> bool:
        return self._is_flag_elsewhere and tensor.is_cpu

    def select_back(self, found_inf: torch.Tensor) -> None:
        """Give parameters and state tensors their old values where found_inf is above 0, on the device. Once."""
        on_host = []
        for state, key, tensor in self._tensors:
            if state.get(key) is not tensor:
                self._trees.append((state, key, self._value_of(tensor)))
            elif self._is_the_hosts(distributed.local(tensor)):
                on_host.append((state, key, tensor))
        if on_host and self._on_host.are_changed():
            self._undo.append(functools.partial(_put_all, on_host, self._on_host))
        for container, keys in self._keys:
            if container.keys() != keys.keys():
                self._trees.extend((container, key, ABSENT) for key in container if key not in keys)
        pairs = list(self._moved_parameters())
        for container, key, before in self._trees:
            pairs.extend(self._compare(container, key, before, found_inf.device))
        skipped = Skipped(found_inf)
        self._on_device.select_back(skipped)
        select_(pairs, skipped)  # last: what stands at another key now, has there what stood there
        self._tensors, self._trees, self._memory = [], [], {}

    def _moved_parameters(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters that the step has given other memory (`p.data = ...`), and what they held."""
        for parameter, before in self._memory.items():
            if is_plain(before) and distributed.local(parameter).data_ptr() != before.data_ptr():
                yield distributed.local(parameter.detach()), self._on_device.value_of(before)

    def _value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = distributed.local(tensor)
        return (self._on_host if self._is_the_hosts(tensor) else self._on_device).value_of(tensor)

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


def _put_all(places: list[tuple[dict[Any, Any], Any, torch.Tensor]], copies: FlatCopies) -> None:
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
