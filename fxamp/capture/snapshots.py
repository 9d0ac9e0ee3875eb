"""Snapshots of what objects hold that can be written in place; what was written since is told, and put back.

Elements of containers, attributes, slots, closures' variables, memory, the state of a generator of random numbers.
"""

import collections
import contextlib
import contextvars
import inspect
import random
import threading
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fxamp.capture.configs import held_by, is_config, place_of
from fxamp.capture.containers import CONTAINERS, forget_traced_types, has_equals_for, holds_still, restore
from fxamp.capture.contents import contents_of, is_file, put_contents
from fxamp.capture.elements import elements_of, is_pythons, plain_copy
from fxamp.capture.numbers import is_numpys
from fxamp.capture.objects import (
    FUNCTIONS,
    MISSING,
    attributes_of,
    foreign_attributes_of,
    held_in_slots,
    is_descriptor,
    is_library,
    pointed_at,
    read,
)
from fxamp.randomness import as_lists, is_generator, set_state, state_of

_OF_THE_PROCESS = (0, 1, 2)  # files: a log may be among them
MOST_NUMBERS = 65536  # numbers of a tensor that are copied; of a larger one is only told that it was written


class Snapshot:
    """What one object held when this was made.

    Args:
        owner: the object.
        title: how a message names it.
    """

    def __init__(self, owner: Any, title: str = "") -> None:
        self.owner, self.title = owner, title

    @property
    def parts(self) -> list[Any]:
        """Objects that it held."""
        return []

    def changes(self) -> list[str]:
        """What was done to it since, as a message says it; [] where it is as it was."""
        raise NotImplementedError

    def put_back(self) -> None:
        """Let it hold what it held."""
        raise NotImplementedError

    def _named(self) -> str:
        return f"{self.title} ({type(self.owner).__qualname__})"


class Elements(Snapshot):
    """Of a dictionary, a list, a set or a deque. (What an earlier trace's types have kept there is no element.)

    Args:
        of: the object whose attributes they are.
    """

    def __init__(self, owner: Any, title: str = "", of: Any = None) -> None:
        super().__init__(owner, title)
        self.is_beside = isinstance(of, CONTAINERS)  # an object that has elements, too
        self.saved = plain_copy(owner)
        if isinstance(self.saved, dict):
            forget_traced_types(self.saved)

    @property
    def parts(self) -> list[Any]:
        return elements_of(self.saved)

    def changes(self) -> list[str]:
        if holds_still(self.owner, self.saved) or has_equals_for(self.owner, self.saved):
            return []
        return [f"writes into {self._named()}"]

    def put_back(self) -> None:
        if not holds_still(self.owner, self.saved):
            restore(self.owner, self.saved)


class _Names(Snapshot):
    """Of what is held by names."""

    def __init__(self, owner: Any, title: str = "") -> None:
        super().__init__(owner, title)
        self.saved = self._now()

    @property
    def parts(self) -> list[Any]:
        return list(self.saved.values())

    def changes(self) -> list[str]:
        return [f"sets {name!r} of {self._named()}" for name in self._changed()]

    def put_back(self) -> None:
        for name in self._changed():
            self._put(name, self.saved.get(name, MISSING))

    def _changed(self) -> list[str]:
        now = self._now()
        return [name for name in {**self.saved, **now} if now.get(name, MISSING) is not self.saved.get(name, MISSING)]

    def _now(self) -> dict[str, Any]:
        raise NotImplementedError

    def _put(self, name: str, value: Any) -> None:
        raise NotImplementedError


class Slots(_Names):
    """Of an object of the user's."""

    def _now(self) -> dict[str, Any]:
        return held_in_slots(self.owner)

    def _put(self, name: str, value: Any) -> None:
        if value is MISSING:
            object.__delattr__(self.owner, name)
        else:
            object.__setattr__(self.owner, name, value)


class OfClass(_Names):
    """Attributes of a class of the user's."""

    def changes(self) -> list[str]:
        return [f"sets {self.owner.__qualname__}.{name}" for name in self._changed()]

    def _now(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self.owner).items() if not name.startswith("__")}

    def _put(self, name: str, value: Any) -> None:
        put(self.owner, name, value)


class Variable(_Names):
    """Of an enclosing function: a closure's cell."""

    def _now(self) -> dict[str, Any]:
        return {"": read(self.owner, "")}

    def _put(self, name: str, value: Any) -> None:
        put(self.owner, name, value)


class Foreign(_Names):
    """Attributes of a tensor or of a library's object.

    What those compute once (`Normal.variance`) and what they keep under names of their own (`DeviceMesh._hash`) is no
    write of the user's, nor what a thread sets in a `threading.local` when it first asks.
    """

    def changes(self) -> list[str]:
        return [f"sets {name!r} of {self._named()}" for name in self._changed() if not self._is_its_own(name)]

    def _changed(self) -> list[str]:
        changed = super()._changed()
        if isinstance(self.owner, torch.Tensor):
            return [name for name in changed if not name.startswith("_")]
        return [name for name in changed if name in self.saved or not isinstance(self.owner, threading.local)]

    def _is_its_own(self, name: str) -> bool:
        is_computed = is_descriptor(inspect.getattr_static(type(self.owner), name, None))
        return name.startswith("_") or (name not in self.saved and is_computed)

    def _now(self) -> dict[str, Any]:
        return dict(foreign_attributes_of(self.owner) or {})

    def _put(self, name: str, value: Any) -> None:
        put(self.owner.__dict__, name, value)


class OfConfig(_Names):
    """What a node of a configuration holds."""

    def _now(self) -> dict[str, Any]:
        return {str(place_of(self.owner)): held_by(self.owner)}

    def put_back(self) -> None:
        super().put_back()
        if vars(self.owner).get("_flags_cache"):  # of flags that were set, perhaps
            vars(self.owner)["_flags_cache"] = None

    def _put(self, name: str, value: Any) -> None:
        vars(self.owner)[name] = value


class Contents(Snapshot):
    """Of memory and texts: see contents.py."""

    def __init__(self, owner: Any, contents: Any, title: str = "") -> None:
        super().__init__(owner, title)
        self._contents = contents
        self._copy = owner.copy() if is_numpys(owner) else None

    def changes(self) -> list[str]:
        return [] if contents_of(self.owner) == self._contents else [f"writes into {self._named()}"]

    def put_back(self) -> None:
        if contents_of(self.owner) != self._contents:
            put_contents(self.owner, self._copy, self._contents)


class Generator(Snapshot):
    """Of random numbers."""

    def __init__(self, owner: Any, title: str = "") -> None:
        super().__init__(owner, title)
        self._state = state_of(owner)
        self._numbers = as_lists(self._state)

    def changes(self) -> list[str]:
        return [] if self._is_same() else [f"draws from a {type(self.owner).__qualname__}"]

    def put_back(self) -> None:
        if not self._is_same():
            set_state(self.owner, self._state)

    def _is_same(self) -> bool:
        return bool(as_lists(state_of(self.owner)) == self._numbers)


class OfContext(Snapshot):
    """A context variable's value."""

    def __init__(self, owner: Any, title: str = "") -> None:
        super().__init__(owner, title)
        self._value = pointed_at(owner)

    @property
    def parts(self) -> list[Any]:
        return [self._value]

    def changes(self) -> list[str]:
        is_same = pointed_at(self.owner) is self._value
        return [] if is_same else [f"sets the context variable {self.owner.name!r}"]

    def put_back(self) -> None:
        if self._value is not MISSING and self.changes():  # else only who has set it could take it back
            self.owner.set(self._value)


class Position(Snapshot):
    """In an open file. What was written there stays: others may write into it, too."""

    def __init__(self, owner: Any, place: int, title: str = "") -> None:
        super().__init__(owner, title)
        self._place = place

    def changes(self) -> list[str]:
        return [] if position_of(self.owner) == self._place else [f"reads or writes {self._named()}"]

    def put_back(self) -> None:
        if self.changes() and not self.owner.writable():
            self.owner.seek(self._place)


def position_of(file: Any) -> int | None:
    """Where an open file stands; None for one that has no place, and for what the whole process writes to."""
    try:
        return file.tell() if file.seekable() and file.fileno() not in _OF_THE_PROCESS else None
    except Exception:  # it is closed, is being read line by line, is none of the system's, or of a class of the user's
        return None


class Numbers(Snapshot):
    """Of a tensor.

    Args:
        most: of a larger one nothing is copied, and it cannot be put back.
    """

    def __init__(self, owner: torch.Tensor, title: str = "", most: float = MOST_NUMBERS) -> None:
        super().__init__(owner, title)
        self._version = owner._version
        self._copy = owner.detach().clone() if owner.numel() <= most else None

    @property
    def is_lost(self) -> bool:
        """Whether it was written, and cannot be put back."""
        return self._copy is None and bool(self.changes())

    def changes(self) -> list[str]:
        return [] if self.owner._version == self._version else [f"writes into {self._named()}"]

    def put_back(self) -> None:
        if self._copy is not None and self.changes():
            with torch.no_grad():
                self.owner.detach().copy_(self._copy)


def snapshots_of(value: Any, title: str = "") -> Iterator[Snapshot]:
    """Of all that an object holds itself; of a file, whose own attributes tell how far it is, that alone."""
    if is_file(value):
        if (place := position_of(value)) is not None:
            yield Position(value, place, title)
        return
    if isinstance(value, CONTAINERS) and not is_pythons(value):
        yield Elements(value, title)
    if (attributes := attributes_of(value)) is not None:
        yield Elements(attributes, title, of=value)
    foreign = foreign_attributes_of(value)
    if foreign is not None and not any(map(is_file, foreign.values())):  # as an archive's, they tell what is in it
        yield Foreign(value, title)
    if held_in_slots(value):
        yield Slots(value, title)
    if is_config(value):
        yield OfConfig(value, title)
    if is_generator(value):
        yield Generator(value, title)
    if isinstance(value, contextvars.ContextVar):
        yield OfContext(value, title)
    if (contents := contents_of(value)) is not None:
        yield Contents(value, contents, title)


def is_lost_by_dynamo(value: Any) -> bool:
    """Whether Dynamo does not see what is done to it: it freezes what a random.Random gives, and reads a deque of a
    certain length as if it grew (torch 2.13).
    """
    if isinstance(value, collections.deque):
        return value.maxlen is not None
    return isinstance(value, random.Random) and is_generator(value)


def put_all_back(snapshots: Iterable[Snapshot]) -> None:
    """Put back whatever can be, the last first: a view may come after the whole."""
    for each in reversed(list(snapshots)):
        with contextlib.suppress(Exception):  # forward has closed it, or its class forbids that
            each.put_back()


def is_users_class(value: Any) -> bool:
    """Whether it is a class of the user's."""
    return isinstance(value, type) and not is_library(value)


def put(owner: Any, name: Any, value: Any) -> None:
    """Set an attribute of a module, a class or a function, a variable, or an item; take it away for MISSING."""
    if isinstance(owner, torch.nn.Module):
        owner = owner.__dict__
    if isinstance(owner, types.CellType):
        if value is MISSING:
            del owner.cell_contents
        else:
            owner.cell_contents = value
    elif isinstance(owner, (type, *FUNCTIONS)):
        if value is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    elif value is MISSING:
        owner.pop(name, None)
    else:
        owner[name] = value
