"""What Python objects are made of: their parts, and stand-ins that are equal where the parts that matter are."""

import argparse
import collections
import dataclasses
import enum
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

MISSING = object()  # nothing has the name
SCALARS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType)
DEPTH, MOST = 4, 512  # containers in containers, and elements of one, that are looked at


class _Same:
    """Equal to what holds the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Scope:
    """What tells which parts of a value matter, and which modules of two models are the same.

    Attributes:
        names: attributes that the model's functions name.
        paths: id of each module of the model -> its path.
    """

    names: frozenset[str]
    paths: dict[int, str]


def frozen(value: Any, scope: Scope, depth: int = DEPTH) -> tuple[Any, ...]:
    """A comparable stand-in for a value: equal for an equal value, also for that of a copied model.

    Containers stand for their elements and objects for those attributes that the model's functions name.
    """
    if isinstance(value, SCALARS):
        return (type(value), value)
    if isinstance(value, types.MethodType):
        return (types.MethodType, value.__func__)
    if isinstance(value, nn.Module) and id(value) in scope.paths:
        return (nn.Module, scope.paths[id(value)])
    parts = parts_of(value, scope) if depth else None
    if parts is None:
        return (type(value), _Same(value))
    return (type(value), *((name, frozen(part, scope, depth - 1)) for name, part in parts))


def parts_of(value: Any, scope: Scope) -> list[tuple[Any, Any]] | None:
    """The named parts of a container or an object, None for what is looked at as a whole."""
    if isinstance(value, (*FUNCTIONS, torch.Tensor, nn.Module)):
        return None
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, (dict, list, tuple, set, frozenset, collections.deque)) and len(value) > MOST:
        return None
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple, collections.deque)):
        return list(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return [("elements", element) for element in sorted(value, key=repr)]
    if is_library(type(value)):
        return None
    slots = [name for kind in type(value).__mro__ for name in _slots(kind) if name in scope.names]
    own = getattr(value, "__dict__", None)
    if not slots and not isinstance(own, dict):
        return None
    named = sorted({*slots, *(scope.names & own.keys() if isinstance(own, dict) else ())})
    return [(name, getattr(value, name, MISSING)) for name in named]


_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "fxamp", "numpy"}) - {"__main__"}
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)


def is_library(kind: type) -> bool:
    """Whether a class is Python's, torch's, numpy's or this package's, and no mere namespace."""
    return _is_library_name(kind.__module__) and not issubclass(kind, _NAMESPACES)


def is_library_module(module: types.ModuleType) -> bool:
    """The same for a Python module."""
    return _is_library_name(module.__name__)


def _is_library_name(name: str) -> bool:
    return str(name).partition(".")[0] in _LIBRARIES


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def walk(value: Any, depth: int = DEPTH) -> Iterator[Any]:
    """A value, and what its containers and the user's objects in it hold."""
    yield value
    if depth == 0 or isinstance(value, (*SCALARS, *FUNCTIONS, torch.Tensor, nn.Module)):
        return
    if isinstance(value, (dict, list, tuple, set, collections.deque)):
        parts = list(value.values() if isinstance(value, dict) else value) if len(value) <= MOST else []
    else:
        own = None if is_library(type(value)) else getattr(value, "__dict__", None)
        parts = list(own.values()) if isinstance(own, dict) and len(own) <= MOST else []
    for part in parts:
        yield from walk(part, depth - 1)
