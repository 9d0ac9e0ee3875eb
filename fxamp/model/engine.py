"""What runs a converted model: its rewritten graphs, and which of them a call takes.

A graph is made for one call structure and for the Python state it read; the engine finds the one that holds, or has
one made. Calls that no graph can hold go another way: to Dynamo, or as they are written. Copies of a model share one
engine.
"""

import copy
import dataclasses
import logging
import sys
import weakref
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.fx.proxy import TraceError

from fxamp.capture.data import NOTHING_LEFT_OUT
from fxamp.capture.inputs import CallSpec, call_key, flatten_call, has_only_defaults
from fxamp.capture.modes import check_not_followed
from fxamp.capture.reached import is_mistaken_by_dynamo
from fxamp.capture.refusals import Refusals, is_for_python
from fxamp.capture.selves import OtherSelves
from fxamp.capture.symbolic import one_at_a_time
from fxamp.capture.unseen import outside_of_the_call
from fxamp.errors import CaptureError, InvariantError, OpListError, OptionError, ShardedParameterError
from fxamp.ir import ENGINE
from fxamp.model.autocasting import outside_autocast
from fxamp.model.blocks import mark_block, mark_blocks
from fxamp.model.changes import Changes
from fxamp.model.collected import COLLECTED, is_collected_from
from fxamp.model.hooked import check_hooks
from fxamp.model.lost_updates import look_for_averages
from fxamp.model.structure import Structure
from fxamp.model.variant import Variant, takes_apart
from fxamp.model.views import base_of, check_class, plain_tree
from fxamp.model.ways import Way
from fxamp.model.workshop import Workshop
from fxamp.tree import every_module

log = logging.getLogger("fxamp")


_BROKEN_RULE = "the graph of %s breaks a rule of fxamp's own, please report it: %s"


class Engine:
    """The rewritten forwards of one model; copies of the model share it.

    Args:
        options: what convert() was asked for; must pickle.
        workshop: builds variants.
        otherwise: how calls run that no graph holds.
        is_frozen: whether low weights are kept from call to call.
    """

    # A model that decides on shapes gets a graph for each; past this many the sizes are not worth a graph each.
    max_variants = 16
    # Engines for the states that a model's modules alternate between.
    most_known = 4

    def __init__(self, options: Any, workshop: Workshop, otherwise: Way, is_frozen: bool = False) -> None:
        self.options = options
        self.workshop = workshop
        self.otherwise = otherwise
        self.boundaries: dict[str, Engine] = {}  # inside this model, by path
        self.is_boundary = False
        self.stored_by: Literal["call", "preview", "layers"] = "call"  # what told convert() which weights become low
        self.paths: tuple[str, ...] = ()  # of a boundary and those equal to it, in the model they belong to
        self.is_trained = False  # whether it was called while gradients were on
        self.loads = 0  # of state dicts into the model
        self.has_met_gradients = False  # in a call of the model as it is for this engine
        self.announced: tuple[int, bool, str, bool] | None = None  # so that a call which made no graph is told of too
        self.fallbacks: dict[str, None] = {}
        self.refusals = Refusals()
        self.others = OtherSelves()
        self.is_frozen = is_frozen
        self.changes = Changes()
        self.left_out = NOTHING_LEFT_OUT  # of its graphs
        self.variants: dict[Any, list[Variant]] = {}
        self.numbered: dict[str, Variant] = {}
        self.previews: list[Variant] = []
        self.structures: weakref.WeakKeyDictionary[nn.Module, Structure] = weakref.WeakKeyDictionary()
        self.fingerprint: Any = None
        self.known: dict[Any, Engine] = {}  # for the model as it was at other times, by fingerprint; they share it

    def __reduce__(self) -> Any:
        kept = {name: getattr(self, name) for name in ("boundaries", "is_boundary", "paths", "stored_by")}
        return Engine, (self.options, self.workshop, self.otherwise, self.is_frozen), kept

    @property
    def way(self) -> Way:
        """How calls that no graph holds run at present."""
        return self.otherwise.present

    @property
    def blocks(self) -> dict[str, "Engine"]:
        """Of the submodules that are converted by themselves, by path: boundaries, or parts of a forward that runs as
        it is written."""
        return {**self.boundaries, **self.way.blocks}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Engine":
        return self  # graphs read everything by path, so copies of the model can share them

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: list[str] | None = None
    ) -> Any:
        """Run the call.

        Args:
            numbers: of the graphs to ask whether they hold; None: all are asked.
        """
        if not torch.compiler.is_dynamo_compiling():  # which has been through compiling.py
            if not self.is_current(module):
                return self._recheck(module)(module, args, kwargs)
        if self.options.capture == "dynamo":
            return self._call_otherwise(module, args, kwargs)
        variant: Variant | None
        try:
            variant, given = self._variant_for(module, args, kwargs, numbers)
        except CaptureError as error:
            self.fall_back(module, error)
            variant, given = None, []
        except TraceError as error:  # from reading arguments, which are proxies: what a capture meets is a CaptureError
            raise CaptureError(
                f"torch.fx traces {type(module).__qualname__}, which is converted: its calls choose among graphs of "
                "its own. Trace the model first (as create_feature_extractor and torch.fx passes do), then convert the "
                "GraphModule that comes of it."
            ) from error
        if variant is None:  # not while the error is handled: what forward raises then is the model's own
            return self._call_otherwise(module, args, kwargs)
        result = outside_autocast(variant.compiled.run, module, *given)
        if self.boundaries:
            self.announce_new(module)  # of graphs that the blocks have made
        return result

    def _variant_for(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: list[str] | None
    ) -> tuple[Variant, list[Any]]:
        """The graph that a call takes, a new one where none holds, and what it is given.

        Raises:
            CaptureError: no graph holds it.
        """
        if not torch.compiler.is_compiling():
            if is_collected_from(module):
                raise CaptureError(COLLECTED)
            check_not_followed()
        key, inputs = call_key(args, kwargs)
        known = self.variants.get(key, []) if numbers is None else map(self.numbered.__getitem__, numbers)
        for variant in known:
            # To a graph's maker Dynamo shows a member of an IntEnum as the number that it is.
            if variant.count == len(inputs) and (given := variant.inputs_for(module, inputs)) is not None:
                return variant, given
        variant = self.capture(module, args, kwargs)
        may_ask = not torch.compiler.is_compiling()  # there is no data then
        made = (variant if may_ask else variant.captured).inputs_for(module, inputs)
        self.announce_new(module)
        if made is None:
            raise CaptureError(
                "what its graph was captured for does not hold for the call itself: forward changes what it reads, as "
                "a cache that a first call fills. Call the model once before it is converted."
            )
        return variant, made

    def _recheck(self, module: nn.Module) -> "Engine":
        """The engine for a model that is new here, or whose modules or hooks have changed: itself, or a fresh one.

        Raises:
            OptionError: the model itself has been parametrized since it was converted.
        """
        check_class(module)
        if self.options.opt_level == "O2":
            look_for_averages(module.parameters())
        engine, structure = self, Structure(module)
        if self.fingerprint is not None and structure.fingerprint != self.fingerprint:
            engine = self._succeeded(module, structure.fingerprint)
            if module.__dict__.get(ENGINE) is self:  # a part of a model that runs as it is written has none
                module.__dict__[ENGINE] = engine
        for variant in engine.all_variants():
            variant.forget(module)
        engine.refusals.forget(module)
        engine.fingerprint = structure.fingerprint
        engine.structures[module] = structure
        return engine

    def _succeeded(self, module: nn.Module, fingerprint: Any) -> "Engine":
        """The engine for a model that has changed; equal blocks that have changed alike share it.

        A model may change back (`model.head = model.heads[task]` before each call), so a few are kept.
        """
        if fingerprint not in self.known:
            log.info("%s has changed since it was captured: it is captured again", type(module).__qualname__)
            made = Engine(self.options, self.workshop, copy.deepcopy(self.otherwise), self.is_frozen)
            made.is_boundary, made.paths, made.fingerprint = self.is_boundary, self.paths, fingerprint
            made.known, made.stored_by = self.known, self.stored_by
            self.known |= {self.fingerprint: self, fingerprint: made}
            for oldest in list(self.known)[: -self.most_known]:
                del self.known[oldest]
        found = self.known[fingerprint]
        found.is_trained |= self.is_trained
        found.is_frozen |= self.is_frozen
        found.boundaries = _blocks_of(module, self.boundaries)
        return found

    def current(self, module: nn.Module) -> "Engine":
        """The engine of the model as it is now: a fresh one where it has changed since its graphs were made."""
        return self if self.is_current(module) else self._recheck(module)

    def is_current(self, module: nn.Module) -> bool:
        """Whether a model's modules and hooks are as they were when its graphs were made."""
        structure = self.structures.get(module)
        return structure is not None and structure.holds()

    def fall_back(self, module: nn.Module, reason: CaptureError) -> None:
        """Let calls that symbolic capture cannot follow go another way, saying why the first time.

        Before any call was captured it is convert()'s preview that failed, which says nothing of the calls to come.

        Raises:
            CaptureError: the reason, where the user asked for symbolic capture.
        """
        if self.options.capture == "symbolic":
            raise reason
        is_first = self.fingerprint is not None and not self.fallbacks
        if is_for_python(reason) or (is_first and is_mistaken_by_dynamo(base_of(module).forward, module)):
            self.otherwise.prefer_written()
        text, name = str(reason), type(module).__qualname__
        if self.fingerprint is None:
            log.info("no preview of %s from assumed types; its first call decides how it is captured: %s", name, text)
        elif text not in self.fallbacks:
            is_news = not self.is_boundary or self.changes.is_given_up
            level = logging.INFO if is_news and not self.fallbacks else logging.DEBUG
            log.log(level, "%s: %s, not as a symbolic graph: %s", name, self.otherwise.how(module), text)
            self.fallbacks[text] = None

    @property
    def _falls_back(self) -> bool:
        """Whether there is another way for calls that symbolic capture cannot follow."""
        return bool(self.options.capture == "auto")

    def _call_otherwise(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_compiling():  # Dynamo of torch 2.11 cannot follow the check
            self.others.check(module, base_of(module).forward)
        result = outside_autocast(self.otherwise, base_of(module), module, args, kwargs)
        self.announce_new(module)
        return result

    def announce_new(self, module: nn.Module) -> None:
        """Announce graphs that are new since the last time."""
        count = sum(not variant.is_preview for variant in self.graphs())
        if not count and (
            torch._C._len_torch_dispatch_stack() or torch._C._functorch.maybe_current_level() is not None
        ):
            return  # Dynamo steps aside for the mode, or the transform; the next call may make graphs
        if self.otherwise.is_for_next_call:
            if not count:
                self.previews.clear()
            return  # the next call makes graphs, or tells that there can be none
        if self.is_boundary or torch.compiler.is_compiling():
            return
        self.has_met_gradients |= torch.is_grad_enabled()
        state = count, self.way.runs_as_written, self.way.runs, self.has_met_gradients
        if state != self.announced:
            self.announced = state
            if not count or self.blocks:
                self.previews.clear()  # Dynamo gave up, or was not asked, whatever the preview promised
            mark_blocks(module, self.blocks)
            with outside_of_the_call():
                _unseen_by_dynamo(self.workshop.announce)(module)

    def capture(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_example: bool = False,
        sizes_vary: bool | None = None,
    ) -> Variant:
        """Make, or find, the variant for one call; no layer is run on the real inputs. One thread at a time.

        Args:
            is_example: the call itself is not made: the model keeps the state that it had.
            sizes_vary: whether it is to hold for all sizes of a condition, where there is one, or for these alone;
                None: for these, if they are the first, and else for all that turn out to be decided alike.
        """
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # compiling.py has tried
        capture = _unseen_by_dynamo(self._capture)  # which would trace a trace, called inside of a compiled function
        with one_at_a_time:
            made: Variant = capture(module, args, kwargs, is_example, sizes_vary)
        return made

    def _capture(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_example: bool,
        sizes_vary: bool | None,
    ) -> Variant:
        if self.fingerprint is None:
            self.fingerprint = Structure(module).fingerprint
        check_not_followed()  # those come past _variant_for that Dynamo traces, and examples
        key, inputs = call_key(args, kwargs)
        known = self.variants.get(key, [])
        for variant in known:
            is_found = sizes_vary is None or variant.captured.is_for_dynamo(inputs, sizes_vary)
            if is_found and variant.holds(module, inputs):
                return variant
        if (reason := self.refusals.reason(key, module)) is not None:
            raise CaptureError(reason)
        stale = [variant for variant in known if variant.fits(module, inputs)]
        self.changes.follow(module, stale, known, self._falls_back)
        if sum(map(len, self.variants.values())) >= self.max_variants:
            remedy = "Pad the inputs to a few sizes"
            if self.options.opt_level != "O1":
                remedy += ", or use opt_level='O1', which Dynamo can follow"
            elif not self._falls_back:
                remedy += ", or use capture='dynamo'"
            raise CaptureError(
                f"{type(module).__qualname__} asked for more than {self.max_variants} graphs: its forward decides on "
                f"sizes, data or arguments that differ at every call. {remedy}."
            )
        spec, inputs = flatten_call(args, kwargs)
        if sizes_vary is None:
            sizes = "tried" if _is_second_size(known, inputs) else "one"
        else:
            sizes = "condition" if sizes_vary else "one"
        try:
            with outside_of_the_call():
                variant = self._build(module, spec, inputs, sizes)
                if sizes_vary is None and self._falls_back:
                    check_hooks(variant, module, self.options, self.otherwise)
        except CaptureError as error:
            if self._falls_back and sizes_vary is None:  # torch.compile has no data that might have answered
                self.refusals.add(key, module, error)
            raise
        if (settings := variant.captured.settings) is not None:
            settings.make(module)
            same = next((other for other in known if other.holds(module, inputs)), None)
            if is_example:
                settings.undo(module)
            if same is not None:
                return same  # from before they were taken back
        self._keep(variant, module, key, known)
        return variant

    def _keep(self, variant: Variant, module: nn.Module, key: Any, known: list[Variant]) -> None:
        """Have a new graph found by calls like the one that it was made for.

        Args:
            known: those of such calls.
        """
        if self.is_frozen:
            self.workshop.keep_weights(variant, module)
        if self.is_boundary:
            mark_block(variant, self.paths)
            variant.note_call(module)
        if variant.weights is not None:
            variant.weights.note(module)
        self.changes.note(variant)
        self.left_out = variant.captured.answers.left_out
        known.append(variant)
        self.variants[key] = known
        self.numbered[variant.number] = variant
        for number in self.numbered.keys() - {kept.number for kept in self.own_variants()}:
            del self.numbered[number]  # has made room for others
        self.previews.clear()

    def _build(self, module: nn.Module, spec: CallSpec, inputs: list[Any], sizes: str) -> Variant:
        """The variant of a call.

        1. A batch norm that torch takes apart would give float32 of low values and its float32 statistics: it is high.
        2. A defect of the passes that an invariant shows is no reason to refuse a model that can run another way.
        3. Nor is what the user is to change a reason to refuse a part of a model, which runs as written then.
        4. What torch.func's transforms forbid (a draw of their own kind, a write into what they were not given) is for
           the call; in a capture it would meet values that stand for none of theirs.
        """
        options, is_transformed = self.options, takes_apart()
        if is_transformed:
            options = dataclasses.replace(options, lists=options.lists.override(deny=["batch_norm"]))
        try:
            with temporarily_clear_interpreter_stack():
                plain, live = plain_tree(module), self.changes.live
                variant = self.workshop.build(plain, spec, inputs, options, live, sizes, left_out=self.left_out)
        except (OptionError, ShardedParameterError) as error:
            if ENGINE in module.__dict__:
                raise
            raise CaptureError(str(error)) from error
        except InvariantError as error:
            if not self._falls_back:
                raise
            name = type(module).__qualname__
            log.warning(_BROKEN_RULE, name, error)
            self.otherwise.prefer_written()  # Dynamo's graphs would most likely break it, too
            raise CaptureError(f"the graph of {name} breaks a rule of fxamp's own: {error}") from error
        variant.note_transforms(is_transformed)
        return variant

    def preview(self, module: nn.Module) -> Variant | None:
        """The graph as it would be for assumed types; None where the assumptions do not fit the model.

        Raises:
            CaptureError, OptionError, OpListError: what a graph made for real inputs would meet as well.
        """
        name = type(module).__qualname__
        try:
            if has_only_defaults(module):
                log.info("no preview of %s: what its forward takes has defaults; its first call makes its graph", name)
                return None
            variant = self.workshop.build(plain_tree(module), None, None, self.options)
        except (CaptureError, OptionError, OpListError):
            raise
        except InvariantError as error:
            log.warning(_BROKEN_RULE, name, error)
            return None
        except Exception as error:  # a preview never runs, so what is wrong with it must not stop the conversion
            log.info("no preview of %s from assumed types (%s); its first call makes its graph", name, error)
            return None
        if self.is_boundary:
            mark_block(variant, self.paths)
        self.previews = [variant]
        return variant

    def freeze(self, module: nn.Module) -> None:
        """Keep the low weights from call to call while gradients are off, in these graphs and in later ones."""
        self.is_frozen = True
        for path, inner in {**self.blocks, **_blocks_of(module, self.boundaries)}.items():
            inner.freeze(module.get_submodule(path))
        for variant in self.own_variants() or self.previews:
            self.workshop.keep_weights(variant, module)

    def start_again(self) -> None:
        """Forget every graph: the dtypes in which the parameters are stored have changed."""
        self.variants.clear()
        self.numbered.clear()
        self.fingerprint = None

    def all_variants(self) -> list[Variant]:
        """Every graph there is: those that run, or the preview before the first call."""
        made = [*self.own_variants(), *self.way.variants]
        return [variant for variant in made if not variant.is_preview] or made or self.previews

    def own_variants(self) -> list[Variant]:
        """The graphs of the model's own forward that have been made for calls."""
        return [variant for known in self.variants.values() for variant in known]

    def graphs(self) -> list[Variant]:
        """These, and those of the blocks that are converted by themselves; one of equal blocks stands for all."""
        inner = {id(engine): engine for engine in self.blocks.values()}
        return [*self.all_variants(), *(variant for engine in inner.values() for variant in engine.graphs())]


def _is_second_size(known: list[Variant], inputs: list[Any]) -> bool:
    """Whether sizes vary: it is worth the time then to find out for which of them a graph holds."""
    others = [variant.captured for variant in known if variant.captured.is_for_one_size]
    return not torch.compiler.is_compiling() and any(not other.holds_for(inputs) for other in others)


def _unseen_by_dynamo(function: Any) -> Any:
    """The function, into which no Dynamo goes that traces or resumes its caller."""
    if "torch._dynamo" not in sys.modules:  # which takes seconds to import
        return function
    return torch._dynamo.disable(function)  # type: ignore[no-untyped-call]


def _blocks_of(model: nn.Module, paths: Iterable[str]) -> dict[str, Engine]:
    """The engines that blocks of a model have now; a block that was exchanged has none."""
    modules = dict(every_module(model))
    engines = {path: engine_of(modules.get(path)) for path in paths}
    return {path: engine.current(modules[path]) for path, engine in engines.items() if engine is not None}


def engine_of(model: Any) -> Engine | None:
    """The engine of a converted model, None for any other object."""
    found = getattr(model, "__dict__", {}).get(ENGINE)
    return found if isinstance(found, Engine) else None
