"""What forward does to Python state while it is traced: remembered before, undone and told of afterwards.

A graph makes no such writes, and a trace would leave its own values in the user's objects.
"""

import collections
import functools
import random
import types
from typing import Any

import torch
from torch import nn

from fxamp.capture.objects import DEPTH, FUNCTIONS, MISSING, MOST, SCALARS, is_library, walk
from fxamp.capture.state import read


class Effects:
    """State that forward reads and may write, as it was before. (What modules hold themselves: see `untouched`.)

    Attributes:
        counters: the plain values of each class of the user's, where forward may count.
    """

    def __init__(self) -> None:
        self.counters: dict[type, dict[str, Any]] = {}
        self._variables: list[tuple[Any, str, Any, str]] = []  # owner, name, value, title
        self._containers: list[tuple[Any, Any, str]] = []  # container, copy, title
        self._generators: dict[int, tuple[Any, Any]] = {}  # id -> generator, state
        self._caches: list[tuple[Any, str, Any]] = []  # owner, name, cached function

    def remember(self, owner: Any, name: str, value: Any, title: str) -> None:
        """Remember a variable, and all that can be written through it.

        Args:
            owner: a module, a class, a Python module's namespace, or a closure's cell.
            title: how a message names it.
        """
        if not isinstance(owner, nn.Module):
            self._variables.append((owner, name, value, title))
        self.remember_containers(value, title)
        for part in walk(value):
            self.remember_class(part)
            if (state := _random_state(part)) is not None:
                self._generators.setdefault(id(part), (part, state))
        if isinstance(value, functools._lru_cache_wrapper):
            self._open_cache(owner, name, value)

    def remember_containers(self, value: Any, title: str = "a") -> None:
        """Remember what the containers in a value hold."""
        self._containers += [(container, saved, title) for container, saved in _containers(value)]

    def remember_class(self, value: Any) -> None:
        """Remember what a class of the user's holds, a value's or the value itself: forward may count in it."""
        for kind in (value if isinstance(value, type) else type(value)).__mro__:
            if not is_library(kind) and kind not in self.counters:
                self.counters[kind] = {name: held for name, held in vars(kind).items() if isinstance(held, SCALARS)}

    def _open_cache(self, owner: Any, name: str, cached: Any) -> None:
        """Put the function itself in the place of a cached one: a cache must not keep the values of a trace."""
        self._caches.append((owner, name, cached))
        _put(owner, name, cached.__wrapped__)

    def undo(self) -> str:
        """Put everything as it was; what forward has first done to it ("sets the global 'N' of m"), "" for nothing."""
        for owner, name, cached in self._caches:
            _put(owner, name, cached)
        done = [*self._set_variables(), *self._set_counters(), *self._drawn_generators(), *self._written_containers()]
        return done[0] if done else ""

    def _set_variables(self) -> list[str]:
        done = []
        for owner, name, value, title in self._variables:
            now = read(owner.__dict__ if isinstance(owner, type) else owner, name)
            if now is not value and not (isinstance(owner, type) and value is MISSING):
                _put(owner, name, value)
                done.append(f"sets {title}")
        return done

    def _set_counters(self) -> list[str]:
        done = []
        for kind, held in self.counters.items():
            for name, value in held.items():
                if vars(kind).get(name, MISSING) is not value:
                    setattr(kind, name, value)
                    done.append(f"sets {kind.__qualname__}.{name}")
        return done

    def _drawn_generators(self) -> list[str]:
        done = []
        for generator, (before, state) in self._generators.values():
            now = _random_state(generator)
            if now is None or now[0] != before:
                _set_random_state(generator, state)
                done.append(f"draws from a {type(generator).__qualname__}")
        return done

    def _written_containers(self) -> list[str]:
        done = []
        for container, saved, title in self._containers:
            if not _is_as(container, saved):
                _restore(container, saved)
                done.append(f"writes into {title} ({type(container).__qualname__})")
        return done


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, types.CellType):
        owner.cell_contents = value
    elif isinstance(owner, (type, nn.Module)):
        setattr(owner, name, value)
    elif value is MISSING:
        owner.pop(name, None)
    else:
        owner[name] = value


def _random_state(value: Any) -> tuple[str, Any] | None:
    """The state of a generator of random numbers, as text and as it is; None for anything else."""
    if isinstance(value, random.Random):
        return repr(value.getstate()), value.getstate()
    if type(value).__module__.startswith("numpy.random") and hasattr(value, "bit_generator"):
        return repr(value.bit_generator.state), value.bit_generator.state
    return None


def _set_random_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


# --------------------------------------------------------------------------------------------- containers


def _containers(value: Any, depth: int = DEPTH) -> list[tuple[Any, Any]]:
    """The containers in a value that can change without an assignment, each with a shallow copy."""
    if depth == 0 or isinstance(value, (*SCALARS, *FUNCTIONS, torch.Tensor, nn.Module)):
        return []
    if isinstance(value, (dict, list, set, collections.deque)):
        if len(value) > MOST:
            return []
        saved = _contents(value)
        parts, found = list(saved.values() if isinstance(saved, dict) else saved), [(value, saved)]
    elif isinstance(value, tuple):
        parts, found = list(value), []
    else:
        own = None if is_library(type(value)) else getattr(value, "__dict__", None)
        return _containers(own, depth - 1) if isinstance(own, dict) else []
    return [*found, *(inner for part in parts for inner in _containers(part, depth - 1))]


def _contents(container: Any) -> Any:
    """A plain copy. (A dict of a class of its own may make its values when it is asked: transformers' ACT2FN does.)"""
    return dict(dict.items(container)) if isinstance(container, dict) else container.copy()


def _is_as(container: Any, saved: Any) -> bool:
    if len(container) != len(saved):
        return False
    if isinstance(container, dict):
        return all(dict.get(container, key, MISSING) is value for key, value in saved.items())
    if isinstance(container, set):
        return bool(container == saved)
    return all(new is old for new, old in zip(container, saved, strict=True))


def _restore(container: Any, saved: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, (list, collections.deque)) else container.update)(saved)
