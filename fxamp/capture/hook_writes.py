"""What a hook may write: on which objects it stores, as far as its code and that of what it calls tell."""

import collections
import dis
import functools
import inspect
import itertools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fxamp.capture.functions_of import codes_of, functions_in, named_in
from fxamp.capture.locations import is_library_file
from fxamp.capture.objects import is_other_self

_MOST = 256  # objects that a hook reaches
_CALLS = 3  # functions that call functions
_PARTS = 3  # objects in objects that forward reads
_CONTAINERS = (list, dict, set, collections.deque)
_CALLED = (types.FunctionType, types.MethodType, functools.partial)
_UNKNOWN = object()  # an object that a call alone tells


class HookWrites:
    """What one hook can write to.

    Followed are the functions and methods that it calls, on the objects that it holds: its own object, what it closes
    over, what it is given by a partial, globals, and their attributes that it names.

    Attributes:
        path: of the module that the hook is on.
    """

    def __init__(self, path: str, hook: Any) -> None:
        self.path = path
        self._stored: dict[int, set[str]] = collections.defaultdict(set)  # id of an object -> attributes
        self._stored_somewhere: set[str] = set()
        self._read: dict[int, set[str]] = collections.defaultdict(set)
        self._held: dict[int, Any] = {}  # by the hook itself
        self._reached: dict[int, Any] = {}
        self._followed: set[tuple[int, types.CodeType]] = set()
        self._follow(hook, _CALLS)

    def sets_on_another(self, model: nn.Module, name: str) -> bool:
        """Whether it may set the attribute of the model that `model` is a view of."""
        return any(name in self._names_on(other) for other in self._others_of(model))

    def set_on(self, model: nn.Module) -> list[str]:
        """Names of the attributes of this very model that the hook sets, or may set where the model has them."""
        maybe = self._stored_somewhere & set(model.__dict__) if id(model) in self._reached else set()
        return sorted(self._stored.get(id(model), set()) | maybe)

    def read_from(self, model: nn.Module) -> list[str]:
        """Names of this very model's numbers and flags that the hook reads."""
        plain = {name for name, value in model.__dict__.items() if isinstance(value, bool | int | float)}
        return sorted((self._read.get(id(model), set()) & plain) - {"training"})

    def touch(self, owner: Any, name: str, value: Any, names: frozenset[str]) -> bool:
        """Whether the hook may write the attribute `name` of `owner`, or into the `value` that it holds.

        Args:
            names: of attributes that the model's functions read.
        """
        return name in self._names_on(owner) or self._writes_into(value, names, _PARTS)

    def _writes_into(self, value: Any, names: frozenset[str], depth: int) -> bool:
        if isinstance(value, nn.Module):
            return False
        if id(value) in self._held or (id(value) in self._reached and isinstance(value, _CONTAINERS)):
            return True
        if self._names_on(value) & names:
            return True
        return depth > 0 and any(self._writes_into(part, names, depth - 1) for part in _parts(value))

    def _names_on(self, value: Any) -> set[str]:
        """The attributes of an object that it may set."""
        if id(value) not in self._reached:
            return set()
        return self._stored.get(id(value), set()) | self._stored_somewhere

    def _others_of(self, model: nn.Module) -> list[nn.Module]:
        modules = (value for value in self._reached.values() if isinstance(value, nn.Module))
        return [module for module in modules if is_other_self(module, model)]

    # -------------------------------------------------------------------------------------- looking through code

    def _follow(
        self, called: Any, depth: int, given: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None
    ) -> None:
        """Look through what is called.

        Args:
            given, named: arguments that are known before the call.
        """
        if type(called) is functools.partial:
            for value in (*called.args, *called.keywords.values()):
                self._reach(value, is_held=True)
            self._follow(called.func, depth, called.args, called.keywords)
            return
        own = getattr(called, "__self__", None)
        if not (functions := functions_in(called)) and callable(called):
            own, functions = called, functions_in(inspect.getattr_static(type(called), "__call__"))
        self._reach(own)
        for function in functions:
            if (id(own), function.__code__) in self._followed or len(self._reached) > _MOST:
                continue
            self._followed.add((id(own), function.__code__))
            positional = given if own is None else (own, *given)
            arguments = dict(zip(function.__code__.co_varnames, positional, strict=False)) | dict(named or {})
            closure = dict(zip(function.__code__.co_freevars, map(_contents, function.__closure__ or ()), strict=True))
            for value in (*closure.values(), *(function.__defaults__ or ())):
                self._reach(value, is_held=True)
            for code in codes_of(function.__code__):
                inner = closure if code is not function.__code__ else {**closure, **arguments}
                self._look_through(code, function, inner, depth)

    def _look_through(
        self, code: types.CodeType, function: types.FunctionType, names: dict[str, Any], depth: int
    ) -> None:
        """Look through code.

        Args:
            names: its variables that are known.
        """
        for name in named_in(code).globals:
            if name in function.__globals__:
                names = {**names, name: function.__globals__[name]}
                self._reach(names[name], is_held=True)
        for what, name, holder in _accesses(code, names):
            if what == "read":
                self._read[id(holder)].add(name)
            elif holder is _UNKNOWN:
                self._stored_somewhere.add(name)
            else:
                self._stored[id(holder)].add(name)
        if {"setattr", "__setattr__", "__dict__"} & set(code.co_names):
            self._stored_somewhere.update(named_in(code).strings)
        around = [*names.values(), *(function.__defaults__ or ())]
        called = [value for value in around if isinstance(value, _CALLED)]
        for holder in around:  # grows while it is gone through
            for name in code.co_names:
                value = _attribute(holder, name)
                if isinstance(value, types.FunctionType | types.MethodType):
                    called.append(value)
                elif self._reach(value) and len(around) < _MOST:
                    around.append(value)
        for value in called if depth else ():
            if not is_library_file(_file_of(value)):
                self._follow(value, depth - 1)

    def _reach(self, value: Any, is_held: bool = False) -> bool:
        """Note an object that may be written into; whether it is one, and new."""
        is_one = isinstance(value, _CONTAINERS) or (
            hasattr(value, "__dict__") and not isinstance(value, (type, types.FunctionType, types.ModuleType))
        )
        is_new = is_one and id(value) not in self._reached
        if is_one:
            self._reached[id(value)] = value
            if is_held:
                self._held[id(value)] = value
        return is_new


_WHATS = {"STORE_ATTR": "stored", "DELETE_ATTR": "stored", "LOAD_ATTR": "read", "LOAD_METHOD": "read"}
_OF_NAMES = frozenset({"STORE_GLOBAL", "STORE_DEREF", "STORE_FAST", "DELETE_FAST", "DELETE_DEREF"})
_LOADS = frozenset("LOAD_FAST LOAD_FAST_CHECK LOAD_DEREF LOAD_GLOBAL LOAD_NAME".split())


def _accesses(code: types.CodeType, names: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """What code stores and reads: "stored" or "read", the attribute, and the object, `_UNKNOWN` where none is known.

    The object is what the instruction before loads: `box.value = x` is LOAD_DEREF box, STORE_ATTR value. Names that the
    code binds anew, and places that a jump may lead to, are not known.
    """
    steps = [each for each in dis.get_instructions(code) if each.opname not in ("EXTENDED_ARG", "CACHE")]
    bound = {each.argval for each in steps if each.opname in _OF_NAMES}
    known = {name: value for name, value in names.items() if name not in bound}
    for place, each in enumerate(steps):
        if each.opname in ("STORE_GLOBAL", "STORE_DEREF"):
            yield "stored", str(each.argval), _UNKNOWN
        elif each.opname in _WHATS:
            yield _WHATS[each.opname], str(each.argval), _loaded_before(steps, place, known)


def _loaded_before(steps: list[dis.Instruction], place: int, known: Mapping[str, Any]) -> Any:
    before = steps[place - 1]
    if not place or steps[place].is_jump_target:
        return _UNKNOWN
    if before.opname in _LOADS:
        return known.get(before.argval, _UNKNOWN)
    if before.opname != "LOAD_ATTR" or (holder := _loaded_before(steps, place - 1, known)) is _UNKNOWN:
        return _UNKNOWN
    found = _attribute(holder, str(before.argval))
    return _UNKNOWN if found is None or isinstance(found, types.MethodType) else found


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty yet
        return None


def _attribute(holder: Any, name: str) -> Any:
    """An attribute of an object, or a method or what asks a property that its class has; None where there is none."""
    attributes = getattr(holder, "__dict__", {})
    if isinstance(holder, nn.Module) and name in holder._modules:
        return holder._modules[name]
    if name in attributes:
        return attributes[name]
    method = inspect.getattr_static(type(holder), name, None)
    method = method.fget if isinstance(method, property) else method
    return types.MethodType(method, holder) if isinstance(method, types.FunctionType) else None


def _file_of(called: Any) -> str:
    functions = functions_in(called)
    return functions[0].__code__.co_filename if functions else ""


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(itertools.islice(value.values(), _MOST))
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return list(itertools.islice(value, _MOST))
    if isinstance(value, torch.Tensor | type | types.FunctionType | types.ModuleType):
        return []
    return list(itertools.islice(getattr(value, "__dict__", {}).values(), _MOST))
