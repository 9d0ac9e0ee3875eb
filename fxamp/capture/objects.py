"""What Python objects are made of: their parts, and stand-ins that are equal where the parts that matter are.

An object whose class forbids what a reader asks of it is looked at as a whole.
"""

import argparse
import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fxamp.capture.configs import PACKAGES, held_by, is_config, parts_of_config
from fxamp.capture.contents import IN_MEMORY, is_file, numbers_of
from fxamp.capture.elements import (
    CONTAINERS,
    MOST,
    SCALARS,
    is_looked_into,
    is_pythons,
    is_too_long,
    length_of,
    named_elements,
    plain_copy,
)
from fxamp.capture.held_tensors import paths_by_id, places_read_anew
from fxamp.capture.numbers import is_numpys
from fxamp.capture.places import Place, paths_of_tensors

MISSING = object()  # nothing has the name
EVERYTHING = "**"  # among names: all attributes of objects matter
METHODS = (types.MethodType, types.BuiltinMethodType)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType)
POINTERS = (contextvars.ContextVar, weakref.ref)  # of which another object may be reached without a write into them
DEPTH = 6  # containers in containers that are compared
_MOST_BYTES = 2**20  # of an array
_WALKED = 4  # containers in containers that are looked through for whatever may matter


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
        root: the model.
        held: attributes of its modules that are containers of which a graph reads the tensors anew at each call.
    """

    names: frozenset[str]
    paths: dict[int, str]
    root: nn.Module | None = None
    held: frozenset[Place] = frozenset()

    @functools.cached_property
    def _tensors(self) -> dict[int, str]:
        if self.root is None:
            return {}
        return paths_of_tensors(self.root) | paths_by_id(places_read_anew(self.root, self.held))

    def place_of(self, value: Any) -> tuple[str, ...]:
        """Where a graph reads a tensor, wherever it is met: the path in the model of one that stands there."""
        path = self._tensors.get(id(value)) if isinstance(value, torch.Tensor) else None
        return () if path is None else (path,)

    def path_of(self, value: Any) -> str | None:
        """The path of a module of the model, None for anything else."""
        if not isinstance(value, nn.Module):
            return None
        is_root = self.root is not None and is_other_self(value, self.root)
        return self.paths.get(id(value), "" if is_root else None)


def is_other_self(module: nn.Module, root: nn.Module) -> bool:
    """Whether a module stands for the same model as the root: converted ones share the dictionary of parameters."""
    return module is not root and module.__dict__.get("_parameters", MISSING) is root.__dict__["_parameters"]


Met = dict[int, tuple[int, int, Any]]  # id -> number, how deep it was looked into, the object itself


def frozen(value: Any, scope: Scope, depth: int = DEPTH, met: Met | None = None) -> tuple[Any, ...]:
    """A comparable stand-in for a value: equal for an equal value, also for that of a copied model.

    Containers stand for their elements and objects for those attributes that the model's functions name.

    Args:
        met: what was met on the way here, which stands for itself from then on: objects may be linked in many ways.
    """
    if isinstance(value, SCALARS):
        return (type(value), _plain_scalar(value))
    if (path := scope.path_of(value)) is not None:
        return (nn.Module, path)
    met = {} if met is None else met
    number, looked_into, _ = met.get(id(value), (len(met), 0, None))
    if looked_into >= max(depth, 1):
        return (type(value), number)
    parts = parts_of(value, scope) if depth else None
    if parts is None:
        return (type(value), _Same(value), *scope.place_of(value))
    met[id(value)] = number, depth, value
    # A library's object may hold more than its attributes tell.
    is_foreign = attributes_of(value) is None and namespace_of(value) is not None
    itself = (_Same(value),) if is_foreign or is_too_long(value) else ()
    inside = depth_inside(value, depth)
    return (type(value), *itself, *((name, frozen(part, scope, inside, met)) for name, part in parts))


def depth_inside(value: Any, depth: int) -> int:
    """How deep parts of a value are compared: not at all where it is long, but for which they are; of a configuration
    all the way.
    """
    if is_config(value):
        return depth
    return depth - 1 if not isinstance(value, CONTAINERS) or is_looked_into(value) else 0


def _plain_scalar(value: Any) -> Any:
    """A scalar of a class derived from a number or a text as Python's own, which compares by what it holds."""
    for kind, plain in _PLAIN.items():
        if isinstance(value, kind) and type(value) not in (kind, bool) and not isinstance(value, enum.Enum):
            return plain(value)
    return value


_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
}


def parts_of(value: Any, scope: Scope) -> list[tuple[Any, Any]] | None:
    """The named parts of a container or an object, None for what is looked at as a whole."""
    try:
        return _parts_of(value, scope)
    except Exception:  # its class forbids the question
        return None


def _parts_of(value: Any, scope: Scope) -> list[tuple[Any, Any]] | None:
    if isinstance(value, METHODS):
        return method_parts(value)
    if isinstance(value, (*FUNCTIONS, torch.Tensor, nn.Module)):
        return None
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, POINTERS):
        return [("value", pointed_at(value))]
    if is_config(value):
        return parts_of_config(value)
    if isinstance(value, types.MappingProxyType):
        return list(dict(value).items())
    if isinstance(value, CONTAINERS):
        if is_pythons(value):
            return None
        elements = named_elements(value) if not is_too_long(value) else [("length", length_of(value))]
        return [*elements, *attributes_named(value, scope)]
    if is_array(value):
        return [("numbers", numbers_of(value))] if memoryview(value).nbytes <= _MOST_BYTES else None
    has_any = namespace_of(value) is not None or any(name in scope.names for name in slots_of(class_of(value)))
    return attributes_named(value, scope) if has_any else None


def attributes_named(value: Any, scope: Scope) -> list[tuple[str, Any]]:
    """The attributes of an object, those in slots too, that the model's functions name."""
    is_foreign = is_library(class_of(value))
    slots = [] if is_foreign else [name for name in slots_of(class_of(value)) if name in scope.names]
    held = namespace_of(value) or {}
    if EVERYTHING in scope.names and not is_foreign:
        held_names = {name for name in held if isinstance(name, str) and name.isidentifier()}
    else:
        held_names = {name for name in held if name in scope.names}  # there may be thousands of names
    return [(name, getattr(value, name, MISSING)) for name in sorted({*slots, *held_names})]


def pointed_at(value: Any) -> Any:
    """What a context variable holds in this thread and task, or what a weak reference is to; MISSING for nothing."""
    return value.get(MISSING) if isinstance(value, contextvars.ContextVar) else value()


def read(holder: Any, name: str) -> Any:
    """What a holder has now; MISSING for nothing."""
    if isinstance(holder, types.FunctionType):
        return getattr(holder, name)
    if isinstance(holder, types.CellType):
        try:
            return holder.cell_contents
        except ValueError:
            return MISSING
    return holder.get(name, MISSING)


def class_of(value: Any) -> type:
    """An object's class; of a weak proxy that of the object behind it."""
    kind: type = value.__class__ if type(value) in weakref.ProxyTypes else type(value)
    return kind


_shared: dict[int, weakref.ref[Any]] = {}


def share_arrays(value: Any, tensors: Iterable[torch.Tensor]) -> None:
    """Note of the arrays of numpy in a value which of them a graph reads itself, by tensors in their memory."""
    dense = (each for each in tensors if type(each) is torch.Tensor and each.layout is torch.strided)
    held = {each.untyped_storage().data_ptr() for each in dense if each.device.type == "cpu"}
    for part in walk(value) if held else ():
        if is_numpys(part) and part.__array_interface__["data"][0] in held:
            number = id(part)
            _shared[number] = weakref.ref(part, lambda _, number=number: _shared.pop(number, None))  # type: ignore[misc]


def is_array(value: Any) -> bool:
    """Whether it is an array of numbers that can be written in place, and that a graph holds as they were."""
    if isinstance(value, IN_MEMORY):
        return True
    return is_numpys(value) and not value.dtype.hasobject and id(value) not in _shared


def method_parts(value: Any) -> list[tuple[str, Any]] | None:
    """The function and the plain object of a method. (A module's method stands for the same one of its copy.)"""
    owner = value.__self__
    is_plain = owner is not None and not isinstance(owner, (nn.Module, type, types.ModuleType))
    if isinstance(value, types.MethodType):
        return [("func", value.__func__), *([("self", owner)] if is_plain else [])]
    return [("func", value.__name__), ("self", owner)] if is_plain else None


# Packages that hold no state of a model's, but much of their own, and are handed no tensors.
_TOOLS = frozenset({"_pytest", "mpmath", "pandas", "pytest", "re", "scipy", "sympy", "tqdm", *PACKAGES})
_LIBRARIES = frozenset({*sys.stdlib_module_names, *_TOOLS, "torch", "fxamp", "numpy"}) - {"__main__"}
# Written in Python: their methods tell which attributes matter, as those of the user's classes do.
_WRAPPERS = (
    *(collections.UserDict, collections.UserList, collections.ChainMap),
    *(threading.Event, queue.Queue, weakref.WeakValueDictionary),
)
_NAMESPACES = frozenset({types.SimpleNamespace, argparse.Namespace, *_WRAPPERS})


def is_library(kind: type) -> bool:
    """Whether a class is Python's, torch's, numpy's or this package's, and no mere namespace or wrapper."""
    return _is_library_name(kind.__module__) and _NAMESPACES.isdisjoint(kind.__mro__)


def is_library_module(module: types.ModuleType) -> bool:
    """The same for a Python module."""
    return _is_library_name(module.__name__)


def is_of_a_tool(function: types.FunctionType) -> bool:
    """Whether a function is one of a package that holds no state of a model's."""
    return str(function.__module__).partition(".")[0] in _TOOLS


def _is_library_name(name: str) -> bool:
    return str(name).partition(".")[0] in _LIBRARIES


def is_descriptor(value: Any) -> bool:
    """Whether it is a function, a property or the like: no state of the class that holds it."""
    return hasattr(type(value), "__get__")


@functools.lru_cache(maxsize=512)
def slots_of(kind: type) -> tuple[str, ...]:
    """The attributes for which a class and its bases declare slots, by the names that `getattr` takes."""
    names: list[str] = []
    for each in kind.__mro__:
        declared = vars(each).get("__slots__", ())
        own = each.__name__.lstrip("_")
        for name in (declared,) if isinstance(declared, str) else declared:
            is_private = name.startswith("__") and not name.endswith("__") and own
            names.append(f"_{own}{name}" if is_private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def held_in_slots(value: Any) -> dict[str, Any]:
    """What the slots of an object of the user's hold, MISSING where one is empty."""
    if isinstance(value, (*SCALARS, *FUNCTIONS, torch.Tensor, nn.Module)) or is_library(class_of(value)):
        return {}
    try:
        return {name: getattr(value, name, MISSING) for name in slots_of(class_of(value))}
    except Exception:  # its class forbids the question
        return {}


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object of the user's, None for anything else."""
    if isinstance(value, (*SCALARS, *FUNCTIONS, torch.Tensor, nn.Module)) or is_library(class_of(value)):
        return None
    try:
        own = getattr(value, "__dict__", None)
    except Exception:  # its class forbids the question
        return None
    return own if isinstance(own, dict) else None


def namespace_of(value: Any) -> dict[str, Any] | None:
    """The same also for an object of a library's that may hold what a model reads: an optimizer, a schedule, a
    distribution, a sampler.
    """
    kind = class_of(value)
    if not is_library(kind) or isinstance(value, (*SCALARS, *FUNCTIONS, torch.Tensor, nn.Module)):
        return attributes_of(value)
    if str(kind.__module__).startswith(_LET_BE) and kind is not threading.local:
        return None
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) else None


def foreign_attributes_of(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of a tensor, or of a library's object that `namespace_of` tells of; None for anything else."""
    if isinstance(value, torch.Tensor):
        return value.__dict__
    return namespace_of(value) if is_library(class_of(value)) else None


# Of their objects nothing is watched: they stand for functions and types, are asked for at each line that logs, or are
# what fxamp itself works with.
_LET_BE = (
    *(*_TOOLS, "builtins", "functools", "typing", "abc", "operator", "inspect", "contextlib", "logging", "warnings"),
    *("fxamp.", "torch.fx.", "torch._", "torch.jit.", "torch.utils.hooks"),
)


def walk(value: Any, into_libraries: bool = False) -> Iterator[Any]:
    """A value, and what its containers and the user's objects in it hold, each once; where asked for, objects of
    libraries too.
    """
    waiting, seen = [(value, _WALKED)], dict[int, tuple[int, Any]]()
    while waiting:
        part, left = waiting.pop()
        is_scalar = isinstance(part, SCALARS)
        if not is_scalar:
            looked_into, _ = seen.get(id(part), (-1, None))
            if looked_into >= left:
                continue
            seen[id(part)] = left, part
        if is_scalar or looked_into < 0:
            yield part
        if left == 0 or is_scalar or isinstance(part, nn.Module):
            continue
        with contextlib.suppress(Exception):  # its class forbids the question
            inside = left if is_config(part) else left - 1  # a configuration is looked through to its last node
            waiting += [(each, inside) for each in reversed(inside_of(part, into_libraries))]


def inside_of(value: Any, into_libraries: bool = True) -> list[Any]:
    """What a container or an object holds, and what a method, a partial or a reference is of."""
    if isinstance(value, METHODS):
        return [part for _, part in method_parts(value) or ()]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, POINTERS):
        return [pointed_at(value)]
    if is_config(value):
        return [held_by(value), *(part for _, part in parts_of_config(value))]
    if is_numpys(value) and value.dtype.hasobject:
        return value.ravel().tolist() if value.size <= MOST else []
    if isinstance(value, torch.Tensor):
        return [part for name, part in value.__dict__.items() if not name.startswith("_")]
    inside: list[Any] = []
    if isinstance(value, CONTAINERS) and is_looked_into(value):
        held = plain_copy(value)
        inside += held.values() if isinstance(held, dict) else held
    if isinstance(value, FUNCTIONS) or is_file(value) or (is_library(type(value)) and not into_libraries):
        return inside
    inside += [getattr(value, name) for name in slots_of(class_of(value)) if hasattr(value, name)]
    attributes = (namespace_of(value) if into_libraries else attributes_of(value)) or {}
    return [*inside, *dict.values(attributes)] if dict.__len__(attributes) <= MOST else inside
