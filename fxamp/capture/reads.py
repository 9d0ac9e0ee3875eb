"""Notes what a trace reads of Python's state; see state.py for what is done with it."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fxamp.capture.functions_of import codes_of, functions_in
from fxamp.capture.hooks import hook_writes
from fxamp.capture.leaves import recomputed_weights
from fxamp.capture.locations import is_foreign
from fxamp.capture.state import (
    DEPTH,
    FUNCTIONS,
    LIFTED,
    MISSING,
    MOST,
    SCALARS,
    Cell,
    Scope,
    is_library,
    is_library_module,
    paths_of,
    read,
)
from fxamp.errors import CaptureError, OptionError

# What nn.Module itself keeps in an instance; Structure looks after parameters, modules and hooks.
_OWN = frozenset({*nn.Module().__dict__, "__dict__", "__class__", "_fxamp_engine"})
_INHERITED = frozenset(dir(nn.Module)) - {"forward"}
Place = tuple[str, str]  # path of a module, and the name of an attribute


class Reads:
    """What one trace reads.

    Args:
        root: the model.
        is_paused: whether what happens now is no part of the model's forward.
        lift: what stands in the graph for a number that is read anew at each call, None for all that is not.
    """

    def __init__(self, root: nn.Module, is_paused: Callable[[], bool], lift: Callable[[Place, Any], Any]) -> None:
        self._root = root
        self._paths = paths_of(root)
        self._is_paused = is_paused
        self._lift = lift
        self._found: dict[tuple[int, str], tuple[Any, Any]] = {}  # (id of owner, name) -> owner, value
        self._registered: dict[Place, tuple[str, torch.Tensor | None]] = {}  # -> kind, value
        self._lifted: set[Place] = set()
        self._functions: dict[int, types.FunctionType] = {}
        self._containers: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note reads while the model's forward runs.

        Raises:
            CaptureError: forward changed a container that it had read, which a graph would not do again, or read what a
            hook may write.
        OptionError: a hook sets an attribute of the original model that forward reads.
        """

        def getattribute(module: nn.Module, name: str) -> Any:
            try:
                value = object.__getattribute__(module, name)
            except AttributeError:
                if name not in _OWN and not self._is_paused():
                    self._keep_registered(module, name)
                raise
            if name in _OWN or name in _INHERITED or self._is_paused():
                return value
            return self._note(module, name, value)

        self._function(type(self._root).forward)
        nn.Module.__getattribute__ = getattribute  # type: ignore[method-assign, assignment]
        try:
            yield
            changed = [container for container, saved in self._containers if not _is_as(container, saved)]
            self._check_hooks()
        finally:
            del nn.Module.__getattribute__
            for container, saved in self._containers:
                _restore(container, saved)
        if changed:
            raise CaptureError(
                f"forward writes into {self._title_of(changed[0])}, and a graph holds no such writes. Return the "
                "value instead, or write a buffer in place (self.buffer.copy_(value))."
            )

    def _check_hooks(self) -> None:
        """Raise where forward reads what a hook may write: hooks run at each call, and a graph has read it before."""
        hooks = list(hook_writes(self._root))
        for (_, name), (owner, value) in self._found.items() if hooks else ():
            path = self._paths.get(id(owner)) if isinstance(owner, nn.Module) else None
            title = _title(owner, path, name)
            for hook in hooks:
                if owner is self._root and hook.sets(name) and hook.is_bound_to(self._root):
                    raise OptionError(
                        f"a hook on {hook.path!r} sets {title} of the model it was made for, and the converted model, "
                        f"whose forward reads it, is another object. Let the hook write into a container "
                        f"({title}s['key'] = ...), or register it again on the converted model."
                    )
                if hook.touch(owner, name, value):
                    raise CaptureError(
                        f"forward reads {title}, and a hook on {hook.path!r} may write it while forward runs, which a "
                        "graph that was captured before cannot see. Return the value from the module that makes it."
                    )

    def cells(self, decided: set[Place]) -> tuple[Cell, ...]:
        """What was read, as it was.

        Args:
            decided: places whose number Python's control flow used, though it is a value of the graph.
        """
        codes = [code for function in self._functions.values() for code in codes_of(function.__code__)]
        names = frozenset(name for code in codes for name in (*code.co_names, *_strings(code)))
        scope = Scope(names, self._paths)
        found = []
        for (_, name), (owner, value) in self._found.items():
            path = self._paths.get(id(owner)) if isinstance(owner, nn.Module) else None
            cell = Cell(name, (), path, None if path is not None else owner, _title(owner, path, name), names)
            if path is not None and (path, name) in self._lifted - decided:
                found.append(cell.with_frozen((type(value), LIFTED)))
            else:
                found.append(cell.with_frozen(cell.standing_for(value, scope)))
        for (path, name), (kind, value) in self._registered.items():
            cell = Cell(name, (), path, None, f"self.{path}.{name}", names, kind)
            found.append(cell.with_frozen(cell.standing_for(value, scope)))
        return tuple(found)

    def _note(self, module: nn.Module, name: str, value: Any) -> Any:
        if name not in module.__dict__:
            owner = next((kind for kind in type(module).__mro__ if name in kind.__dict__), None)
            if owner is None or (is_library(owner) and name != "forward"):
                return value
            self._keep(module, name, MISSING)
            self._keep(owner, name, owner.__dict__[name])
            return value
        if name in recomputed_weights(module):
            return value
        self._keep(module, name, value)
        place = (self._paths.get(id(module), ""), name)
        instead = self._lift(place, value) if id(module) in self._paths else None
        if instead is None:
            return value
        self._lifted.add(place)
        return instead

    def _keep_registered(self, module: nn.Module, name: str) -> None:
        """A parameter or buffer, whose shape the graph may hold, or a name that there is not."""
        for kind in ("_parameters", "_buffers", "_modules"):
            entries = module.__dict__.get(kind, {})
            if name in entries:
                if kind != "_modules" and id(module) in self._paths:
                    self._registered.setdefault((self._paths[id(module)], name), (kind, entries[name]))
                return
        self._keep(module, name, MISSING)

    def _keep(self, owner: Any, name: str, value: Any) -> None:
        if (id(owner), name) not in self._found:
            self._found[id(owner), name] = (owner, value)
            self._containers += _containers(value)
            self._function(value)

    def _function(self, value: Any) -> None:
        """Look at what a function of the user's, and those that it can call by name, can read from outside."""
        for function in functions_in(value):
            if id(function) in self._functions or is_foreign(function.__code__.co_filename):
                continue
            self._functions[id(function)] = function
            for code in codes_of(function.__code__):
                for name in code.co_names:
                    self._global(function.__globals__, name, code.co_names)
            for cell in function.__closure__ or ():
                self._outer(cell, "", read(cell, ""))

    def _global(self, space: dict[str, Any], name: str, names: tuple[str, ...]) -> None:
        value = space.get(name, MISSING)
        if value is MISSING:
            return
        if not isinstance(value, types.ModuleType):
            self._outer(space, name, value)
        elif not is_library_module(value):
            for inner in vars(value).keys() & set(names):
                if not isinstance(vars(value)[inner], types.ModuleType):
                    self._outer(vars(value), inner, vars(value)[inner])

    def _outer(self, space: Any, name: str, value: Any) -> None:
        is_library = isinstance(value, types.FunctionType) and is_foreign(value.__code__.co_filename)
        if not is_library and not isinstance(value, (type, types.BuiltinFunctionType)):
            self._keep(space, name, value)

    def _title_of(self, container: Any) -> str:
        for (_, name), (owner, value) in self._found.items():
            if any(part is container for part, _ in _containers(value)):
                path = self._paths.get(id(owner)) if isinstance(owner, nn.Module) else None
                return f"{_title(owner, path, name)} ({type(container).__qualname__})"
        return f"a {type(container).__qualname__}"


def _strings(code: types.CodeType) -> list[str]:
    return [constant for constant in code.co_consts if isinstance(constant, str)]


def _title(owner: Any, path: str | None, name: str) -> str:
    if isinstance(owner, nn.Module):
        return f"self.{path}.{name}" if path else f"self.{name}"
    if isinstance(owner, type):
        return f"{owner.__qualname__}.{name}"
    if isinstance(owner, types.CellType):
        return "a variable of an enclosing function"
    return f"the global {name!r} of {owner.get('__name__', 'a module')}"


def _containers(value: Any, depth: int = DEPTH) -> list[tuple[Any, Any]]:
    """The containers in a value that can change without an assignment, each with a shallow copy."""
    if depth == 0 or isinstance(value, (*SCALARS, *FUNCTIONS, torch.Tensor, nn.Module)):
        return []
    if isinstance(value, (dict, list, set)):
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
    if not _is_as(container, saved):
        container.clear()
        (container.extend if isinstance(container, list) else container.update)(saved)
