"""What an optimizer's step changes: a copy from before, and the way back to it."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxamp.runtime import distributed
from fxamp.runtime.copies import copy_on, is_plain
from fxamp.runtime.flat_copies import FlatCopies, can_be_flat

NUMBERS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
OF_EVERY_OPTIMIZER = ("state", "param_groups", "defaults", "_opt_called")  # noted otherwise, or not of the step
OURS = "_fxamp"  # how attributes begin that are of this package


class OpaqueStateError(Exception):
    """Optimizer state that cannot be copied and compared."""


@dataclasses.dataclass
class _Absent:
    """Marks a key that did not exist before the step."""


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
        self._copies: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._tensors: list[tuple[dict[Any, Any], Any, torch.Tensor]] = []  # (state, key, what stood there)
        self._trees: list[tuple[Any, Any, Any]] = []  # (container, key, what stood there)
        self._keys: list[tuple[dict[Any, Any], tuple[Any, ...]]] = []
        if not is_torchs(optimizer):
            self._note_attributes()
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._stepped = stepped
        self._parameters = [distributed.local(parameter.detach()) for parameter in stepped]
        for parameter in stepped:
            self._note_state(parameter)
        self._note_tensors()
        self._global_keys = {key for key in optimizer.state if not isinstance(key, torch.Tensor)}
        for key in self._global_keys:
            self._note(optimizer.state, key)
        for group in optimizer.param_groups:
            self._keys.append((group, tuple(group)))
            for name in [name for name in group if name not in ("params", "param_names")]:
                self._note(group, name)
        for copies, sources in self._copies.values():
            torch._foreach_copy_(copies, sources)
        self._copies = {}

    def _note_attributes(self) -> None:
        optimizer = self._optimizer
        if not hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
            raise OpaqueStateError(f"{type(optimizer).__name__} did not call Optimizer.__init__")
        own = _own_attributes(optimizer)
        self._keys.append((vars(optimizer), tuple(vars(optimizer))))
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name in own:
            before = _copied(own[name], lambda tensor: tensor if id(tensor) in stepped else self._copy_of(tensor))
            self._trees.append((vars(optimizer), name, before))

    def _note_state(self, parameter: torch.Tensor) -> None:
        state = self._optimizer.state.get(parameter)
        if not isinstance(state, dict):
            self._note(self._optimizer.state, parameter)
            return
        self._keys.append((state, tuple(state)))
        for key, value in state.items():
            if type(value) is torch.Tensor:
                self._tensors.append((state, key, value))
            else:
                self._note(state, key)

    def _note_tensors(self) -> None:
        """Copies of parameters and state: flat ones as far as that goes."""
        on_device, on_host = list(self._parameters), list[torch.Tensor]()
        for _, _, tensor in self._tensors:
            (on_host if self._is_the_hosts(tensor) else on_device).append(tensor)
        self._flat, self._flat_on_host = (
            FlatCopies(list(filter(can_be_flat, tensors))) for tensors in (on_device, on_host)
        )
        self._others, self._others_on_host = (
            {id(tensor): (tensor, self._copy_of(tensor)) for tensor in tensors if not can_be_flat(tensor)}
            for tensors in (on_device, on_host)
        )

    def _is_the_hosts(self, tensor: torch.Tensor) -> bool:
        return self._is_flag_elsewhere and tensor.is_cpu

    def _note(self, container: Any, key: Any) -> None:
        before = _copied(container[key], self._copy_of) if key in container else _Absent()
        self._trees.append((container, key, before))

    def _copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for a copy; all copies are written later, in a few multi-tensor kernels."""
        source = distributed.local(tensor)
        if not source.is_floating_point() or source.is_sparse:
            return source.clone()
        copy = torch.empty_like(source)
        copies, sources = self._copies.setdefault((source.device, source.dtype), ([], []))
        copies.append(copy)
        sources.append(source)
        return copy

    def select_back(self, found_inf: torch.Tensor) -> None:
        """Give parameters and state tensors their old values where found_inf is above 0, on the device."""
        on_host = []
        for state, key, tensor in self._tensors:
            is_the_hosts = self._is_the_hosts(tensor)
            if state.get(key) is not tensor or (is_the_hosts and not can_be_flat(tensor)):
                self._trees.append((state, key, self._copy_made_of(tensor)))
            elif is_the_hosts:
                on_host.append((state, key, tensor))
        if on_host and self._flat_on_host.are_changed():
            self._undo.append(functools.partial(_put_all, on_host, self._flat_on_host))
        self._note_created()
        pairs = [*self._others.values(), *self._moved_parameters()]
        for container, key, before in self._trees:
            pairs.extend(self._compare(container, key, before, found_inf.device))
        self._flat.select_back(found_inf)
        with torch.no_grad():
            select_(pairs, found_inf)  # last: what stands at another key now, has there what stood there
        self._tensors, self._trees = [], []
        self._others, self._others_on_host = {}, {}
        self._stepped = []

    def _moved_parameters(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters that the step has given other memory (`p.data = ...`), and what they held."""
        for parameter, before in zip(self._stepped, self._parameters, strict=True):
            if is_plain(before) and distributed.local(parameter).data_ptr() != before.data_ptr():
                yield distributed.local(parameter.detach()), self._copy_made_of(before)

    def _copy_made_of(self, tensor: torch.Tensor) -> torch.Tensor:
        for others in (self._others, self._others_on_host):
            if id(tensor) in others:
                return others[id(tensor)][1]
        return (self._flat if tensor in self._flat else self._flat_on_host).value_of(tensor)

    def _note_created(self) -> None:
        for container, keys in self._keys:
            if tuple(container) != keys:
                self._trees.extend((container, key, _Absent()) for key in container if key not in keys)
        state, known = self._optimizer.state, self._global_keys
        created = [key for key in state if not isinstance(key, torch.Tensor) and key not in known]
        self._trees.extend((state, key, _Absent()) for key in created)

    def host_changes(self) -> list[Callable[[], None]]:
        """How to put back what only the host can; empty in the steady state of torch's optimizers."""
        return self._undo

    def _compare(
        self, container: Any, key: Any, before: Any, device: torch.device
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Tensor pairs to select on the device; everything else that changed goes to the undo list."""
        if not _has(container, key):
            if not isinstance(before, _Absent):
                self._undo.append(lambda: _put(container, key, before))
            return
        now, optimizer = container[key], self._optimizer
        if now is before:
            return
        if isinstance(now, torch.Tensor):
            now = distributed.local(now.detach())
        if isinstance(before, _Absent):
            self._undo.append(lambda: _remove(optimizer, container, key, now))
        elif isinstance(before, torch.Tensor):
            if _is_selectable(now, before, device):
                yield now, before
            elif not _is_equal_on_host(now, before):
                self._undo.append(lambda: _put(container, key, before))
        elif isinstance(before, dict) and isinstance(now, dict):
            for name in {**before, **now}:
                yield from self._compare(now, name, before.get(name, _Absent()), device)
        elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
            for index, item in enumerate(before):
                yield from self._compare(now, index, item, device)
        elif not _is_same(now, before):
            self._undo.append(lambda: _put_unless_changed(container, key, before, now))


class Entries:
    """The entries of an optimizer's state and groups, and of other dicts, before a step that is recorded, and not run.

    Such a step may change numbers on the host, and put tensors into the state that hold nothing. Those of the device
    that stood there hold what they held, and are not copied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, others: list[dict[str, Any]]) -> None:
        self._optimizer = optimizer
        self._own = {} if is_torchs(optimizer) else {key: _kept(v) for key, v in _own_attributes(optimizer).items()}
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
        return not all(key in now and _is_same(now[key], value) for key, value in self._own.items())

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
        return _copied(value, lambda tensor: tensor) if type(value) in (dict, list, tuple, set) else value
    except OpaqueStateError:
        return value


def _is_held(now: Any, value: Any, kept: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return now is value and (kept is value or torch.equal(value, kept))
    return now is value and _is_same(now, kept)


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a class of torch.optim itself: it keeps nothing on the object, and steps on any numbers."""
    return type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]


def _own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = [name for name in vars(optimizer) if name not in OF_EVERY_OPTIMIZER and not name.startswith(OURS)]
    return {name: vars(optimizer)[name] for name in names}


def select_(pairs: list[tuple[torch.Tensor, torch.Tensor]], found_inf: torch.Tensor) -> None:
    """For each (current, old): current becomes old, bit for bit, where `found_inf` is above 0.

    One kernel for each: most tensors are `FlatCopies`.
    """
    skipped: dict[torch.device, torch.Tensor] = {}
    for current, old in pairs:
        if current.device not in skipped:
            skipped[current.device] = copy_on(current.device, found_inf) > 0
        torch.where(skipped[current.device], old, current, out=current)


def _copied(tree: Any, copy_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return copy_of(tree)
    if isinstance(tree, dict):
        return {key: _copied(value, copy_of) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        copies = (_copied(value, copy_of) for value in tree)
        return list(copies) if isinstance(tree, list) else tuple(copies)
    if isinstance(tree, NUMBERS) or callable(tree):
        return tree
    if isinstance(tree, set | frozenset) and all(isinstance(each, NUMBERS) for each in tree):
        return set(tree) if isinstance(tree, set) else tree
    raise OpaqueStateError(f"optimizer state holds a {type(tree).__name__}")


def _is_same(now: Any, before: Any) -> bool:
    """Whether a tree of host values is unchanged; tensors in it count as unchanged only by identity."""
    if now is before:
        return True
    if type(now) is not type(before) or isinstance(now, torch.Tensor):
        return False
    if isinstance(now, list | tuple):
        return len(now) == len(before) and all(map(_is_same, now, before))
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_is_same(now[key], before[key]) for key in now)
    return bool(now == before)


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
            current = container[key]
            if current.shape == before.shape and current.dtype == before.dtype:
                current.copy_(before)
                return
        container[key] = before
    else:
        container[key:] = [before]


def _put_all(places: list[tuple[dict[Any, Any], Any, torch.Tensor]], copies: FlatCopies) -> None:
    for state, key, tensor in places:
        _put(state, key, copies.value_of(tensor))


def _put_unless_changed(container: Any, key: Any, before: Any, after: Any) -> None:
    """An LR scheduler may have set a group's value since the step: its value stands."""
    if _is_same(container[key], after):
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
