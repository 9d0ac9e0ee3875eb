"""What functions of the model reach besides what they are given: whether it is as it was.

def look(kinds):
    SEEN.append(len(kinds))     # a list of the file's: who runs the function once more appends twice
    return table_for(kinds, STATE["scale"])
"""

import contextlib
import inspect
import random
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from fxamp.capture.elements import is_pythons
from fxamp.capture.locations import is_library_function
from fxamp.capture.objects import FUNCTIONS, MISSING, is_library
from fxamp.capture.unseen import CONTAINERS, is_refilled, refill

_MOST = 65536
"""So many objects are looked at."""


class Name(NamedTuple):
    """A global that functions name."""

    space: dict[str, Any]
    name: str
    is_drawn_from: bool  # the code that names it names "random", too

    @property
    def value(self) -> Any:
        return self.space.get(self.name, MISSING)


def names_in(functions: Iterable[types.FunctionType], kinds: Iterable[type]) -> list[Name]:
    """The globals that functions name, and those that they call.

    Args:
        kinds: classes of modules, whose methods they may call.
    """
    found: dict[tuple[int, str], Name] = {}
    known = set(kinds)
    waiting, seen = list(functions), set()
    while waiting:
        function = waiting.pop()
        if function in seen or is_library_function(function):
            continue
        seen.add(function)
        texts = set(_names_of(function.__code__))
        for text in texts:
            name = Name(function.__globals__, text, "random" in texts)
            if name.value is not MISSING:
                found[id(name.space), text] = name
            members = (inspect.getattr_static(kind, text, None) for kind in known)
            waiting += (each for each in (name.value, *members) if isinstance(each, types.FunctionType))
    return list(found.values())


def draws_random_numbers(names: Iterable[Name]) -> bool:
    """Whether Python's or numpy's generator is among these: a function may draw in some calls alone."""
    numpy = sys.modules.get("numpy")
    drawing = {id(random), id(numpy and numpy.random)}
    kinds = (random.Random, numpy.random.RandomState, numpy.random.Generator) if numpy else (random.Random,)
    return any(
        id(name.value) in drawing
        or isinstance(name.value, kinds)
        or isinstance(getattr(name.value, "__self__", None), kinds)
        or (name.value is numpy and name.is_drawn_from)
        for name in names
    )


def _names_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_of(inner)


class Reached:
    """What names stand for now, and what that and other values hold.

    Args:
        names: globals.
        values: what else is reached.
    """

    def __init__(self, names: list[Name], values: Iterable[Any] = ()) -> None:
        self._names = [(name, name.value) for name in names]
        self._held: dict[int, tuple[Any, Any]] = {}
        waiting = [*values, *(value for _, value in self._names)]
        while waiting and len(self._held) < _MOST:
            value, parts = waiting.pop(), None
            if id(value) not in self._held:
                with contextlib.suppress(Exception):  # its class forbids the question
                    parts = _contents(value)
            if parts is not None:
                self._held[id(value)] = value, parts
                waiting += parts.values() if isinstance(parts, dict) else parts

    def holds(self, value: Any) -> bool:
        """Whether this very object is among what is reached."""
        return id(value) in self._held

    def are_changed(self) -> bool:
        """Whether anything is not as it was."""
        return any(name.value is not value for name, value in self._names) or any(
            _is_changed(value, parts) for value, parts in self._held.values()
        )

    def put_back(self) -> None:
        """Let all be as it was."""
        for name, value in self._names:
            if name.value is not value:
                name.space[name.name] = value
        for value, parts in self._held.values():
            _put_back(value, parts)


def _contents(value: Any) -> Any:
    """A copy of what is in an object that can be changed, None for any other."""
    if isinstance(value, (*FUNCTIONS, torch.Tensor)):
        return None
    if type(value) in CONTAINERS:
        return None if is_pythons(value) else value.copy()
    if type(value) is tuple:
        return value
    if _is_array(value):
        return [value.copy()]
    if isinstance(value, nn.Module) or not is_library(type(value)):
        held = getattr(value, "__dict__", None)
        return dict(held) if isinstance(held, dict) else None
    return None


def _is_changed(value: Any, parts: Any) -> bool:
    if _is_array(value):
        return bool(parts[0].tobytes() != value.tobytes())
    return type(value) is not tuple and is_refilled(_container(value), parts)


def _put_back(value: Any, parts: Any) -> None:
    if not _is_changed(value, parts):
        return
    if _is_array(value):
        value[...] = parts[0]
    else:
        refill(_container(value), parts)


def _container(value: Any) -> Any:
    return value if type(value) in CONTAINERS else value.__dict__


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__qualname__ == "ndarray"
