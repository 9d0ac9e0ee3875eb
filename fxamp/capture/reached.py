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

from fxamp.capture.contents import contents_of, put_contents
from fxamp.capture.elements import SCALARS, is_pythons
from fxamp.capture.functions_of import functions_in
from fxamp.capture.locations import is_library_function
from fxamp.capture.numbers import is_numpys
from fxamp.capture.objects import (
    FUNCTIONS,
    MISSING,
    attributes_of,
    foreign_attributes_of,
    held_in_slots,
    is_library,
)
from fxamp.capture.state import read
from fxamp.capture.unseen import CONTAINERS, is_refilled, refill

_MOST = 65536
"""So many objects are looked at; a tensor of more numbers is only asked whether it was written."""


class Name(NamedTuple):
    """A global that functions name."""

    space: dict[str, Any]
    name: str
    is_drawn_from: bool  # the code that names it names "random", too

    @property
    def value(self) -> Any:
        return self.space.get(self.name, MISSING)


def functions_reached(functions: Iterable[Any], kinds: Iterable[type]) -> tuple[list[Name], list[types.FunctionType]]:
    """The globals that functions name, and those functions with all that they may call.

    Args:
        functions: what is none is passed over.
        kinds: classes of modules, whose methods they may call.
    """
    found: dict[tuple[int, str], Name] = {}
    known = set(kinds)
    waiting: list[Any] = list(functions)
    seen: dict[types.FunctionType, None] = {}
    while waiting:
        for function in functions_in(waiting.pop()):
            if function in seen or is_library_function(function):
                continue
            seen[function] = None
            texts = set(_names_of(function.__code__))
            for text in texts:
                name = Name(function.__globals__, text, "random" in texts)
                if name.value is not MISSING:
                    found[id(name.space), text] = name
                waiting += (name.value, *(inspect.getattr_static(kind, text, None) for kind in known))
            waiting += _held_by(function)
    return list(found.values()), list(seen)


def _held_by(function: types.FunctionType) -> list[Any]:
    """What a function holds itself: the values of arguments that are not given, and of variables around it."""
    cells = [read(cell, "") for cell in function.__closure__ or ()]
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]


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
        self._held: dict[int, _Held] = {}
        waiting = [*values, *(value for _, value in self._names)]
        while waiting and len(self._held) < _MOST:
            value = waiting.pop()
            if id(value) in self._held or isinstance(value, SCALARS):
                continue
            with contextlib.suppress(Exception):  # its class forbids the question
                held = _Held(value)
                self._held[id(value)] = held
                waiting += held.parts

    def holds(self, value: Any) -> bool:
        """Whether this very object is among what is reached."""
        return id(value) in self._held

    def are_changed(self) -> bool:
        """Whether anything is not as it was."""
        are_others = any(name.value is not value for name, value in self._names)
        return are_others or any(held.is_changed() for held in self._held.values())

    def put_back(self) -> None:
        """Let all be as it was."""
        for name, value in self._names:
            if name.value is not value:
                name.space[name.name] = value
        for held in self._held.values():
            if held.is_changed():
                held.put_back()


class _Held:
    """What one object holds now.

    Attributes:
        parts: objects that it holds.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self._table = _table_of(value)
        self._kept: Any = None if self._table is None else self._table.copy()
        self._named = _named_in(value)
        self._contents = contents_of(value)
        self._copy = value.copy() if self._contents is not None and is_numpys(value) else None
        self._version = None if not isinstance(value, torch.Tensor) or value.is_inference() else value._version
        if self._version is not None and value.numel() <= _MOST:
            self._copy = value.detach().clone()
        kept = self._kept.values() if isinstance(self._kept, dict) else self._kept or ()
        self.parts = [*kept, *self._named.values()]
        if type(value) is tuple:
            self.parts += value
        elif isinstance(value, types.FunctionType) and not is_library_function(value):
            self.parts += [*(value.__closure__ or ()), *_held_by(value)]
        elif isinstance(value, nn.Module):
            self.parts = [part for part in self.parts if part is not value._parameters and part is not value._buffers]

    def is_changed(self) -> bool:
        return (
            (self._table is not None and is_refilled(self._table, self._kept))
            or bool(self._renamed())
            or contents_of(self._value) != self._contents
            or (self._version is not None and self._value._version != self._version)
        )

    def _renamed(self) -> list[str]:
        now = _named_in(self._value)
        return [name for name in {**self._named, **now} if now.get(name, MISSING) is not self._named.get(name, MISSING)]

    def put_back(self) -> None:
        if self._table is not None:
            refill(self._table, self._kept)
        for name in self._renamed():
            _set(self._value, name, self._named.get(name, MISSING))
        if self._contents is not None:
            put_contents(self._value, self._copy, self._contents)
        if self._version is not None and self._copy is not None:
            with torch.no_grad():
                self._value.detach().copy_(self._copy)


def _table_of(value: Any) -> Any:
    """The container in which an object holds what may be changed; None where there is none."""
    if type(value) in CONTAINERS:
        return None if is_pythons(value) else value
    if isinstance(value, types.FunctionType):
        return None if is_library_function(value) else vars(value)
    if isinstance(value, (*FUNCTIONS, types.CellType)):
        return None
    held = value.__dict__ if isinstance(value, nn.Module) else attributes_of(value)
    return foreign_attributes_of(value) if held is None else held


def _named_in(value: Any) -> dict[str, Any]:
    """What is held by name and in no dictionary: in slots, by a class of the user's, in a closure's cell."""
    if isinstance(value, types.CellType):
        return {"cell_contents": read(value, "")}
    if isinstance(value, type) and not is_library(value):
        return {name: held for name, held in vars(value).items() if not name.startswith("__")}
    return held_in_slots(value)


def _set(owner: Any, name: str, value: Any) -> None:
    change = object.__setattr__ if not isinstance(owner, type) else type.__setattr__
    if value is not MISSING:
        change(owner, name, value)
    elif hasattr(owner, name):
        delattr(owner, name)
