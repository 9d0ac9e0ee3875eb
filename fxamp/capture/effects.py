"""What forward does to Python state while it is traced: remembered before, undone and told of afterwards.

A graph makes no such writes, and a trace would leave its own values in the user's objects.
"""

import contextvars
import copy
import dataclasses
import functools
import gc
import inspect
import random
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxamp.capture.containers import containers_in, forget_traced_types, has_equals_for, holds_still, items_of, restore
from fxamp.capture.contents import contents_of, put_contents
from fxamp.capture.elements import SCALARS
from fxamp.capture.iterators import Drawn, is_iterator
from fxamp.capture.numbers import is_numpys
from fxamp.capture.objects import (
    MISSING,
    foreign_attributes_of,
    held_in_slots,
    is_descriptor,
    is_library,
    pointed_at,
    walk,
)
from fxamp.capture.refusals import for_python
from fxamp.capture.settings import Settings
from fxamp.capture.state import read
from fxamp.capture.torch_settings import SETTINGS
from fxamp.errors import CaptureError, FxampError, OptionError

_THE_MODULES: Any = random.random.__self__  # type: ignore[attr-defined]
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
        self._containers: dict[int, tuple[Any, Any, str]] = {}  # id -> container, copy, title
        self._taken: set[int] = set()  # of containers
        self._generators: dict[int, tuple[Any, Any]] = {}  # id -> generator, state
        self._opened: dict[tuple[int, str], tuple[Any, str, Any]] = {}  # (id of owner, name) -> owner, name, value
        self._contents: dict[int, tuple[Any, Any, Any, str]] = {}  # id -> object of C's, copy, contents, title
        self._slots: dict[int, tuple[Any, dict[str, Any], str]] = {}  # id -> object, what its slots hold, title
        self._foreign: dict[int, tuple[Any, dict[str, Any], str]] = {}  # id -> object of a library's, attributes, title
        self._caches: dict[int, tuple[Any, int]] = {}  # id -> cached function, values it has kept
        self._variables_of_context: dict[int, tuple[Any, Any]] = {}  # id -> context variable, value

    def remember(self, owner: Any, name: str, value: Any, title: str) -> None:
        """Remember a variable, and all that can be written through it.

        Args:
            owner: a module, a class, a Python module's namespace, or a closure's cell.
            title: how a message names it.
        """
        if not isinstance(owner, nn.Module) and owner is not SETTINGS:
            self._variables.append((owner, name, value, title))
        self.remember_containers(value, title)
        for part in walk(value, into_libraries=True):
            if id(part) not in self._contents and (contents := contents_of(part)) is not None:
                self._contents[id(part)] = part, copy.copy(part) if is_numpys(part) else None, contents, title
            if id(part) not in self._foreign and (own := foreign_attributes_of(part)) is not None:
                self._foreign[id(part)] = part, dict(own), title
        for part in walk(value):
            self.remember_class(part)
            if id(part) not in self._generators and (state := _random_state(part)) is not None:
                self._generators[id(part)] = (part, state)
            if id(part) not in self._slots and (slots := held_in_slots(part)):
                self._slots[id(part)] = part, slots, title
            if isinstance(part, functools._lru_cache_wrapper):
                self._caches.setdefault(id(part), (part, part.cache_info().misses))
            if isinstance(part, contextvars.ContextVar):
                self._variables_of_context.setdefault(id(part), (part, pointed_at(part)))
        self._open_cache(owner, name, value)
        if is_iterator(value):
            self._opened[id(owner), name] = (owner, name, value)
            _put(owner, name, Drawn(value, title))

    def remember_containers(self, value: Any, title: str) -> None:
        """Remember what the containers in a value hold."""
        for container, saved in containers_in(value):
            if isinstance(saved, dict):
                forget_traced_types(saved)  # an earlier trace's: forgetting them is no write of this forward's
            if id(container) not in self._containers:  # as it was when it was first read
                self._containers[id(container)] = container, saved, title
                self._stop_iterators(container, title)

    def _stop_iterators(self, container: Any, title: str) -> None:
        """Put something in the place of each iterator in a container that refuses to give an element."""
        for key, value in items_of(container):
            if is_iterator(value):
                self._opened[id(container), key] = container, key, value
                _put(container, key, Drawn(value, f"an iterator in {title}"))

    def held_before(self, container: Any) -> Any:
        """A copy of what a container held when it was first read; None where it was not."""
        return self._containers[id(container)][1] if id(container) in self._containers else None

    def take(self, container: Any) -> None:
        """Let what is written into a container be the graph's to write."""
        self._taken.add(id(container))

    def remember_class(self, value: Any) -> None:
        """Remember what a class of the user's holds, a value's or the value itself: forward may count in it."""
        for kind in (value if isinstance(value, type) else type(value)).__mro__:
            if is_library(kind) or kind in self.classes:
                continue
            self.classes[kind] = dict(vars(kind))
            for name, held in self.classes[kind].items():
                if not is_descriptor(held):
                    self.remember_containers(held, f"{kind.__qualname__}.{name}")
                self._open_cache(kind, name, held)

    def _open_cache(self, owner: Any, name: str, value: Any) -> None:
        """Put the function itself in the place of a cached one: a cache must not keep the values of a trace."""
        cached = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if isinstance(cached, functools._lru_cache_wrapper):
            self._opened[id(owner), name] = (owner, name, value)
            _put(owner, name, cached.__wrapped__ if cached is value else type(value)(cached.__wrapped__))
        elif isinstance(value, functools.cached_property):
            self._opened[id(owner), name] = (owner, name, value)
            _put(owner, name, _Computed(value.func))

    def before(self, owner: Any, name: str, value: Any) -> Any:
        """What stood in a place where `value` stands during the trace."""
        return self._opened[id(owner), name][2] if (id(owner), name) in self._opened else value

    def undo(self) -> FxampError | Settings | None:
        """Put everything as it was; the error that names what forward has first done to it, None for nothing.

        Settings where all it did was to put plain values into dictionaries: perhaps it does so in its first call alone.
        """
        for owner, name, cached in self._opened.values():
            _put(owner, name, cached)
        for container, saved, _ in self._containers.values():
            if id(container) in self._taken:
                restore(container, saved)
            elif isinstance(container, dict):
                forget_traced_types(container)
        drawn = self._drawn_generators()
        variables, in_classes, in_foreign = self._set_variables(), self._set_in_classes(), self._set_in_foreign()
        done = [
            *variables,
            *self._set_in_context(),
            *in_classes,
            *(f"draws from a {kind.__qualname__}" for kind in drawn),
            *self._filled_caches(),
            *self._written_contents(),
            *self._set_slots(),
            *in_foreign,
        ]
        set_once = self._plain_values_set() if not done else []
        is_lost = self._is_lost_by_dynamo(bool(in_classes or in_foreign))
        done += self._written_containers()
        if any(issubclass(kind, random.Random) for kind in drawn):
            return OptionError(
                "forward draws from a random.Random of its own, which a graph, and torch.compile too, would freeze to "
                "one number. Draw from the random module itself, use torch's random functions, or pass the number in."
            )
        if not done:
            return None
        text = (
            f"forward {done[0]}, and a graph holds no such writes. Return the value instead, write a buffer in place "
            "(self.buffer.copy_(value)), or, where forward sets it once, set it before convert()."
        )
        if set_once:
            return Settings(tuple(set_once), text)
        return for_python(CaptureError(text)) if is_lost else CaptureError(text)

    def _is_lost_by_dynamo(self, sets_elsewhere: bool) -> bool:
        """Whether Dynamo does not see what forward writes, and computes something else.

        It reads a deque of a certain length as if it grew (torch 2.13), and before torch 2.12 its guards see neither
        attributes of classes and tensors nor defaults of functions.
        """
        written = [(each, title) for each, saved, title in self._containers.values() if not holds_still(each, saved)]
        if any(getattr(each, "maxlen", None) is not None for each, _ in written):
            return True
        is_unguarded = sets_elsewhere or any(title.startswith(DEFAULT) for _, title in written)
        return is_unguarded and torch.__version__ < "2.12"

    def _plain_values_set(self) -> list[tuple[dict[Any, Any], Any, Any, Any]]:
        """What forward has put into dictionaries, if it wrote plain values alone: (dictionary, key, before, after)."""
        found = []
        for container, saved, _ in self._containers.values():
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
                _put(owner, name, value)
                done.append(f"sets {title}")
        return done

    def _set_in_context(self) -> list[str]:
        done = []
        for variable, value in self._variables_of_context.values():
            if pointed_at(variable) is not value:
                if value is not MISSING:  # else only who has set it could take it back
                    variable.set(value)
                done.append(f"sets the context variable {variable.name!r}")
        return done

    def _set_in_classes(self) -> list[str]:
        done = []
        for kind, held in self.classes.items():
            for name in [name for name in {**held, **vars(kind)} if not name.startswith("__")]:
                if name not in held:
                    delattr(kind, name)
                elif vars(kind).get(name, MISSING) is not held[name]:
                    setattr(kind, name, held[name])
                else:
                    continue
                done.append(f"sets {kind.__qualname__}.{name}")
        return done

    def _drawn_generators(self) -> list[type]:
        drawn = []
        for generator, (before, state) in self._generators.values():
            now = _random_state(generator)
            if now is None or now[0] != before:
                _set_random_state(generator, state)
                drawn.append(type(generator))
        return drawn

    def _filled_caches(self) -> list[str]:
        """Those in containers and objects, which are not opened."""
        done = []
        for cached, misses in self._caches.values():
            if cached.cache_info().misses != misses:
                cached.cache_clear()
                done.append(f"fills the cache of {getattr(cached, '__qualname__', 'a function')}()")
        return done

    def _written_contents(self) -> list[str]:
        done = []
        for written, saved, contents, title in reversed(self._contents.values()):  # a view may come after the whole
            if contents_of(written) != contents:
                put_contents(written, saved, contents)
                done.append(f"writes into {title} ({type(written).__qualname__})")
        return done

    def _set_slots(self) -> list[str]:
        done = []
        for owner, saved, title in self._slots.values():
            for name, value in saved.items():
                if getattr(owner, name, MISSING) is not value:
                    if value is MISSING:
                        object.__delattr__(owner, name)
                    else:
                        object.__setattr__(owner, name, value)
                    done.append(f"sets {name!r} of {title} ({type(owner).__qualname__})")
        return done

    def _set_in_foreign(self) -> list[str]:
        """Attributes of tensors and of libraries' objects, but for what those compute once: `Normal.variance`, and what
        they keep under names of their own (`DeviceMesh._hash`).
        """
        done = []
        for owner, saved, title in self._foreign.values():
            own = owner.__dict__
            for name in [name for name in {**saved, **own} if own.get(name, MISSING) is not saved.get(name, MISSING)]:
                is_own = name.startswith("_")
                if is_own and isinstance(owner, torch.Tensor):
                    continue
                is_computed = name not in saved and is_descriptor(inspect.getattr_static(type(owner), name, None))
                if not is_own and not is_computed:
                    done.append(f"sets {name!r} of {title} ({type(owner).__qualname__})")
                _put(own, name, saved.get(name, MISSING))
        return done

    def _written_containers(self) -> list[str]:
        done = []
        for container, saved, title in self._containers.values():
            if not holds_still(container, saved):
                is_told = not has_equals_for(container, saved)
                restore(container, saved)
                if is_told:
                    done.append(f"writes into {title} ({type(container).__qualname__})")
        return done


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, types.CellType):
        if value is MISSING:
            del owner.cell_contents
        else:
            owner.cell_contents = value
    elif isinstance(owner, nn.Module):
        owner.__dict__[name] = value
    elif isinstance(owner, types.FunctionType):
        setattr(owner, name, value)
    elif isinstance(owner, type):
        if value is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    elif value is MISSING:
        owner.pop(name, None)
    else:
        owner[name] = value


def _random_state(value: Any) -> tuple[Any, Any] | None:
    """The state of a generator of random numbers, comparable and as it is; None for anything else.

    The random module's own, which `from random import random` gives the method of, is looked after by whoever traces.
    """
    if isinstance(value, random.Random) and value is not _THE_MODULES:
        return value.getstate(), value.getstate()
    if isinstance(value, torch.Generator):
        with torch._C.DisableTorchFunction():
            return value.get_state().tolist(), value.get_state()
    if type(value).__module__.startswith("numpy.random"):
        if hasattr(value, "bit_generator"):
            return repr(value.bit_generator.state), value.bit_generator.state
        if hasattr(value, "get_state"):
            return repr(value.get_state(legacy=False)), value.get_state(legacy=False)
    return None


def _set_random_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


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
