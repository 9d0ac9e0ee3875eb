"""What a forward that runs as it is written sees of its model: views (`fxamp.model.view_class`), whose calls look for a
graph."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from fxamp.capability import autocast_runs_lstm
from fxamp.capture.refusals import Refusals
from fxamp.dtypes import LOW_DTYPES, autocast_kind, device_of
from fxamp.ir import Colour
from fxamp.lists import OpLists
from fxamp.model.autocasting import autocast_around, running
from fxamp.model.blocks import mark_block
from fxamp.model.engine import Engine, engine_of
from fxamp.model.likeness import kind, likeness
from fxamp.model.part_options import decisions, is_decided, options_within
from fxamp.model.view_class import may_be_viewed, new_view, part_of
from fxamp.model.wide_arguments import WideArguments, computes_in_float32
from fxamp.model.wide_copies import take_back_writes, wide_copy
from fxamp.opnames import module_name
from fxamp.override_keys import around, override_of
from fxamp.runtime.masters import is_stored_low
from fxamp.tree import every_module

_NORMS = (nn.LayerNorm, nn.RMSNorm)  # those whose weights may have more than one dimension
_BIASED = (nn.Linear, nn.Bilinear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)  # no norm reads a bias
_PRODUCTS = (nn.Linear, nn.Bilinear, _ConvNd)


@dataclasses.dataclass(frozen=True)
class Part:
    """What a view shows.

    Attributes:
        reference: gives the module; None once it is gone, if it is the model itself, which views must not keep alive.
        engine: of its calls; None where it is none that is called, as torch's containers.
        is_denied: whether an override denies it, or torch.autocast fails at it.
        kind: the module's class when the view was made. For the time of a call a forward may give it another one (as
            `parametrize` does, which PEFT's LoRA of parameters comes to): it has no graph then, and children of that
            call alone, of which no views are kept.
    """

    reference: Callable[[], nn.Module | None]
    path: str
    family: "Family"
    engine: Engine | None
    is_denied: bool
    kind: type[nn.Module]

    @property
    def module(self) -> nn.Module | None:
        return self.reference()

    def run(self, view: nn.Module, written: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the module, in a graph or as it is written.

        1. Without gradients only what has a graph looks for one: who generates text calls each part for each token. In
           a step of training it looks as well: it is a teacher, or a checkpoint of torch's older kind; and so does a
           layer whose op is in another list than by default, which autocast does not know.
        2. Where forward has switched autocast off, its author wants float32. So it is in the backward of a function
           of the model's own, which no region is around.
        3. A layer whose weights are shown in float32 there may be given low values that would be float32 if the
           weights were: a state that was joined with them.
        4. A part that an override denies is given float32 where no graph holds it, as what is around it may have made
           its arguments low.
        """
        module, engine = self.module, self.engine
        if module is None or engine is None or type(module) is not self.kind or self.family.is_protected():
            if isinstance(module, _PRODUCTS) and any(map(is_stored_low, module.parameters())):
                args, kwargs = pytree.tree_map_only(torch.Tensor, _in_float32, (args, kwargs))
            return self._as_written(view, written, args, kwargs)
        looks = torch.is_grad_enabled() or getattr(running, "has_gradients", False)
        if not engine.variants and not looks and not self.family.is_moved(type(module)):
            return self._as_written(view, written, args, kwargs)
        take_back_writes()
        before, running.view = getattr(running, "view", None), view
        calls = self.family.written.calls_as_written
        try:
            return engine(module, args, kwargs)
        finally:
            running.view = before
            self.family.note(self.path, engine, is_held=calls == self.family.written.calls_as_written)

    def _as_written(
        self, view: nn.Module, written: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        is_on = not self.is_denied
        if getattr(running, "is_on", True) == is_on or self.family.is_protected():
            return self.with_wide(written, view, args, kwargs)
        with self.family.autocast(is_on):
            return self.with_wide(written, view, args, kwargs)

    def with_wide(
        self, written: Callable[..., Any], view: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A forward as it is written, of a denied part on float32 arguments."""
        module, family = self.module, self.family
        if not self.is_denied or module is None or not family.makes_low or not computes_in_float32(module):
            return written(view, *args, **kwargs)
        given = WideArguments(family.written.options.low, self.path)
        try:
            args, kwargs = tuple(map(given.of, args)), {name: given.of(value) for name, value in kwargs.items()}
            return written(view, *args, **kwargs)
        finally:
            given.put_back()
            given.take_back()

    def child(self, view: nn.Module, name: str, value: Any) -> Any:
        """What forward is to see of a child."""
        is_of_now = self.module is not None and type(self.module) is not self.kind
        if is_of_now or type(view)._fxamp_compares_classes:  # type: ignore[attr-defined]
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


class Family:
    """The views of a model and of its modules.

    Args:
        written: the way of the model's calls (`fxamp.model.written`).
        engine: of the model.
    """

    def __init__(self, written: Any, engine: Engine, model: nn.Module) -> None:
        self.written = written
        self.engine = engine
        self._paths = [path for path, _ in every_module(model)]
        lists, default = written.options.lists, OpLists.default()
        self._moved = frozenset(op for op in lists if lists.colour(op) != default.colour(op))
        overrides = written.options.overrides
        self.makes_low = self._colour_of("") != "deny" or any(colour != "deny" for colour in overrides.values())
        self._model = weakref.ref(model)
        self._seen: dict[int, nn.Module] = {}

    def is_autocast_on(self) -> bool:
        return torch.is_autocast_enabled(self._device_kind())

    def autocast(self, is_on: bool) -> contextlib.AbstractContextManager[None]:
        """Around a part that no graph holds: off for one that an override denies, on for another one inside of such."""
        return autocast_around(self._device_kind(), self.written.options.low, is_on)

    def _device_kind(self) -> str:
        """Of the model as it is now: it may have been moved."""
        model = self._model()
        return "cpu" if model is None else autocast_kind(device_of(model))

    def is_protected(self) -> bool:
        """Whether forward has switched autocast off, which was on around it."""
        return getattr(running, "is_on", True) and not self.is_autocast_on()

    def view(self, module: nn.Module, path: str, engine: Engine | None) -> nn.Module:
        """A new view of a module."""
        reference: Any = weakref.ref(module) if engine is self.engine else lambda: module
        is_denied = self._colour_of(path) == "deny" or self._fails_low(type(module))
        return new_view(module, Part(reference, path, self, engine, is_denied, type(module)))

    def seen(self, child: Any, path: str) -> Any:
        """What forward is to see of a child: a view, or the child itself.

        1. Autocast runs a module without parameters, or a layer of torch's with float32 ones, as a graph would, unless
           an override speaks of its path, its op is in another list than by default, or autocast fails at it;
           overrides by nodes' names do not hold there.
        2. A module that was converted by itself runs as such.
        3. What a class keeps beside the attributes' dictionary, as in slots, a view has not.
        """
        if not isinstance(child, nn.Module) or part_of(child) is not None:
            return child
        if id(child) not in self._seen:
            is_taken = self.written.takes_products and isinstance(child, _PRODUCTS)
            is_layer = not is_taken and _is_for_autocast(child)
            is_itself = _is_other(child) or (is_layer and not self._is_spoken_of(path, type(child)))
            self._seen[id(child)] = child if is_itself else self._new_view(child, path)
        return self._seen[id(child)]

    def _new_view(self, child: nn.Module, path: str) -> nn.Module:
        is_called = type(child).forward is not nn.Module.forward
        return self.view(child, path, self._engine_of(child, path) if is_called else None)

    def _is_spoken_of(self, path: str, kind: type) -> bool:
        is_other = self.is_moved(kind) or self._fails_low(kind)
        return is_other or self._colour_of(path) is not None or is_decided(path, self.written.options)

    def _fails_low(self, kind: type) -> bool:
        return issubclass(kind, nn.LSTM) and not autocast_runs_lstm(self.written.options.low, self._device_kind())

    def is_moved(self, kind: type) -> bool:
        """Whether the op of a layer stands in another list than by default."""
        return bool(self._moved) and module_name(kind) in self._moved

    def _colour_of(self, path: str) -> Colour | None:
        """What overrides say of a module as a whole."""
        overrides = self.written.options.overrides
        key = override_of(list(around(path)), "", overrides)
        return None if key is None else overrides[key]

    def _engine_of(self, module: nn.Module, path: str) -> Engine:
        written, root = self.written, self.engine
        options = options_within(module, path, written.options, self._paths)
        if _is_for_autocast(module):
            whole = {key: colour for key, colour in options.overrides.items() if key == "*"}
            options = dataclasses.replace(options, overrides=whole)
        key = (*likeness(module), decisions(options))
        engine: Engine | None = written.engines.get(key)
        if engine is None:
            own = dataclasses.replace(options, output_dtype=None, is_part=True)
            inside = type(written)(own, written.rewrite)
            inside.kin = written.kin
            engine = Engine(own, root.workshop, inside, root.is_frozen)
            engine.refusals = Refusals(written.kin[kind(module)])
            engine.is_boundary = True
            written.engines[key] = engine
        engine.paths += () if path in engine.paths else (path,)
        return engine

    def note(self, path: str, engine: Engine, is_held: bool) -> None:
        """Take note of a part of which there are graphs, and on the graphs what they are for.

        Args:
            is_held: whether a graph held the call, and nothing of it ran as written.
        """
        blocks = self.written.blocks
        if not path and is_held:
            self.written.calls_itself = True
        if path and path not in blocks and engine.variants:
            blocks[path] = engine
            for variant in engine.all_variants():
                mark_block(variant, engine.paths)


def _in_float32(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in LOW_DTYPES else value


def _is_other(child: nn.Module) -> bool:
    return engine_of(child) is not None or isinstance(child, torch.jit.ScriptModule) or not may_be_viewed(type(child))


def _is_for_autocast(child: nn.Module) -> bool:
    weights = list(child.parameters())
    is_layer = not child._modules and type(child).__module__.startswith("torch.nn.")
    return not weights or (is_layer and not any(map(is_stored_low, weights)))
