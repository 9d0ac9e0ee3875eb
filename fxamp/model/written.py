"""The forward of a model at O2 and O3 where no graph holds it: as it is written, and what it calls as graphs.

It runs under torch.autocast and on the low weights, with a view of the model for `self`. A view has the attributes of
its module, the very same ones, and a class of its own, in which children are views and a call looks for a graph. So the
largest modules that a graph can hold run as graphs, and what is around them runs as torch.autocast would run it.
"""

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxamp.dtypes import LOW_DTYPES
from fxamp.model.blocks import mark_block
from fxamp.model.converted import subclass
from fxamp.model.engine import Engine, engine_of
from fxamp.model.likeness import likeness
from fxamp.model.variant import Variant
from fxamp.model.views import device_of
from fxamp.override_keys import overrides_within
from fxamp.runtime.masters import is_stored_low

_NORMS = (nn.LayerNorm, nn.RMSNorm)  # those whose weights may have more than one dimension

_running = threading.local()  # view: the innermost that is called


class Written:
    """What calls that no graph holds run through.

    Args:
        options: of the model, or of a part of it.
        rewrite: the pipeline.

    Attributes:
        blocks: the engines of the parts of which there are graphs, by path.
        engines: those of all parts that were called; equal parts, and those of copies of the model, share one.
    """

    variants: tuple[Variant, ...] = ()
    weights: frozenset[str] = frozenset()
    how = "runs as under torch.autocast, and what it calls as graphs"
    runs = "as under torch.autocast"

    def __init__(self, options: Any, rewrite: Callable[..., Any]) -> None:
        self.options = options
        self.rewrite = rewrite
        self.blocks: dict[str, Engine] = {}
        self.engines: dict[Any, Engine] = {}
        self._views: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
        self._outside: Any = None

    def __reduce__(self) -> Any:
        return Written, (self.options, self.rewrite)

    def stay_outside(self, name: str) -> None:
        """Let a Dynamo that traces the model from outside break its graph here: it knows no views."""
        if self._outside is None:
            reason = f"no graph of fxamp's holds this call of {name}, which runs as under torch.autocast"
            self._outside = torch.compiler.disable(self._call, reason=reason)  # type: ignore[no-untyped-call]

    def __call__(self, base: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward as it is written.

        At O3 floating inputs are made low, as the weights are. Low results of the model come in
        `options.output_dtype`, those of its parts as they are computed.
        """
        if torch.compiler.is_compiling() and self._outside is not None:
            return self._outside(base, module, args, kwargs)
        return self._call(base, module, args, kwargs)

    def _call(self, base: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        view = getattr(_running, "view", None)
        if view is None or _parts[view].module is not module:
            view = self._view_of(module)
        if self.options.opt_level == "O3":
            args, kwargs = _floats_as(self.options.low, (args, kwargs), {torch.float32})
        with torch.autocast(device_of(module).type, dtype=self.options.low):
            result = base.forward(view, *args, **kwargs)
        wanted = self.options.output_dtype
        return result if wanted is None else _floats_as(wanted, result, {*LOW_DTYPES})

    def _view_of(self, model: nn.Module) -> nn.Module:
        """The view of a converted model."""
        if model not in self._views:
            engine = engine_of(model)
            assert engine is not None
            self._views[model] = _Family(self, engine, model).view(model, "", engine)
        return self._views[model]


def _floats_as(dtype: torch.dtype, values: Any, replaced: set[torch.dtype]) -> Any:
    def converted(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype in replaced else tensor

    return pytree.tree_map_only(torch.Tensor, converted, values)


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a view shows.

    Attributes:
        reference: gives the module; None once it is gone, if it is the model itself, which views must not keep alive.
        engine: of its calls; None where it is none that is called, as torch's containers.
    """

    reference: Callable[[], nn.Module | None]
    path: str
    family: "_Family"
    engine: Engine | None

    @property
    def module(self) -> nn.Module | None:
        return self.reference()

    def run(self, view: nn.Module, written: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the module, in a graph or as it is written.

        Without gradients only what has a graph looks for one: who generates text calls each part for each token.
        """
        module, engine = self.module, self.engine
        if module is None or engine is None or not (engine.variants or torch.is_grad_enabled()):
            return written(view, *args, **kwargs)
        before, _running.view = getattr(_running, "view", None), view
        try:
            return engine(module, args, kwargs)
        finally:
            _running.view = before
            self.family.note(self.path, engine)

    def shown(self, view: nn.Module, name: str, value: Any) -> Any:
        """What forward is to see of an attribute: at O2 weights of norms, and other vectors, in float32, for a CPU's
        norm of float32 values takes no low ones."""
        if isinstance(value, nn.Module):
            return self.family.seen(value, f"{self.path}.{name}".lstrip("."))
        is_wide = isinstance(value, nn.Parameter) and (value.dim() < 2 or isinstance(view, _NORMS))
        is_wide = is_wide and self.family.written.options.opt_level != "O3" and is_stored_low(value)
        return value.float() if is_wide else value


_parts: "weakref.WeakKeyDictionary[nn.Module, _Part]" = weakref.WeakKeyDictionary()
"""Of each view; one that a class makes of itself, as a slice of a Sequential, has none."""


class _Family:
    """The views of a model and of its modules.

    Args:
        written: the way of the model's calls.
        engine: of the model.
    """

    def __init__(self, written: Written, engine: Engine, model: nn.Module) -> None:
        self.written = written
        self.engine = engine
        self._paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
        self._seen: dict[int, nn.Module] = {}

    def view(self, module: nn.Module, path: str, engine: Engine | None) -> nn.Module:
        """A new view of a module."""
        made: nn.Module = object.__new__(_view_class(getattr(type(module), "_fxamp_base", type(module))))
        object.__setattr__(made, "__dict__", module.__dict__)
        reference: Any = weakref.ref(module) if engine is self.engine else lambda: module
        _parts[made] = _Part(reference, path, self, engine)
        return made

    def seen(self, child: Any, path: str) -> Any:
        """What forward is to see of a child: a view, or the child itself.

        1. Autocast runs a module without parameters, or a layer of torch's with float32 ones, as a graph would.
        2. A module that was converted by itself runs as such.
        """
        if not isinstance(child, nn.Module) or child in _parts or _is_seen_itself(child):
            return child
        if id(child) not in self._seen:
            is_called = type(child).forward is not nn.Module.forward
            self._seen[id(child)] = self.view(child, path, self._engine_of(child, path) if is_called else None)
        return self._seen[id(child)]

    def _engine_of(self, module: nn.Module, path: str) -> Engine:
        written, root = self.written, self.engine
        overrides = overrides_within(module, path, written.options.overrides, self._paths)
        key = (*likeness(module), tuple(overrides.items()))
        if key not in written.engines:
            own = dataclasses.replace(written.options, overrides=overrides, output_dtype=None)
            made = Engine(own, root.workshop, Written(own, written.rewrite), root.is_frozen)
            made.is_boundary = True
            written.engines[key] = made
        engine = written.engines[key]
        engine.paths += () if path in engine.paths else (path,)
        return engine

    def note(self, path: str, engine: Engine) -> None:
        """Take note of a part of which there are graphs, and on the graphs what they are for."""
        blocks = self.written.blocks
        if path and path not in blocks and engine.variants:
            blocks[path] = engine
            for variant in engine.all_variants():
                mark_block(variant, engine.paths)


def _is_seen_itself(child: nn.Module) -> bool:
    weights = list(child.parameters())
    is_layer = not child._modules and type(child).__module__.startswith("torch.nn.")
    is_other = engine_of(child) is not None or isinstance(child, torch.jit.ScriptModule)
    return is_other or not weights or (is_layer and not any(map(is_stored_low, weights)))


class _Children(MutableMapping[str, Any]):
    """The children of a module as its forward sees them; what is written is written into the module's own."""

    def __init__(self, own: dict[str, Any], part: _Part) -> None:
        self._own = own
        self._part = part

    def __getitem__(self, name: str) -> Any:
        return self._part.family.seen(self._own[name], f"{self._part.path}.{name}".lstrip("."))

    def __setitem__(self, name: str, child: Any) -> None:
        self._own[name] = _itself(child)

    def __delitem__(self, name: str) -> None:
        del self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def _itself(value: Any) -> Any:
    """The module that a view shows; anything else as it is."""
    part = _parts.get(value) if isinstance(value, nn.Module) else None
    return value if part is None else part.module


# Weak on both sides: the class of a view holds the user's, which it is derived from.
_classes: "weakref.WeakKeyDictionary[type, weakref.ref[type]]" = weakref.WeakKeyDictionary()


def _view_class(base: type) -> type:
    found = _classes[base]() if base in _classes else None
    if found is None:
        found = _make_class(base)
        _classes[base] = weakref.ref(found)
    return found


def _make_class(base: Any) -> type:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        part = _parts.get(self)
        return base.forward(self, *args, **kwargs) if part is None else part.run(self, base.forward, args, kwargs)

    def __getattr__(self: Any, name: str) -> Any:
        found = base.__getattr__(self, name)
        part = _parts.get(self)
        return found if part is None else part.shown(self, name, found)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        base.__setattr__(self, name, _itself(value))

    def children(self: Any) -> Any:
        own, part = self.__dict__["_modules"], _parts.get(self)
        return own if part is None else _Children(own, part)

    def set_children(self: Any, given: Any) -> None:
        self.__dict__["_modules"] = given

    names = {
        "forward": forward,
        "__getattr__": __getattr__,
        "__setattr__": __setattr__,
        "_modules": property(children, set_children),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "_fxamp_base": base,
    }
    return subclass(base, names)
