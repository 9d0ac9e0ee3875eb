"""What the functions of a forward can read from outside: globals, closures, defaults, classes and their methods."""

import builtins
import collections
import contextlib
import dataclasses
import importlib.util
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import torch
from torch import nn

from fxamp.capture.asked import ASKED_BY, Asked
from fxamp.capture.effects import DEFAULT, Effects
from fxamp.capture.elements import SCALARS
from fxamp.capture.functions_of import codes_of, functions_in, named_in
from fxamp.capture.locations import is_installed, is_library_function
from fxamp.capture.objects import (
    EVERYTHING,
    MISSING,
    attributes_of,
    class_of,
    is_descriptor,
    is_library,
    is_library_module,
    is_of_a_tool,
    method_parts,
    namespace_of,
    read,
    walk,
)
from fxamp.capture.torch_settings import SETTINGS
from fxamp.capture.unnamed import MAKERS, Unnamed

# Methods that are called without being named; those that make, write or compare are looked at when they run.
_ARITHMETIC = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift".split()
_UNNAMED = (
    frozenset(f"__{side}{name}__" for name in _ARITHMETIC for side in ("", "r"))
    | frozenset("__neg__ __pos__ __abs__ __invert__ __bool__ __int__ __float__ __index__ __call__".split())
    | frozenset("__getattr__ __getattribute__ __getitem__ __len__ __iter__ __next__ __contains__".split())
    | frozenset("__enter__ __exit__ __get__".split())
)


_OF_FUNCTIONS = frozenset(dir(types.FunctionType))
_BY_TEXT = frozenset({"globals", "eval"})  # what names globals in a text


class Outside:
    """What can be read, whether this trace has read it or not.

    Args:
        keep: takes note of an owner, a name and what it holds.
        effects: what forward may do to it.
        is_paused: whether what happens now is no part of the model's forward.

    Attributes:
        names: what the functions name.
        classes: of the user's objects: where they have defaults and methods from.
    """

    def __init__(self, keep: Callable[[Any, str, Any], None], effects: Effects, is_paused: Callable[[], bool]) -> None:
        self.names: set[str] = set()
        self.classes: dict[type, None] = {}
        self._keep = keep
        self._effects = effects
        self._functions: dict[int, types.FunctionType] = {}
        self._waiting: collections.deque[types.FunctionType] = collections.deque()
        self._is_looking = False
        self._foreign: dict[type, None] = {}  # classes of libraries of which there are objects
        self._having: collections.defaultdict[str, list[type]] = collections.defaultdict(list)  # name -> both kinds
        self._modules: set[int] = set()
        self._followed: set[tuple[type, bool]] = set()  # classes of modules, and whether one was made
        self._unnamed = Unnamed(self._run)
        self._asked = Asked(self._ask, is_paused)
        self._held: dict[int, types.ModuleType] = {}  # Python modules that are values

    def follow(self, value: Any) -> None:
        """Look at what a value of the user's is made of; a text may be a name: getattr(self.config, self.key)."""
        if isinstance(value, str) and value.isidentifier():
            self._named({value})
        for part in walk(value, into_libraries=True):
            self.function(part)
            self._class(part)
            if isinstance(part, types.ModuleType) and id(part) not in self._held:
                self._held[id(part)] = part
                self._module(part, tuple(self.names))
            if isinstance(part, operator.attrgetter):
                self._named({name for path in part.__reduce__()[1] for name in str(path).split(".")})

    def _ask(self, value: Any, name: str) -> None:
        """Look at an attribute that forward asks for by a name made at run time, of an object of the user's, a class, a
        function or a Python module. It may be one that there is not yet.
        """
        if isinstance(value, types.FunctionType):
            if not is_library_function(value) and name not in _OF_FUNCTIONS:
                self._keep(value, "__dict__", vars(value))
            return
        if isinstance(value, types.ModuleType):
            if name not in vars(value) and not is_library_module(value):
                self._keep(vars(value), name, MISSING)
            return self._module(value, (name,))
        if not isinstance(value, type):
            self._named({name})
            if name in (attributes_of(value) or {}):
                return
        for kind in (value if isinstance(value, type) else class_of(value)).__mro__:
            if name in vars(kind):
                if isinstance(value, type) and not is_library(kind):
                    self._keep(kind, name, self._unnamed.behind(kind, name))
                return
            if not is_library(kind) and not _is_installed(kind):
                self._keep(kind, name, MISSING)

    def function(self, value: Any) -> None:
        """Look at what a function of the user's, and those that it can call by name, can read from outside.

        One after the other: they may name each other in chains that are longer than Python's stack is deep.
        """
        self._waiting += functions_in(value)
        if self._is_looking:  # then whoever looks comes to these
            return
        self._is_looking = True
        try:
            while self._waiting:
                self._look_at(self._waiting.popleft())
        finally:
            self._is_looking = False
            self._waiting.clear()

    def _look_at(self, function: types.FunctionType) -> None:
        if id(function) in self._functions or is_library_function(function) or is_of_a_tool(function):
            return
        self._functions[id(function)] = function
        self._effects.remember_held(vars(function), f"the attributes of {function.__qualname__}()")
        codes = list(codes_of(function.__code__))
        texts = {text for code in codes for text in (*named_in(code).strings, *code.co_names)}
        self._named({name for text in texts for name in (text, *text.split("."))})
        for code in codes:
            named = named_in(code)
            names = named.globals
            if not _BY_TEXT.isdisjoint(names):
                names = *names, *(text for text in named.strings if text in function.__globals__)
            if not ASKED_BY.isdisjoint(names):
                self._asked.listen(function.__globals__)
            for name in names:
                self._global(function.__globals__, name, code.co_names)
            for name in named.handed_on:
                if isinstance(module := function.__globals__.get(name), types.ModuleType):
                    self.follow(module)
            for name in named.supers:
                self._above(function, name)
            if "sys" in names and "modules" in named.attributes:
                self._modules_named((*named.strings, function.__module__))
            if "__dict__" in named.attributes and not is_installed(code.co_filename):
                self._named({EVERYTHING})
            for level, name in named.imports:
                self._import(_absolute(name, level, function.__globals__), code.co_names)
        self._defaults(function)
        if not is_installed(function.__code__.co_filename):
            # A notebook puts the code of an edited file in its place.
            self._keep(function, "__code__", function.__code__)
            self._keep(function, "__defaults__", function.__defaults__)
        for cell in function.__closure__ or ():
            self._outer(cell, "", read(cell, ""))

    def methods_of(self, module: nn.Module, is_made: bool) -> None:
        """Follow the methods of a module that are called unnamed; those that make it only where forward does."""
        names = _UNNAMED | {"__setattr__"} | (MAKERS if is_made else frozenset())
        if (type(module), is_made) not in self._followed:
            self._followed.add((type(module), is_made))
            for kind in type(module).__mro__:
                if not is_library(kind):
                    self._methods(kind, names)

    def finish(self) -> None:
        """Keep the attributes of functions, where any is named."""
        for function in list(self._functions.values()):
            if not self.names.isdisjoint(vars(function)):
                self._keep(function, "__dict__", vars(function))

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Around a trace: Python modules that are asked for by their names; at its end all is restored."""
        try:
            with self._asked.modules_noted(self.follow):
                yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Leave the files and classes that were looked at as they were."""
        self._asked.restore()
        self._unnamed.restore()

    def _run(self, kind: type, name: str, held: Any, function: types.FunctionType) -> None:
        """Look at a method that nobody has named, before it runs; of one that a dataclass has, at what it reads."""
        self._keep(kind, name, held)
        if is_library_function(function):
            self._named(set(named_in(function.__code__).attributes))
            for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
                self.follow(field.default_factory)
        self.function(function)

    def _above(self, method: types.FunctionType, name: str) -> None:
        """What a method calls by `super()`: what the classes above the one that it is written in have by that name."""
        cells = dict(zip(method.__code__.co_freevars, method.__closure__ or (), strict=False))
        kind = read(cells["__class__"], "") if "__class__" in cells else None
        for each in kind.__mro__[1:] if isinstance(kind, type) else ():
            if name in vars(each) and not is_library(each):
                self._keep(each, name, self._unnamed.behind(each, name))

    def _methods(self, kind: type, names: Set[str]) -> None:
        for name in sorted(names & vars(kind).keys()):
            held = self._unnamed.behind(kind, name)
            self.function(held)
            if is_descriptor(held):
                self._class(held)

    def _defaults(self, function: types.FunctionType) -> None:
        """What an argument is where it is not given: state that stays from call to call."""
        held = {"__name__": f"the defaults of {function.__qualname__}()"}
        for place, default in enumerate((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())):
            self._effects.remember_held(default, f"{DEFAULT}{function.__qualname__}()")
            if not isinstance(default, SCALARS):
                held[str(place)] = default
                self._keep(held, str(place), default)

    def _named(self, names: set[str]) -> None:
        """Follow the methods of those names, whatever object of the user's they belong to."""
        new = names - self.names
        self.names |= new
        for name in sorted(new):
            for kind in list(self._having.get(name, ())):
                follow = self._methods if kind in self.classes else self._read_by
                follow(kind, {name})
        for module in list(self._held.values()) if new else ():
            self._module(module, tuple(new))

    def _class(self, value: Any) -> None:
        """Note an object's class, or a class that is a namespace, and follow its methods of names that are known."""
        kind = value if isinstance(value, type) else class_of(value)
        if issubclass(kind, (nn.Module, torch.Tensor)):
            return
        if kind is value and not is_library(type(kind)):
            self._class(type(kind))
        for each in kind.__mro__:
            if not is_library(each) and not _is_installed(each):
                self._unnamed.watch(each, is_made=kind is value)
            if not is_library(each) and each not in self.classes:
                self.classes[each] = None
                self._follow(each, self._methods)
            elif is_library(each) and each not in self._foreign and kind is not value and namespace_of(value):
                self._foreign[each] = None
                self._follow(each, self._read_by)

    def _follow(self, kind: type, follow: Callable[[type, Set[str]], None]) -> None:
        """What a class has by names that are known, and by those that will be."""
        for name in vars(kind):
            self._having[name].append(kind)
        follow(kind, {name for name in vars(kind) if name in self.names or name in _UNNAMED})

    def _read_by(self, kind: type, names: Set[str]) -> None:
        """Take for named what a library's methods of those names read of their objects: `schedule.get_last_lr()`."""
        for name in sorted(names & vars(kind).keys()):
            for function in functions_in(vars(kind)[name]):
                self._named({each for code in codes_of(function.__code__) for each in named_in(code).attributes})

    def _global(self, space: dict[str, Any], name: str, names: tuple[str, ...]) -> None:
        value = space.get(name, MISSING)
        if value is MISSING or self._asked.is_own(value):
            if not hasattr(builtins, name):
                self._keep(space, name, MISSING)
        elif not isinstance(value, types.ModuleType):
            self._outer(space, name, value)
            if isinstance(value, type) and issubclass(value, nn.Module):
                self._asked_of(value, names)
        else:
            self._module(value, names)

    def _asked_of(self, kind: type, names: tuple[str, ...]) -> None:
        """Methods of a class of modules that a function may call by it: `Base.forward(self, x)`, `Loss.make()`."""
        for each in kind.__mro__:
            for name in sorted(vars(each).keys() & set(names)) if not is_library(each) else ():
                if is_descriptor(vars(each)[name]):
                    self._keep(each, name, self._unnamed.behind(each, name))

    def _module(self, module: types.ModuleType, names: tuple[str, ...]) -> None:
        """Look at those names in a Python module."""
        if not is_library_module(module) and id(module) not in self._modules:
            self._modules.add(id(module))
            for inner in vars(module).keys() & set(names):
                self._global(vars(module), inner, names)
            self._modules.discard(id(module))

    def _import(self, name: str, names: tuple[str, ...]) -> None:
        """What a function that imports a Python module can read there; imports.py loads it before the trace."""
        module = sys.modules.get(name)
        if isinstance(module, types.ModuleType):
            self._module(module, names)

    def _modules_named(self, texts: Iterable[Any]) -> None:
        """What may be read of `sys.modules["package.module"]`."""
        for text in texts:
            module = sys.modules.get(text)
            if isinstance(module, types.ModuleType) and not is_library_module(module):
                self.follow(module)

    def _outer(self, space: Any, name: str, value: Any) -> None:
        is_foreign_function = isinstance(value, types.FunctionType) and is_library_function(value)
        is_foreign_class = isinstance(value, type) and is_library(value)
        is_builtin = isinstance(value, types.BuiltinFunctionType) and not method_parts(value)
        if not is_foreign_function and not is_foreign_class and not is_builtin:
            self._keep(space, name, value)
        elif setting := SETTINGS.name_of(value):
            self._keep(SETTINGS, setting, SETTINGS[setting])


def _is_installed(kind: type) -> bool:
    """Whether a class is one of a package's: what its objects are made with names most of the package."""
    return is_installed(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def _absolute(name: str, level: int, space: dict[str, Any]) -> str:
    """The full name of a Python module that is imported, perhaps from where the function stands."""
    try:
        return importlib.util.resolve_name("." * level + name, space.get("__package__") or "")
    except ImportError:  # relative, and in no package
        return name
