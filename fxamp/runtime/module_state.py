"""What modules hold in Python around a step that is recorded: numbers, texts, tensors, and containers and plain objects
of these.

A replay runs no Python: what a step sets it would leave as it was. A tensor in whose place each step puts another one
(`self.hidden = hidden.detach()`) is carried over all the same: the recorded step reads a copy that is the graphs' own,
and the last thing recorded is to write there what stands in its place by then.
"""

import collections
import dataclasses
import itertools
import operator
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fxamp.runtime.distributed import PLAIN

LONGEST = 4096
"""Entries of a container that are looked at; of a longer one only whether it is another object."""
DEEPEST = 6
"""Containers and objects within one another."""

_NOT_STATE = frozenset(vars(nn.Module()))
"""Attributes that torch keeps on each module; its mode and weights are asked otherwise."""
_OURS = "_fxamp"
_ANYBODYS = ("types", "argparse", "collections")
"""Packages of classes that hold what anybody puts into them."""
_MISSING: Any = object()


@dataclasses.dataclass(frozen=True)
class Change:
    """What is another now.

    Attributes:
        name: `Net.hidden[0]`.
        holder: the attributes or the container that it is in.
        key: in these; None of a container that has other keys, or another length.
    """

    name: str
    holder: Any
    key: Any
    before: Any
    now: Any


class ModuleState:
    """What modules, their buffers among it, hold now.

    Args:
        modules: without their parts, which are modules of their own.
        read: modules of which tensors alone count, for somebody else asks what is read of them.
    """

    def __init__(self, modules: Iterable[nn.Module], read: Collection[nn.Module] = ()) -> None:
        self._places: list[_Place] = []
        self._seen: dict[int, Any] = {}
        self._read = set(read)
        self._modules = list(modules)
        for module in self._modules:
            self._note_module(module)

    def changes(self) -> list[Change]:
        """What is another now: tensors by identity, numbers and texts by value."""
        return [change for place in self._places if not place.is_unchanged() for change in place.changes()]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Those that were held, weights among them."""
        for place in self._places:
            yield from (value for value in place.values if isinstance(value, torch.Tensor))
        for module in self._modules:
            yield from module.parameters(recurse=False)

    def put_back(self) -> None:
        """What stood there stands there again."""
        for change in self.changes():
            _put(change.holder, change.key, change.before)

    def _note_module(self, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen[id(module)] = module
        name = type(module).__qualname__
        for holder in (vars(module), module._buffers) if module._buffers else (vars(module),):
            self._note(name, holder, module, 0, are_attributes=True)

    def _note(self, name: str, holder: Any, module: nn.Module, depth: int, *, are_attributes: bool) -> None:
        place = _Place(name, holder, are_attributes)
        if module not in self._read or any(map(_has_tensor, place.values)):
            self._places.append(place)
        for key, value in zip(place.keys, place.values, strict=True):
            self._look_into(place.name_of(key), value, module, depth + 1)

    def _look_into(self, name: str, value: Any, module: nn.Module, depth: int) -> None:
        is_container = isinstance(value, dict | list | tuple | set | collections.deque)
        if isinstance(value, nn.Module):
            self._note_module(value)  # in a list: no part of the model to torch
        elif depth > DEEPEST or id(value) in self._seen or not (is_container or _is_plain_object(value, module)):
            return
        elif len(holder := value if is_container else vars(value)) <= LONGEST:
            self._seen[id(value)] = value
            self._note(name, holder, module, depth, are_attributes=not is_container)


class _Place:
    """The attributes of a module or an object, or a container, and what is in there."""

    def __init__(self, name: str, holder: Any, are_attributes: bool) -> None:
        self._name = name
        self._holder = holder
        self._are_attributes = are_attributes
        self._size = len(holder)
        self.keys = self._keys()
        self.values = self._values(self.keys)

    def name_of(self, key: Any) -> str:
        return f"{self._name}.{key}" if self._are_attributes else f"{self._name}[{key!r}]"

    def is_unchanged(self) -> bool:
        """By identity alone: each replay asks this of each place."""
        holder = self._holder
        now = map(holder.get, self.keys, itertools.repeat(_MISSING)) if isinstance(holder, dict) else holder
        return len(holder) == self._size and all(map(operator.is_, now, self.values))

    def changes(self) -> list[Change]:
        """Also where everything is the same by value: none."""
        keys = self._keys()
        if keys != self.keys and not isinstance(self._holder, dict):
            return [Change(self._name, self._holder, None, self.values, list(self._holder))]
        before, values = (
            dict(zip(self.keys, self.values, strict=True)),
            dict(zip(keys, self._values(keys), strict=True)),
        )
        pairs = [(key, before.get(key, _MISSING), values.get(key, _MISSING)) for key in {**before, **values}]
        return [Change(self.name_of(key), self._holder, key, *pair) for key, *pair in pairs if not _is_same(*pair)]

    def _keys(self) -> list[Any]:
        if self._are_attributes:
            return [name for name in self._holder if name not in _NOT_STATE and not name.startswith(_OURS)]
        return list(self._holder if isinstance(self._holder, dict | set) else range(len(self._holder)))

    def _values(self, keys: list[Any]) -> list[Any]:
        if isinstance(self._holder, dict):
            return [self._holder[key] for key in keys]
        return list(keys if isinstance(self._holder, set) else self._holder)


class CarriedOver:
    """Tensors in whose places steps put others: copies of them, which graphs read and write."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, Any], tuple[Any, Any]] = {}  # by the holder's id: (holder, key)
        self._replaced = self._places  # by the last step that was run
        self._copies: dict[int, torch.Tensor] = {}

    def note(self, changes: Iterable[Change]) -> None:
        """What a step that was run has replaced, and the one before it, too, each will; once is no habit."""
        kept = [each for each in changes if each.key is not None and _has_tensor(each.now)]
        before, self._replaced = self._replaced, {(id(each.holder), each.key): (each.holder, each.key) for each in kept}
        self._places = {place: self._replaced[place] for place in self._replaced if place in before}

    def begin(self, state: ModuleState) -> None:
        """Put copies into the places of what steps replace, but of what shares its memory with other things."""
        times = collections.Counter(map(_memory, state.tensors()))
        for holder, key in self._places.values():
            value = _get(holder, key)
            if _has_tensor(value) and all(times[_memory(tensor)] == 1 for tensor in _tensors(value)):
                _put(holder, key, self._copied(value))

    def take(self, state: ModuleState) -> list[Change]:
        """Write into the copies what stands in their places now, and put them there again; the changes that are left,
        which no copy can take.

        What shares its memory with another thing that is kept is left, too: writes into one would be the other's.
        """
        changes = state.changes()
        if not changes:
            return []
        found = [(change, _pairs(change.before, change.now)) for change in changes]
        taken = [(change, pairs) for change, pairs in found if pairs is not None and self._are_copies(pairs)]
        written = {_memory(copy) for _, pairs in taken for copy, _ in pairs}
        kept = {_memory(tensor) for tensor in state.tensors()} - written
        times = collections.Counter(_memory(now) for _, pairs in taken for _, now in pairs)
        taken = [each for each in taken if all(times[at := _memory(now)] == 1 and at not in kept for _, now in each[1])]
        pairs = [pair for _, pairs in taken for pair in pairs]
        with torch.no_grad():
            # One may be of another's memory: `self.last_but_one = self.last`.
            values = [now.clone() if _memory(now) in written else now.detach() for _, now in pairs]
            for (copy, _), value in zip(pairs, values, strict=True):
                copy.detach().copy_(value)
        for change, _ in taken:
            _put(change.holder, change.key, change.before)
        done = {id(change) for change, _ in taken}
        return [change for change in changes if id(change) not in done]

    def _are_copies(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        return all(id(copy) in self._copies for copy, _ in pairs)

    def is_lost(self, change: Change) -> bool:
        """Whether a copy was to stand there."""
        return any(id(tensor) in self._copies for tensor in _tensors(change.before))

    def _copied(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in self._copies or not _is_dense(value):
                return value
            copy = value.detach().clone().requires_grad_(value.requires_grad and value.is_leaf)
            self._copies[id(copy)] = copy
            return copy
        if type(value) in (dict, list, collections.OrderedDict, collections.defaultdict, collections.deque):
            filled = value.copy()
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                filled[key] = self._copied(each)
            return filled
        if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
            each = list(map(self._copied, value))
            return type(value)(*each) if hasattr(value, "_fields") else tuple(each)
        return value  # of a class of its own: nobody knows how to make one


def _is_plain_object(value: Any, module: nn.Module) -> bool:
    """Whether an object is of the same package as a module that holds it, and no tensor, function or class."""
    if not hasattr(value, "__dict__") or callable(value) or isinstance(value, torch.Tensor):
        return False
    package = type(value).__module__.partition(".")[0]
    return package in _ANYBODYS or package == type(module).__module__.partition(".")[0] != "torch"


def _is_dense(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN and tensor.layout is torch.strided


def _memory(tensor: torch.Tensor) -> int:
    """Where it is; of one that is not dense, or is empty, nothing is known, and nobody has the same."""
    address = tensor.untyped_storage().data_ptr() if _is_dense(tensor) else 0
    return address or -id(tensor)


def _has_tensor(value: Any) -> bool:
    return next(_tensors(value), None) is not None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those in a value and in containers of it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple | collections.deque) and len(value) <= LONGEST:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _pairs(before: Any, now: Any) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """The tensors of two values and of containers of them that differ in nothing else; None of any others."""
    if now is before:
        return []
    if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
        is_alike = _is_dense(before) and _is_dense(now) and before.shape == now.shape
        return [(before, now)] if is_alike and before.dtype == now.dtype and before.device == now.device else None
    if type(before) is not type(now) or not isinstance(before, dict | list | tuple | collections.deque):
        return [] if _is_same(before, now) else None
    if isinstance(before, dict):
        if before.keys() != now.keys():
            return None
        before, now = list(before.values()), [now[key] for key in before]
    if len(before) != len(now):
        return None
    found = [_pairs(*each) for each in zip(before, now, strict=True)]
    return None if None in found else [pair for pairs in found for pair in pairs or ()]


def _is_same(before: Any, now: Any) -> bool:
    """Whether two values are the same, tensors and objects by identity."""
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(before, bool | int | float | complex | str | bytes):
        return bool(before == now or (before != before and now != now))  # a NaN equals nothing
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(_is_same(before[key], now[key]) for key in before)
    if isinstance(before, list | tuple | collections.deque):
        return len(before) == len(now) and all(map(_is_same, before, now))
    return isinstance(before, set | torch.device | torch.Size) and bool(before == now)


def _get(holder: Any, key: Any) -> Any:
    if isinstance(holder, dict):
        return holder.get(key, _MISSING)
    return holder[key] if key < len(holder) else _MISSING


def _put(holder: Any, key: Any, value: Any) -> None:
    if key is None and not isinstance(holder, dict):
        holder.clear()
        holder.update(value) if isinstance(holder, set) else holder.extend(value)
    elif value is _MISSING:
        del holder[key]
    else:
        holder[key] = value
