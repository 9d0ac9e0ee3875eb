"""What functions of the model reach besides what they are given: whether it is as it was.

def look(kinds):
    SEEN.append(len(kinds))     # a list of the file's: who runs the function once more appends twice
    return table_for(kinds, STATE["scale"])
"""

import contextlib
import inspect
import itertools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from fxamp.capture.elements import SCALARS
from fxamp.capture.functions_of import codes_of, functions_in
from fxamp.capture.iterators import is_iterator
from fxamp.capture.locations import is_library_function
from fxamp.capture.objects import MISSING, inside_of, is_library_module, read, walk
from fxamp.capture.snapshots import (
    MOST_NUMBERS,
    Elements,
    Numbers,
    OfClass,
    Snapshot,
    Variable,
    is_lost_by_dynamo,
    is_users_class,
    put,
    put_all_back,
    snapshots_of,
)
from fxamp.randomness import generators_kept

_MOST = 65536  # objects that are looked at


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
            texts = {text for code in codes_of(function.__code__) for text in code.co_names}
            for name in _named_from(function.__globals__, texts):
                found[id(name.space), name.name] = name
                waiting.append(name.value)
            waiting += [inspect.getattr_static(kind, text, None) for kind in known for text in texts]
            waiting += _held_by(function)
    return list(found.values()), list(seen)


def _named_from(space: dict[str, Any], texts: set[str]) -> Iterator[Name]:
    """What is named there, and in the Python modules that are: `config.TABLE`, but for functions: `plugins.load()` may
    load others, and note that, and what is loaded stays so.
    """
    spaces = {id(space): space}
    waiting = [space]
    while waiting:
        inside = waiting.pop()
        for text in texts & inside.keys():
            value = inside[text]
            if inside is space or not functions_in(value):
                yield Name(inside, text, "random" in texts)
            if isinstance(value, types.ModuleType) and not is_library_module(value) and id(vars(value)) not in spaces:
                spaces[id(vars(value))] = vars(value)
                waiting.append(vars(value))


def _held_by(function: types.FunctionType) -> list[Any]:
    """What a function holds itself: the values of arguments that are not given, and of variables around it."""
    cells = [read(cell, "") for cell in function.__closure__ or ()]
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]


def may_take_an_element(names: Iterable[Name], values: Iterable[Any]) -> bool:
    """Whether an iterator is among what functions name or hold: the element that one gives cannot be put back.

    Args:
        values: functions, and what attributes that they name hold.
    """
    held = [name.value for name in names]
    for value in values:
        held += _held_by(value) if isinstance(value, types.FunctionType) else [value]
    return any(map(is_iterator, held))


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


def is_mistaken_by_dynamo(forward: Callable[..., Any], model: nn.Module) -> bool:
    """Whether functions of a model's name something that Dynamo would read once and for good, or give tensors hooks: of
    two attributes that forward sets, one before and one behind a `register_hook`, it loses the second (torch 2.13).
    """
    names, held = named_by(forward, model)
    functions = (value for value in held if isinstance(value, types.FunctionType))
    if any("register_hook" in code.co_names for function in functions for code in codes_of(function.__code__)):
        return True
    parts = (part for value in (*held, *(name.value for name in names)) for part in walk(value))
    return any(is_lost_by_dynamo(part) for part in parts)


def named_by(forward: Callable[..., Any], model: nn.Module) -> tuple[list[Name], list[Any]]:
    """What the functions of a model's forward name: globals, and what attributes of its modules hold."""
    kinds = {type(module) for module in model.modules()}
    names, functions = functions_reached([forward, *(kind.forward for kind in kinds)], kinds)
    return names, named_values(functions, model)


def named_values(functions: Iterable[types.FunctionType], model: nn.Module) -> list[Any]:
    """Functions, and what attributes of a model's modules hold that they name."""
    functions = list(functions)
    texts = {text for function in functions for code in codes_of(function.__code__) for text in code.co_names}
    return [*functions, *(value for each in model.modules() for name, value in vars(each).items() if name in texts)]


class Reached:
    """What names stand for now, and what that and other values hold.

    Args:
        names: globals.
        values: what else is reached.
        most: of larger tensors nothing is copied.
    """

    def __init__(self, names: list[Name], values: Iterable[Any] = (), most: float = MOST_NUMBERS) -> None:
        self._names = [(name, name.value) for name in names]
        self._held: dict[int, tuple[Any, list[Snapshot]]] = {}  # id -> an object, of what it holds
        waiting = [*values, *(value for _, value in self._names)]
        while waiting and len(self._held) < _MOST:
            value = waiting.pop()
            if id(value) in self._held or isinstance(value, SCALARS):
                continue
            with contextlib.suppress(Exception):  # its class forbids the question
                snapshots = list(_snapshots_of(value, most))
                self._held[id(value)] = value, snapshots
                waiting += _parts_of(value, snapshots)

    def holds(self, value: Any) -> bool:
        """Whether this very object is among what is reached."""
        return id(value) in self._held

    def are_changed(self) -> bool:
        """Whether anything is not as it was."""
        are_others = any(name.value is not value for name, value in self._names)
        return are_others or any(each.changes() for each in self._snapshots())

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Context: afterwards all is as it was, and so are the random generators that all code shares."""
        try:
            with generators_kept():
                yield
        finally:
            self.put_back()

    def put_back(self) -> bool:
        """Make all as it was; whether that could be done."""
        is_whole = not any(isinstance(each, Numbers) and each.is_lost for each in self._snapshots())
        for name, value in self._names:
            if name.value is not value:
                put(name.space, name.name, value)
        put_all_back(self._snapshots())
        return is_whole

    def _snapshots(self) -> Iterator[Snapshot]:
        return itertools.chain.from_iterable(snapshots for _, snapshots in self._held.values())


def _snapshots_of(value: Any, most: float) -> Iterator[Snapshot]:
    yield from snapshots_of(value)
    if isinstance(value, nn.Module):
        yield Elements(value.__dict__)
    elif isinstance(value, types.CellType):
        yield Variable(value)
    elif is_users_class(value):
        yield OfClass(value)
    elif isinstance(value, types.FunctionType) and not is_library_function(value):
        yield Elements(vars(value))
    elif isinstance(value, torch.Tensor) and not value.is_inference():
        yield Numbers(value, most=most)


def _parts_of(value: Any, snapshots: list[Snapshot]) -> list[Any]:
    parts = [part for each in snapshots for part in each.parts]
    if isinstance(value, type):
        return [*parts, *value.__mro__, type(value)]
    parts.append(type(value))
    if isinstance(value, types.FunctionType) and not is_library_function(value):
        return [*parts, *(value.__closure__ or ()), *_held_by(value)]
    if isinstance(value, nn.Module):  # parameters and buffers are looked after by whoever calls
        return [part for part in parts if part is not value._parameters and part is not value._buffers]
    return [*parts, *inside_of(value)]
