"""What forward does to Python state while it is traced: remembered before, undone and told of afterwards.

A graph makes no such writes, and a trace would leave its own values in the user's objects.
"""

import contextlib
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fxamp.capture.containers import forget_traced_types, holds_still, items_of
from fxamp.capture.elements import SCALARS
from fxamp.capture.iterators import Drawn, is_iterator
from fxamp.capture.objects import MISSING, is_descriptor, is_library, read, walk
from fxamp.capture.refusals import for_python
from fxamp.capture.settings import Settings
from fxamp.capture.snapshots import (
    Elements,
    Foreign,
    OfClass,
    Snapshot,
    is_lost_by_dynamo,
    put,
    put_all_back,
    snapshots_of,
)
from fxamp.capture.torch_settings import SETTINGS
from fxamp.errors import CaptureError

DEFAULT = "a default of "  # how the title of what an argument holds begins


@dataclasses.dataclass(frozen=True)
class _Computed:
    """Stands for a cached property: computed at each read where the object has kept no value, and kept nowhere."""

    function: Callable[[Any], Any]

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else self.function(owner)


class Effects:
    """State that forward reads and may write, as it was before. (What modules hold themselves: see `untouched`.)

    Attributes:
        classes: what each class of the user's holds, where forward may count.
    """

    def __init__(self) -> None:
        self.classes: dict[type, dict[str, Any]] = {}
        self._variables: list[tuple[Any, str, Any, str]] = []  # owner, name, value, title
        self._elements: dict[int, Elements] = {}  # by the id of the container
        self._taken: set[int] = set()  # of containers
        self._others: dict[tuple[int, type], Snapshot] = {}  # (id of an object, kind of snapshot)
        self._noted: dict[tuple[int, bool, bool], Any] = {}  # (id of an object, is it the user's, is_all) -> it
        self._opened: dict[tuple[int, str], tuple[Any, str, Any]] = {}  # (id of owner, name) -> owner, name, value
        self._caches: dict[int, tuple[Any, int]] = {}  # id -> cached function, values it has kept

    def remember(self, owner: Any, name: str, value: Any, title: str) -> None:
        """Remember a variable, and all that can be written through it.

        Args:
            owner: a module, a class, a Python module's namespace, or a closure's cell.
            title: how a message names it.
        """
        if not isinstance(owner, nn.Module) and owner is not SETTINGS:
            self._variables.append((owner, name, value, title))
        self.remember_held(value, title)
        for part in walk(value):
            self.remember_class(part)
            if isinstance(part, functools._lru_cache_wrapper):
                self._caches.setdefault(id(part), (part, part.cache_info().misses))
        self._open_cache(owner, name, value)
        if is_iterator(value):
            self._opened[id(owner), name] = (owner, name, value)
            put(owner, name, Drawn(value, title))

    def remember_held(self, value: Any, title: str, is_all: bool = True) -> None:
        """Remember what a value and the objects in it hold, but for containers of libraries' objects.

        Args:
            is_all: or the user's containers alone, as forward may not come to it.
        """
        if type(value) is dict and not value:  # most functions' attributes
            self._note([Elements(value, title)])
            return
        own = set(map(id, walk(value)))
        for part in walk(value, into_libraries=is_all):
            key = id(part), id(part) in own, is_all
            if isinstance(part, SCALARS) or key in self._noted:  # as it was when it was first read
                continue
            self._noted[key] = part
            with contextlib.suppress(Exception):  # its class forbids the question
                found = list(snapshots_of(part, title))
                self._note(each for each in found if (id(part) in own if isinstance(each, Elements) else is_all))

    def _note(self, snapshots: Iterable[Snapshot]) -> None:
        for each in snapshots:
            if not isinstance(each, Elements):
                self._others.setdefault((id(each.owner), type(each)), each)
            elif id(each.owner) not in self._elements:
                self._elements[id(each.owner)] = each
                self._stop_iterators(each.owner, each.title)

    def _stop_iterators(self, container: Any, title: str) -> None:
        """Put something in the place of each iterator in a container that refuses to give an element."""
        for key, value in items_of(container):
            if is_iterator(value):
                self._opened[id(container), key] = container, key, value
                put(container, key, Drawn(value, f"an iterator in {title}"))

    def held_before(self, container: Any) -> Any:
        """A copy of what a container held when it was first read; None where it was not."""
        return self._elements[id(container)].saved if id(container) in self._elements else None

    def take(self, container: Any) -> None:
        """Let what is written into a container be the graph's to write."""
        self._taken.add(id(container))

    def remember_class(self, value: Any) -> None:
        """Remember what a class of the user's holds, a value's or the value itself: forward may count in it."""
        for kind in (value if isinstance(value, type) else type(value)).__mro__:
            if is_library(kind) or kind in self.classes:
                continue
            self._note([snapshot := OfClass(kind)])
            self.classes[kind] = snapshot.saved
            self.remember_class(type(kind))
            for name, held in snapshot.saved.items():
                if not is_descriptor(held):
                    self.remember_held(held, f"{kind.__qualname__}.{name}", is_all=False)
                self._open_cache(kind, name, held)

    def _open_cache(self, owner: Any, name: str, value: Any) -> None:
        """Put the function itself in the place of a cached one: a cache must not keep the values of a trace."""
        cached = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if isinstance(cached, functools._lru_cache_wrapper):
            self._opened[id(owner), name] = (owner, name, value)
            put(owner, name, cached.__wrapped__ if cached is value else type(value)(cached.__wrapped__))
        elif isinstance(value, functools.cached_property):
            self._opened[id(owner), name] = (owner, name, value)
            put(owner, name, _Computed(value.func))

    def before(self, owner: Any, name: str, value: Any) -> Any:
        """What stood in a place where `value` stands during the trace."""
        return self._opened[id(owner), name][2] if (id(owner), name) in self._opened else value

    def undo(self) -> CaptureError | Settings | None:
        """Put everything as it was; the error that names what forward has first done to it, None for nothing.

        Settings where all it did was to put plain values into dictionaries: perhaps it does so in its first call alone.
        """
        for owner, name, cached in self._opened.values():
            put(owner, name, cached)
        for each in self._elements.values():
            if id(each.owner) in self._taken:
                each.put_back()
            elif isinstance(each.owner, dict):
                forget_traced_types(each.owner)
        others = {each: changes for each in self._others.values() if (changes := each.changes())}
        written = {each: changes for each in self._elements.values() if (changes := each.changes())}
        done = [*self._set_variables(), *self._filled_caches(), *itertools.chain.from_iterable(others.values())]
        set_once = [] if done else self._plain_values_set()
        done += itertools.chain.from_iterable(written.values())
        put_all_back((*self._elements.values(), *self._others.values()))
        if not done:
            return None
        text = (
            f"forward {done[0]}, and a graph holds no such writes. Return the value instead, write a buffer in place "
            "(self.buffer.copy_(value)), or, where forward sets it once, set it before convert()."
        )
        if any(map(_is_lost_by_dynamo, (*others, *written))):
            return for_python(CaptureError(text))
        return Settings(tuple(set_once), text) if set_once else CaptureError(text)

    def _plain_values_set(self) -> list[tuple[dict[Any, Any], Any, Any, Any]]:
        """What forward has put into dictionaries, if it wrote plain values alone: (dictionary, key, before, after)."""
        found = []
        for each in self._elements.values():
            container, saved = each.owner, each.saved
            if holds_still(container, saved):
                continue
            if not isinstance(container, dict) or saved.keys() - dict.keys(container):
                return []
            for name, value in dict.items(container):
                before = saved.get(name, MISSING)
                if before is value:
                    continue
                if not isinstance(value, SCALARS) or not (before is MISSING or isinstance(before, SCALARS)):
                    return []
                found.append((container, name, before, value))
        return found

    def _set_variables(self) -> list[str]:
        done = []
        for owner, name, value, title in self._variables:
            now = read(owner.__dict__ if isinstance(owner, type) else owner, name)
            if now is not value:
                put(owner, name, value)
                done.append(f"sets {title}")
        return done

    def _filled_caches(self) -> list[str]:
        """Those in containers and objects, which are not opened."""
        done = []
        for cached, misses in self._caches.values():
            if cached.cache_info().misses != misses:
                cached.cache_clear()
                done.append(f"fills the cache of {getattr(cached, '__qualname__', 'a function')}()")
        return done


def _is_lost_by_dynamo(written: Snapshot) -> bool:
    """Whether Dynamo does not see what forward does there, and computes something else.

    In containers of a class of the user's it sees neither what they have beside their elements nor what is added to a
    set (torch 2.13), and before torch 2.12 its guards see neither attributes of classes and tensors nor defaults of
    functions.
    """
    if isinstance(written, Elements):
        is_of_users = isinstance(written.owner, set) and type(written.owner) is not set
        if written.is_beside or is_of_users:
            return True
    is_unguarded = isinstance(written, (OfClass, Foreign)) or written.title.startswith(DEFAULT)
    return is_lost_by_dynamo(written.owner) or (is_unguarded and torch.__version__ < "2.12")


def clear_caches(is_of_a_trace: Callable[[Any], bool]) -> None:
    """Clear every cached function that has kept values of a trace, wherever forward found it.

    A later call with such sizes would find them by their hash, and ask them whether they are equal; or be given them.
    """
    for cached in gc.get_objects():
        if type(cached) is functools._lru_cache_wrapper and cached.cache_info().currsize:
            if any(_holds(is_of_a_trace, kept) for kept in gc.get_referents(cached)):
                cached.cache_clear()


def _holds(is_of_a_trace: Callable[[Any], bool], kept: Any, depth: int = 4) -> bool:
    """Whether a cache's entry, or its table of keys, holds such a value."""
    if depth and type(kept) in (tuple, list, dict, frozenset):
        return any(_holds(is_of_a_trace, part, depth - 1) for part in gc.get_referents(kept))
    return is_of_a_trace(kept)
