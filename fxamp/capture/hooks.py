"""Hooks that a graph leaves to run at each call, and what they may write that forward reads."""

import collections
import dis
import functools
import inspect
import itertools
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fxamp.capture.functions_of import attributes_in, codes_of, functions_in, globals_of, strings_in
from fxamp.capture.locations import is_library_file
from fxamp.capture.objects import is_other_self
from fxamp.errors import CaptureError, OptionError
from fxamp.module_hooks import hook_dictionaries, is_traced_hook

log = logging.getLogger("fxamp")

_STORES = frozenset({"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "STORE_DEREF"})


_MOST = 256  # objects that a hook reaches
_CALLS = 3  # functions that call functions
_PARTS = 3  # objects in objects that forward reads
_CONTAINERS = (list, dict, set, collections.deque)


class HookWrites:
    """What one hook can write to.

    Followed are the functions and methods that it calls, on the objects that it holds: its own object, what it closes
    over, what it is given by a partial, globals, and their attributes that it names.

    Attributes:
        path: of the module that the hook is on.
    """

    def __init__(self, path: str, hook: Any) -> None:
        self.path = path
        self._stored: set[str] = set()
        self._read: set[str] = set()
        self._held: dict[int, Any] = {}  # by the hook itself
        self._reached: dict[int, Any] = {}
        self._followed: set[tuple[int, types.CodeType]] = set()
        self._owner = getattr(hook, "__self__", None)
        self._follow(hook, _CALLS)

    def _follow(self, called: Any, depth: int) -> None:
        own = getattr(called, "__self__", None)
        if type(called) is functools.partial:
            for given in (*called.args, *called.keywords.values()):
                self._reach(given, is_held=True)
            self._follow(called.func, depth)
            return
        if not (functions := functions_in(called)) and hasattr(type(called), "__call__"):  # noqa: B004
            own, functions = called, functions_in(inspect.getattr_static(type(called), "__call__"))
        self._reach(own)
        for function in functions:
            if (id(own), function.__code__) in self._followed or len(self._reached) > _MOST:
                continue
            self._followed.add((id(own), function.__code__))
            held = [own, *(function.__defaults__ or ()), *map(_contents, function.__closure__ or ())]
            for value in held[1:]:
                self._reach(value, is_held=True)
            for code in codes_of(function.__code__):
                self._look_through(code, function, held, depth)

    def _look_through(self, code: types.CodeType, function: types.FunctionType, held: list[Any], depth: int) -> None:
        self._stored.update(str(each.argval) for each in dis.get_instructions(code) if each.opname in _STORES)
        self._read |= attributes_in(code)
        if {"setattr", "__setattr__", "__dict__"} & set(code.co_names):
            self._stored.update(strings_in(code))
        found = {name: function.__globals__.get(name) for name in globals_of(code)}
        for value in found.values():
            self._reach(value, is_held=True)
        called = [value for value in (*held[1:], *found.values()) if isinstance(value, _CALLED)]
        around = [*held, *found.values()]
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

    def leads_to(self, model: nn.Module) -> bool:
        """Whether the hook holds the model that `model` is a view of: another object, with the same parts."""
        return any(isinstance(value, nn.Module) and is_other_self(value, model) for value in self._reached.values())

    def set_on(self, model: nn.Module) -> list[str]:
        """Names of the attributes that the hook assigns to, if it is a method of this very model; if it holds the model
        otherwise, of those that the model has."""
        if self._owner is model:
            return sorted(self._stored)
        return sorted(self._stored & set(model.__dict__)) if id(model) in self._reached else []

    def read_from(self, model: nn.Module) -> list[str]:
        """Names of the model's numbers and flags that the hook reads, if it holds this very model."""
        plain = {name for name, value in model.__dict__.items() if isinstance(value, bool | int | float)}
        return sorted((self._read & plain) - {"training"}) if id(model) in self._reached else []

    def sets(self, name: str) -> bool:
        """Whether the hook assigns to attributes of that name."""
        return name in self._stored

    def touch(self, owner: Any, name: str, value: Any, names: frozenset[str]) -> bool:
        """Whether the hook may write the attribute `name` of `owner`, or into the `value` that it holds.

        Args:
            names: of attributes that the model's functions read.
        """
        return (id(owner) in self._reached and name in self._stored) or self._writes_into(value, names, _PARTS)

    def _writes_into(self, value: Any, names: frozenset[str], depth: int) -> bool:
        if isinstance(value, nn.Module):
            return False
        if id(value) in self._held or (id(value) in self._reached and isinstance(value, _CONTAINERS)):
            return True
        if id(value) in self._reached and self._stored & names:
            return True
        return depth > 0 and any(self._writes_into(part, names, depth - 1) for part in _parts(value))


_CALLED = (types.FunctionType, types.MethodType, functools.partial)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty yet
        return None


def _attribute(holder: Any, name: str) -> Any:
    """An attribute of an object, or a method that its class has under that name; None where there is neither."""
    attributes = getattr(holder, "__dict__", {})
    if isinstance(holder, nn.Module) and name in holder._modules:
        return holder._modules[name]
    if name in attributes:
        return attributes[name]
    method = inspect.getattr_static(type(holder), name, None)
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


def warn_of_hooks_on(model: nn.Module) -> None:
    """Log a warning for hooks on a model's parts that hold the model itself, and set attributes of it or read numbers:
    of this model alone, while the converted one is another object."""
    for hook in hook_writes(model):
        if names := hook.set_on(model):
            log.warning(
                "a hook on %r holds the model that is converted, and sets its %s: the converted model is another "
                "object, which does not see that. Let the hook write into a container (self.kept['key'] = "
                "...), or register it again on the converted model.",
                hook.path,
                ", ".join(names),
            )
        elif names := hook.read_from(model):
            log.warning(
                "a hook on %r holds the model that is converted, and reads its %s: the converted model is another "
                "object, and the hook does not see what is set on that. Let the hook read from a container "
                "(self.settings['key']), or register it again on the converted model.",
                hook.path,
                ", ".join(names),
            )


def hook_writes(root: nn.Module) -> Iterator[HookWrites]:
    """For every hook that stays a hook, what it can write to."""
    for path, module in root.named_modules():
        if path:
            for hooks in hook_dictionaries(module):
                yield from (HookWrites(path, hook) for hook in hooks.values() if not is_traced_hook(hook))


def check_hook_writes(
    root: nn.Module,
    found: Iterable[tuple[Any, str, Any]],
    title: Callable[[Any, str], str],
    names: frozenset[str],
) -> None:
    """Raise where forward reads what a hook may write: hooks run at each call, and a graph has read it before.

    Args:
        found: what forward has read: owner, name, value.
        title: how a message names it.
        names: of attributes that the model's functions read.

    Raises:
        CaptureError: forward reads what a hook may write.
        OptionError: a hook sets an attribute of the original model that forward reads.
    """
    hooks = list(hook_writes(root))
    read = list(found) if hooks else []
    for (owner, name, _), hook in itertools.product(read, hooks):
        if owner is root and hook.sets(name) and hook.leads_to(root):
            named = title(owner, name)
            raise OptionError(
                f"a hook on {hook.path!r} sets {named} of the model it was made for, and the converted model, "
                f"whose forward reads it, is another object. Let the hook write into a container "
                f"({named}s['key'] = ...), or register it again on the converted model."
            )
    for (owner, name, value), hook in itertools.product(read, hooks):
        if hook.touch(owner, name, value, names):
            raise CaptureError(
                f"forward reads {title(owner, name)}, and a hook on {hook.path!r} may write it while forward runs, "
                "which a graph that was captured before cannot see. Return the value from the module that makes it."
            )
