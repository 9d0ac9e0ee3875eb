"""What a forward that runs as it is written sees of its model: views, whose calls look for a graph.

A view has the attributes of its module, the very same ones, and a class of its own, derived from the module's.
"""

import copy
import dataclasses
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fxamp.capture.refusals import Refusals
from fxamp.ir import Colour
from fxamp.model.blocks import mark_block
from fxamp.model.converted import Derived, subclass
from fxamp.model.engine import Engine, engine_of
from fxamp.model.likeness import kind, likeness
from fxamp.model.views import device_of, plain_view
from fxamp.model.wide_copies import take_back_writes, wide_copy
from fxamp.module_hooks import HOOKS
from fxamp.override_keys import around, override_of, overrides_within
from fxamp.runtime.masters import is_stored_low

_NORMS = (nn.LayerNorm, nn.RMSNorm)  # those whose weights may have more than one dimension
_BIASED = (nn.Linear, nn.Bilinear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)  # no norm reads a bias
_MAKE_WEIGHTS = (WeightNorm, SpectralNorm, BasePruningMethod)

running = threading.local()
"""view: the innermost that is called; is_on: whether autocast was switched on around the innermost forward that runs as
it is written."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What a view shows.

    Attributes:
        reference: gives the module; None once it is gone, if it is the model itself, which views must not keep alive.
        engine: of its calls; None where it is none that is called, as torch's containers.
        is_denied: whether an override denies it.
    """

    reference: Callable[[], nn.Module | None]
    path: str
    family: "Family"
    engine: Engine | None
    is_denied: bool

    @property
    def module(self) -> nn.Module | None:
        return self.reference()

    def run(self, view: nn.Module, written: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the module, in a graph or as it is written.

        1. Without gradients only what has a graph looks for one: who generates text calls each part for each token.
        2. Where forward has switched autocast off, its author wants float32.
        """
        module, engine = self.module, self.engine
        if module is None or engine is None or self.family.is_protected():
            return written(view, *args, **kwargs)
        if not engine.variants and not torch.is_grad_enabled():
            return written(view, *args, **kwargs)
        take_back_writes()
        before, running.view = getattr(running, "view", None), view
        try:
            return engine(module, args, kwargs)
        finally:
            running.view = before
            self.family.note(self.path, engine)

    def child(self, view: nn.Module, name: str, value: Any) -> Any:
        """What forward is to see of a child."""
        if type(view)._fxamp_compares_classes:  # type: ignore[attr-defined]
            return value
        return self.family.seen(value, f"{self.path}.{name}".lstrip("."))

    def shown(self, view: nn.Module, name: str, value: Any) -> Any:
        """What forward is to see of an attribute.

        What is stored low is shown in float32 where autocast is off, and at O2 everywhere if it is of a norm, or a
        vector that may be such: a CPU's norm of float32 values takes no low ones.
        """
        if isinstance(value, nn.Module):
            return self.child(view, name, value)
        if not is_stored_low(value):
            return value
        take_back_writes(value)
        is_of_norm = isinstance(view, _NORMS) or (value.dim() < 2 and not isinstance(view, _BIASED))
        is_wide = is_of_norm and self.family.written.options.opt_level != "O3"
        return wide_copy(value) if is_wide or not self.family.is_autocast_on() else value


class _View:
    """What all views are, beside the user's class: their one slot is no part of the attributes shared with the module.

    (A table of all views would keep each for ever: what a view shows leads to the others, and from them back to it.)
    """

    __slots__ = ("_fxamp_part",)


_PART: Any = vars(_View)["_fxamp_part"]  # by the slot itself: no `__getattr__` of the user's is asked


def part_of(value: Any) -> Part | None:
    """What a view shows; None for any other object, and for a view that a class makes of itself by `type(self)()`.

    What forward has compiled itself finds the modules themselves: Dynamo does not follow into a slot before torch 2.13.
    """
    if torch.compiler.is_compiling():
        return None
    try:
        found: Part | None = _PART.__get__(value) if isinstance(value, _View) else None
    except AttributeError:
        return None
    return found


class Family:
    """The views of a model and of its modules.

    Args:
        written: the way of the model's calls (`fxamp.model.written`).
        engine: of the model.
    """

    def __init__(self, written: Any, engine: Engine, model: nn.Module) -> None:
        self.written = written
        self.engine = engine
        self._paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
        self._device = device_of(model).type
        self._seen: dict[int, nn.Module] = {}

    def is_autocast_on(self) -> bool:
        return torch.is_autocast_enabled(self._device)

    def is_protected(self) -> bool:
        """Whether forward has switched autocast off, which was on around it."""
        return getattr(running, "is_on", True) and not self.is_autocast_on()

    def view(self, module: nn.Module, path: str, engine: Engine | None) -> nn.Module:
        """A new view of a module."""
        made: nn.Module = object.__new__(_classes.of(getattr(type(module), "_fxamp_base", type(module))))
        object.__setattr__(made, "__dict__", module.__dict__)
        reference: Any = weakref.ref(module) if engine is self.engine else lambda: module
        _PART.__set__(made, Part(reference, path, self, engine, self._colour_of(path) == "deny"))
        return made

    def seen(self, child: Any, path: str) -> Any:
        """What forward is to see of a child: a view, or the child itself.

        1. Autocast runs a module without parameters, or a layer of torch's with float32 ones, as a graph would, unless
           an override speaks of it.
        2. A module that was converted by itself runs as such.
        3. What a class keeps beside the attributes' dictionary, as in slots, a view has not.
        """
        if not isinstance(child, nn.Module) or part_of(child) is not None:
            return child
        if id(child) not in self._seen:
            is_itself = _is_other(child) or (_is_for_autocast(child) and self._colour_of(path) is None)
            self._seen[id(child)] = child if is_itself else self._new_view(child, path)
        return self._seen[id(child)]

    def _new_view(self, child: nn.Module, path: str) -> nn.Module:
        is_called = type(child).forward is not nn.Module.forward
        return self.view(child, path, self._engine_of(child, path) if is_called else None)

    def _colour_of(self, path: str) -> Colour | None:
        """What overrides say of a module as a whole."""
        overrides = self.written.options.overrides
        key = override_of(list(around(path)), "", overrides)
        return None if key is None else overrides[key]

    def _engine_of(self, module: nn.Module, path: str) -> Engine:
        written, root = self.written, self.engine
        overrides = overrides_within(module, path, written.options.overrides, self._paths)
        key = (*likeness(module), tuple(overrides.items()))
        engine: Engine | None = written.engines.get(key)
        if engine is None:
            own = dataclasses.replace(written.options, overrides=overrides, output_dtype=None)
            inside = type(written)(own, written.rewrite)
            inside.kin = written.kin
            engine = Engine(own, root.workshop, inside, root.is_frozen)
            engine.refusals = Refusals(written.kin[kind(module)])
            engine.is_boundary = True
            written.engines[key] = engine
        engine.paths += () if path in engine.paths else (path,)
        return engine

    def note(self, path: str, engine: Engine) -> None:
        """Take note of a part of which there are graphs, and on the graphs what they are for."""
        blocks = self.written.blocks
        if path and path not in blocks and engine.variants:
            blocks[path] = engine
            for variant in engine.all_variants():
                mark_block(variant, engine.paths)


def _is_other(child: nn.Module) -> bool:
    return engine_of(child) is not None or isinstance(child, torch.jit.ScriptModule) or not may_be_viewed(type(child))


def _is_for_autocast(child: nn.Module) -> bool:
    weights = list(child.parameters())
    is_layer = not child._modules and type(child).__module__.startswith("torch.nn.")
    return not weights or (is_layer and not any(map(is_stored_low, weights)))


def may_be_viewed(kind: type) -> bool:
    """Whether objects of a class hold nothing but a dictionary of attributes: no slots, no items of a list."""
    return kind.__basicsize__ == nn.Module.__basicsize__


class _Children(MutableMapping[str, Any]):
    """The children of a module as its forward sees them; what is written is written into the module's own."""

    def __init__(self, own: dict[str, Any], view: nn.Module, part: Part) -> None:
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
    if isinstance(value, types.MethodType) and (module := itself(value.__self__)) is not value.__self__:
        kind: Any = type(value.__self__)
        return types.MethodType(kind._fxamp_base.forward if value.__func__ is kind.forward else value.__func__, module)
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
        given = self._view if isinstance(hook, _MAKE_WEIGHTS) else itself(self._view)
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
    called: nn.Module = object.__new__(type(view))
    object.__setattr__(called, "__dict__", {**own, **hooks, "forward": view.forward})
    _PART.__set__(called, part)
    return called


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
        "forward": forward,
        "__class__": property(lambda self: base),  # whom forward asks for a class gets that of the module
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
        "_fxamp_base": base,
        "_fxamp_compares_classes": _compares_classes(base.forward),
    }
    return subclass(base, names, _View)


_classes = Derived(_make_class)
