"""Views of modules: a class for each of the user's, derived from it, whose objects share a module's attributes.

What a view shows, its part (`fxamp.model.seen`), decides what forward sees of children and weights, and runs its calls.
"""

import copy
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from fxamp.derived import BASE, Derived, finalizer_of, subclass
from fxamp.model.views import base_of, plain_view
from fxamp.module_hooks import HOOKS, makes_weight


class _View:
    """What all views are, beside the user's class: their one slot is no part of the attributes shared with the module.

    (A table of all views would keep each for ever: what a view shows leads to the others, and from them back to it.)
    """

    __slots__ = ("_fxamp_part",)


_PART: Any = vars(_View)["_fxamp_part"]  # by the slot itself: no `__getattr__` of the user's is asked


_CLASS: Any = object.__dict__["__class__"]  # of a view itself, which tells the module's


def part_of(value: Any) -> Any:
    """What a view shows; None for any other object, and for a view that a class makes of itself by `type(self)()`.

    What forward has compiled itself finds the modules themselves: Dynamo does not follow into a slot before torch 2.13.
    """
    if torch.compiler.is_compiling():
        return None
    try:
        return _PART.__get__(value) if isinstance(value, _View) else None
    except AttributeError:
        return None


def new_view(module: nn.Module, part: Any) -> nn.Module:
    """A view of a module, of which `part` is what it shows."""
    return _of_class(_classes.of(base_of(module)), module.__dict__, part)


def _of_class(kind: type, attributes: dict[str, Any], part: Any) -> nn.Module:
    made: nn.Module = object.__new__(kind)
    object.__setattr__(made, "__dict__", attributes)
    _PART.__set__(made, part)
    return made


def may_be_viewed(kind: type) -> bool:
    """Whether objects of a class hold nothing but a dictionary of attributes: no slots, no items of a list."""
    return kind.__basicsize__ == nn.Module.__basicsize__


class _Children(MutableMapping[str, Any]):
    """The children of a module as its forward sees them; what is written is written into the module's own."""

    def __init__(self, own: dict[str, Any], view: nn.Module, part: Any) -> None:
        self._own = own
        self._view = view
        self._part = part

    def __getitem__(self, name: str) -> Any:
        return self._part.child(self._view, name, self._own[name])

    def __setitem__(self, name: str, child: Any) -> None:
        self._own[name] = itself(child)

    def __delitem__(self, name: str) -> None:
        del self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __reversed__(self) -> Iterator[str]:
        return reversed(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def copy(self) -> dict[str, Any]:
        return dict(self)


def itself(value: Any) -> Any:
    """The module that a view shows, a method of a view as the module's; anything else as it is."""
    if isinstance(value, types.MethodType):
        shown: Any = value.__self__
        if (module := itself(shown)) is not shown:
            is_forward = value.__func__ is type(shown).forward
            return types.MethodType(base_of(shown).forward if is_forward else value.__func__, module)
    part = part_of(value)
    module = None if part is None else part.module
    return value if module is None else module


def _plain(view: nn.Module) -> nn.Module:
    """The module of a view, for a copy of it."""
    module: nn.Module = itself(view)
    return plain_view(view) if module is view else module


class _Hooks(Mapping[int, Callable[..., Any]]):
    """The hooks of a view's module as torch is to call them: with the module, which they may know by its identity.

    Those of torch's own that make a weight get what forward sees.
    """

    def __init__(self, own: dict[int, Any], view: nn.Module) -> None:
        self._own = own
        self._view = view

    def __getitem__(self, key: int) -> Callable[..., Any]:
        hook = self._own[key]
        given = self._view if makes_weight(hook) else itself(self._view)
        return lambda called, *args: hook(given, *args)

    def __iter__(self) -> Iterator[int]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def _with_own_hooks(view: nn.Module) -> nn.Module:
    """What torch is to call in the place of a view. (Old backward hooks it would not outlive.)"""
    part, own = part_of(view), view.__dict__
    if part is None or own["_is_full_backward_hook"] is False or not any(own[name] for name in HOOKS):
        return view
    hooks = {name: _Hooks(own[name], view) for name in HOOKS}
    return _of_class(type(view), {**own, **hooks, "forward": view.forward}, part)


def _compares_classes(forward: Any) -> bool:
    """Whether a forward may compare the very classes of modules, `type(layer) is Block`: views have others.

    It names `type`, and a class of modules.
    """
    function = inspect.unwrap(forward)
    if not isinstance(function, types.FunctionType) or "type" not in function.__code__.co_names:
        return False
    found = inspect.getclosurevars(function)
    names = {**found.globals, **found.nonlocals}
    names.pop("__class__", None)  # of super()
    named = [*names.values(), *(getattr(nn, name, None) for name in function.__code__.co_names)]
    return any(isinstance(each, type) and issubclass(each, nn.Module) for each in named)


def _give_class(view: Any, kind: type) -> None:
    """`view.__class__ = kind`: the module is of that class then, and the view one of such a module."""
    module = itself(view)
    if module is not view:
        module.__class__ = kind
    _CLASS.__set__(view, _classes.of(kind))


def _make_class(base: Any) -> type:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        part = part_of(self)
        return base.forward(self, *args, **kwargs) if part is None else part.run(self, base.forward, args, kwargs)

    def __getattr__(self: Any, name: str) -> Any:
        found = base.__getattr__(self, name)
        part = part_of(self)
        return found if part is None else part.shown(self, name, found)

    def _call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base._call_impl(_with_own_hooks(self), *args, **kwargs)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        base.__setattr__(self, name, itself(value))

    def children(self: Any) -> Any:
        own, part = self.__dict__["_modules"], part_of(self)
        return own if part is None else _Children(own, self, part)

    def set_children(self: Any, given: Any) -> None:
        self.__dict__["_modules"] = given

    def __eq__(self: Any, other: Any) -> Any:
        return base.__eq__(itself(self), itself(other))

    def __hash__(self: Any) -> int:
        return base.__hash__(itself(self))  # type: ignore[no-any-return]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return itself, (_plain(self),)

    def __copy__(self: Any) -> Any:
        return copy.copy(_plain(self))

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_plain(self), memo)

    names = {
        **finalizer_of(base),
        "forward": forward,
        "__class__": property(lambda self: base, _give_class),  # whom forward asks for a class gets the module's
        "__eq__": __eq__,
        "__hash__": __hash__,
        "__reduce_ex__": __reduce_ex__,
        "__copy__": __copy__,
        "__deepcopy__": __deepcopy__,
        "_call_impl": _call_impl,
        "__getattr__": __getattr__,
        "__setattr__": __setattr__,
        "_modules": property(children, set_children),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        BASE: base,
        "_fxamp_compares_classes": _compares_classes(base.forward),
    }
    return subclass(base, names, _View)


_classes = Derived(_make_class)
