"""What calls at O1 run through that symbolic capture cannot follow: the model as it is written, or Dynamo."""

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.capture.frames import is_dynamos_own
from fxamp.capture.modes import are_modes_active, follow_modules
from fxamp.capture.undone import Before, before_call
from fxamp.dynamo.backend import DynamoForward
from fxamp.model.engine import engine_of
from fxamp.model.hooked import matrices, multiplied
from fxamp.model.used_weights import NEARLY_ALL, share_given
from fxamp.model.ways import Way
from fxamp.model.written import Written
from fxamp.options import Options
from fxamp.override_keys import around
from fxamp.tree import every_module
from fxamp.words import percent

log = logging.getLogger("fxamp")


class Otherwise(Way):
    """Chooses by the first calls with gradients.

    1. A model whose weights are in modules of some size runs as it is written, and those modules as graphs: a detector,
       or a mixture of experts. It stays so if graphs hold nearly all of them: nothing is compiled, and what the data
       decides compiles nothing anew. Also if it has kept something low (a recurrent state): modules that Dynamo leaves
       outside of its graphs are float32, and do not take that.
    2. Any other is for Dynamo, whose graphs are larger than a layer.
    3. What Dynamo leaves outside of its graphs runs in float32. Where that is more than a little, or becomes so as it
       gives up one thing after another, the model runs as it is written after all, as torch.autocast would run it;
       unless that raises where Dynamo does not.
    4. So does a model that speaks of autocast where a trial run does not find all regions in which it is switched off.
    5. Calls without gradients go the way of those with; before there are any, as written where Dynamo makes no graph.
    6. A model at which Dynamo fails runs as it is written, unless that raises as well.

    Args:
        options: what convert() was asked for.
        rewrite: the pipeline.
    """

    may_be_written = True

    def __init__(self, options: Options, rewrite: Callable[..., Any]) -> None:
        self._by_dynamo = DynamoForward(options, rewrite)
        self.written = Written(options, rewrite)
        self.chosen: DynamoForward | Written | None = None
        self.without_gradients: DynamoForward | Written | None = None  # while none is chosen
        self._gone: DynamoForward | Written | None = None  # by the last call
        self._is_judged = False  # by what Dynamo's graphs hold
        self._has_left = False  # Dynamo, and has come through no call since
        self._stays = False  # with Dynamo, whatever it leaves out

    def __reduce__(self) -> Any:
        return Otherwise, (self.by_dynamo.options, self.by_dynamo.rewrite)

    @property
    def by_dynamo(self) -> DynamoForward:
        """The way through Dynamo."""
        return self._by_dynamo

    @property
    def present(self) -> DynamoForward | Written:
        """The way whose graphs there are, and that tells how calls run."""
        way = self.chosen or (None if self.by_dynamo.trains else self.without_gradients)
        return way or self.by_dynamo

    @property
    def watch(self) -> Any:
        """What runs Dynamo's graphs in the place of their compiled forwards."""
        return self.by_dynamo.watch

    @watch.setter
    def watch(self, given: Any) -> None:
        self.by_dynamo.watch = given

    @property
    def is_open(self) -> bool:
        """Whether no call has told yet whether Dynamo's graphs hold enough."""
        return self.chosen is None and not self._is_judged and not self._stays

    @property
    def is_for_next_call(self) -> bool:
        """Whether the last call has told of another way, which none has gone yet."""
        way = self.chosen or (None if torch.is_grad_enabled() else self.without_gradients)
        return way is not None and way is not self._gone

    def stay_outside(self, name: str) -> None:
        """Let a Dynamo that traces the model from outside break its graph here."""
        self.by_dynamo.stay_outside(name)
        self.written.stay_outside(name)

    def prefer_written(self) -> None:
        """Run all calls as they are written: there is a reason that Dynamo does not help with."""
        self.chosen = self.written

    def how(self, module: nn.Module) -> str:
        """How calls run, in a sentence about the model."""
        return self._way_for(module, torch.is_grad_enabled() and _tells(())).how(module)

    def _way_for(self, module: nn.Module, tells: bool) -> "DynamoForward | Written":
        if self.chosen is not None:
            return self.chosen
        if self.without_gradients is not None and not torch.is_grad_enabled():
            return self.without_gradients
        is_tried = tells and _share_in_modules(module) >= NEARLY_ALL and not _needs_a_compiler(module)
        return self.written if is_tried else self.by_dynamo

    def settled(
        self, base: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> DynamoForward | Written:
        """The way that calls take from now on; where none has told, this one is made for it."""
        tells = torch.is_grad_enabled() and _tells((args, kwargs))
        if self._way_for(module, tells) is self.by_dynamo:
            self._leaves_for_regions(base, module, args, kwargs)
        elif self.chosen is None:
            self(base, module, args, kwargs)
        return self.chosen or self.by_dynamo

    def __call__(self, base: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tells = torch.is_grad_enabled() and _tells((args, kwargs))
        way = self._gone = self._way_for(module, tells)
        if way is self.by_dynamo:
            return self._through_dynamo(base, module, args, kwargs, tells)
        if self._has_left:
            return self._away_from_dynamo(base, module, args, kwargs)
        if not tells or self.chosen is not None:
            return way(base, module, args, kwargs)
        low = self.by_dynamo.options.low
        before = _kept_low(module, low)
        result = way(base, module, args, kwargs)
        if _kept_low(module, low) - before:
            self.chosen = self.written
        else:
            self._judge_parts(module)
        return result

    def _through_dynamo(self, base: Any, module: nn.Module, args: Any, kwargs: Any, tells: bool) -> Any:
        if self._leaves_for_regions(base, module, args, kwargs):
            self._gone = self.written
            return self._away_from_dynamo(base, module, args, kwargs)
        is_known = self._is_judged and not self.by_dynamo.given_up
        asks = tells and not is_known
        asks_without = not torch.is_grad_enabled() and self.without_gradients is None and _tells((args, kwargs))
        if self._stays or not (asks or asks_without):
            return self.by_dynamo(base, module, args, kwargs)
        before = Before(base.forward, module, (args, kwargs))
        try:
            with self.by_dynamo.noting() as given:
                result = self.by_dynamo(base, module, args, kwargs)
        except RuntimeError as error:
            if not is_dynamos_own(error) or not before.put_back():
                raise
            return self._away_from_its_error(base, module, args, kwargs, error)
        if asks:
            self._judge_graphs(module, result, given)
        else:
            self._judge_without_gradients(module, given)
        return result

    def _leaves_for_regions(self, base: Any, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Leave Dynamo if forward may switch autocast off where its graphs would not show it; what is written does."""
        if self._stays or self.by_dynamo.calls or not _tells((args, kwargs)) or _needs_a_compiler(module):
            return False
        stopped_by = self.by_dynamo.look_for_regions(base, module, args, kwargs)
        if stopped_by:
            text = "%s: from now on %s, as it may switch autocast off where Dynamo's graphs would not show it (%s)"
            log.info(text, type(module).__qualname__, self.written.how(module), stopped_by)
            self.chosen, self._has_left = self.written, True
        return bool(stopped_by)

    def _away_from_dynamo(self, base: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        before = before_call(base.forward, module, (args, kwargs))
        try:
            result = self.written(base, module, args, kwargs)
        except RuntimeError as error:
            if before is None or not before.put_back():  # forward would do twice what it did before the error
                raise
            result = self.by_dynamo(base, module, args, kwargs)  # or the error is the model's own
            self.chosen = self.without_gradients = self._gone = self.by_dynamo
            self._stays = True
            log.warning("%s: left to Dynamo, as it raises under torch.autocast: %s", type(module).__qualname__, error)
        self._has_left = False
        return result

    def _away_from_its_error(self, base: Any, module: nn.Module, args: Any, kwargs: Any, error: RuntimeError) -> Any:
        try:
            result = self.written(base, module, args, kwargs)
        except Exception:
            raise error from error.__cause__  # the model's own, or of no use
        self.chosen = self._gone = self.written
        name, how = type(module).__qualname__, self.written.how(module)
        log.warning("%s: from now on %s, as Dynamo fails at it (%s: %s)", name, how, type(error).__name__, error)
        return result

    def _judge_parts(self, model: nn.Module) -> None:
        share = _share_in_parts(model, self.written.blocks)
        if self.written.calls_itself:
            share = max(share, _share_in_graphs(model))
        self.chosen = self.written if share >= NEARLY_ALL else self.by_dynamo
        if self.chosen is self.by_dynamo:
            text = "%s: captured by Dynamo from now on, as graphs of its parts hold %s of the weights alone"
            log.info(text, type(model).__qualname__, percent(share))

    def is_too_little(self, share: float | None, model: nn.Module) -> TypeGuard[float]:
        """Whether Dynamo's graphs hold so little of what a call used that the model is to run as it is written.

        Args:
            share: None where it used no matrix.
        """
        return share is not None and share < NEARLY_ALL and not _needs_a_compiler(model)

    def _judge_graphs(self, model: nn.Module, result: Any, given: set[int]) -> None:
        """Leave Dynamo if its graphs hold too little of what the call used.

        Args:
            given: the weights that its graphs were given, by identity.
        """
        self._is_judged = True
        share = share_given(model, result, given)
        if self.is_too_little(share, model):
            self.chosen, self._has_left = self.written, True
            text = "%s: from now on %s, as Dynamo's graphs hold %s of the weights alone"
            log.info(text, type(model).__qualname__, self.written.how(model), percent(share))

    def _judge_without_gradients(self, model: nn.Module, given: set[int]) -> None:
        """Leave Dynamo for such calls if none of its graphs was given a weight; how much the call used is not known."""
        weights = {id(weight) for _, weight in matrices(model)}
        is_left = bool(weights) and weights.isdisjoint(given) and not _needs_a_compiler(model)
        self.without_gradients = self.written if is_left else self.by_dynamo
        if is_left:
            self._has_left = True
            text = "%s: without gradients from now on %s, as Dynamo makes no graph of it"
            log.info(text, type(model).__qualname__, self.written.how(model))


def _tells(given: Any) -> bool:
    """Whether a call tells how the next ones are to run: one on real tensors, that nothing looks at."""
    is_plain = not torch.compiler.is_compiling() and not are_modes_active() and not follow_modules()
    is_transformed = torch._C._functorch.maybe_current_level() is not None
    are_fake = any(isinstance(value, FakeTensor) for value in pytree.tree_leaves(given))
    return is_plain and not is_transformed and not are_fake


def _share(model: nn.Module, is_inside: Callable[[nn.Module], bool]) -> float:
    """Of the weights those that are in a module, inside of the model, of which that is so."""
    sizes, parts = multiplied(model), dict(every_module(model))
    inside = [size for name, size in sizes.items() if any(map(is_inside, _owners(name, parts)))]
    return sum(inside) / max(1, sum(sizes.values()))


def _owners(weight: str, parts: dict[str, nn.Module]) -> Iterator[nn.Module]:
    """The modules that a weight is in, of those inside of a model. (A module may name weights after no part of it, as
    tensordict's parameters do.)
    """
    owner = weight.rpartition(".")[0]
    yield from (parts[path] for path in (around(owner) if owner else ()) if path in parts)


def _share_in_modules(model: nn.Module) -> float:
    return _share(model, lambda module: bool(module._modules) and type(module).forward is not nn.Module.forward)


def _share_in_parts(model: nn.Module, blocks: Any) -> float:
    """The same of modules that are graphs, or like one that is: experts that were not hit yet will be."""
    graphs = {type(part) for part in map(model.get_submodule, blocks) if part._modules}
    return _share(model, lambda module: type(module) in graphs)


def _share_in_graphs(model: nn.Module) -> float:
    """The same of those that graphs of the model itself read."""
    engine = engine_of(model)
    graphs = [] if engine is None else [variant.graph for variant in engine.all_variants()]
    read = {ir.weight_path(node) for graph in graphs for node in graph.nodes if ir.is_weight(node)}
    sizes = multiplied(model)
    return sum(size for name, size in sizes.items() if name in read) / max(1, sum(sizes.values()))


def _needs_a_compiler(model: nn.Module) -> bool:
    """Whether a model may call `flex_attention`, which holds every score in memory where it is not compiled."""
    flex = getattr(sys.modules.get("torch.nn.attention.flex_attention"), "flex_attention", None)
    if flex is None:
        return False
    names = {type(module).__module__ for module in model.modules()}
    files = [sys.modules[name] for name in names if name in sys.modules and not name.startswith("torch.nn.")]
    is_asked = getattr(getattr(model, "config", None), "_attn_implementation", "") == "flex_attention"  # transformers
    return is_asked or any(value is flex for file in files for value in vars(file).values())


def _kept_low(model: nn.Module, low: torch.dtype) -> set[int]:
    """Tensors of a dtype that a model keeps from call to call, by their ids."""
    kept = (value for module in model.modules() for value in vars(module).values())
    return {id(each) for each in pytree.tree_leaves(list(kept)) if isinstance(each, torch.Tensor) and each.dtype == low}
