"""Dynamo as the second front door: `torch.compile(model, backend="fxamp")`, and `convert(capture="dynamo")`.

Graph breaks, guards, recompiles and modes are Dynamo's business; each graph it hands over goes through the same
passes as a symbolic one.
"""

import collections
import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from fxamp import ir, pipeline
from fxamp.capture.frames import captures_apart, compile_apart, failed_captures, failure, frame_number
from fxamp.capture.inputs import refused_low_inputs
from fxamp.capture.modes import are_modes_active, follow_modules, modes_return, modes_wait
from fxamp.capture.recompute import compiler_call, fold_checkpoints
from fxamp.capture.unseen import no_saved_tensor_hooks
from fxamp.dtypes import autocast_kind, device_of
from fxamp.dynamo.preview import protected_lines
from fxamp.dynamo.variant import Rewrite, rewrite_dynamo_graph, run_checkpoints
from fxamp.errors import OptionError, nearest
from fxamp.model.results import Results
from fxamp.model.variant import Variant
from fxamp.model.views import nested, plain_inside
from fxamp.model.ways import Way
from fxamp.options import Options, check_options
from fxamp.runtime.apex_casts import casts_into
from fxamp.tree import every_parameter

log = logging.getLogger("fxamp")

Watch = Callable[[Variant, list[Any]], Any]
_TRANSFORMED = "%s: Dynamo captures nothing under torch.func's transforms: calls there run as written, in float32."
_IN_PART = (
    "%s speaks of torch.autocast, and Dynamo's graphs may not show all regions in which forward switches it off: a "
    "trial run that looks for them ended early (%s). What such a region computes is kept in float32 by "
    "overrides={path: 'deny'}."
)
_OPTION_NAMES = ("dtype", "level", "lists", "overrides", "pad_to", "pad", "output_dtype", "inner")


def backend(module: fx.GraphModule, example_inputs: list[Any], options: dict[str, Any] | None = None) -> Any:
    """`torch.compile(model, backend="fxamp", options={...})`: mixed precision, then an inner compiler.

        compiled = torch.compile(model, backend="fxamp", options={"dtype": torch.bfloat16, "inner": "inductor"})

    Args:
        options: dtype, level, lists, overrides, pad_to, pad, output_dtype as in fxamp.convert, and inner: the
            compiler of the rewritten graph ("inductor" by default, "eager", "aot_eager", "cudagraphs").

    Raises:
        OptionError: an option is unknown or has a value that is not allowed.
    """
    from torch._dynamo.backends.registry import lookup_backend  # slow to import, and only needed here

    given = dict(options or {})
    for name in given:
        if name not in _OPTION_NAMES:
            raise OptionError(
                f"options[{name!r}] is unknown.{nearest(name, _OPTION_NAMES)} Allowed: {', '.join(_OPTION_NAMES)}."
            )
    inner_name = given.pop("inner", "inductor")
    inner = lookup_backend(inner_name)
    checked = check_options(_device_of(example_inputs), **given)
    with no_saved_tensor_hooks():
        variant = rewrite_dynamo_graph(module, example_inputs, module, checked, pipeline.rewrite, fuses_casts=True)
    call = run_checkpoints(module) if inner_name == "eager" else compiler_call(module)
    return inner(fx.GraphModule(module, fold_checkpoints(variant.graph, call)), example_inputs)


class DynamoForward(Way):
    """A model's forward through `torch.compile`, with fxamp's passes on every graph and nothing else.

    Args:
        options: what convert() was asked for.
        rewrite: the pipeline.
    """

    # Dynamo would trace through, into what the user wrote, and run that in float32.
    reason_outside = "fxamp leaves {} to Dynamo itself; torch.compile(model, backend='fxamp') makes one graph of it"

    def __init__(self, options: Options, rewrite: Rewrite) -> None:
        self.options = options
        self.rewrite: Rewrite = rewrite
        self.variants: list[Variant] = []
        self.protected: frozenset[str] = frozenset()
        self._stopped_by: str | None = None  # the search for them; None before it
        self.watch: Watch | None = None
        self.calls = 0
        self.trains = False
        self.runs_as_written = False
        self.weights: set[str] = set()
        self.shared: dict[str, str] = {}
        self.given_up: dict[str, str] = {}
        self._given: set[int] | None = None
        self._captures: collections.Counter[int] = collections.Counter()  # by frame: in how many calls
        self._captured_at: dict[int, int] = {}  # by frame: in which call last
        self._alike = 1
        self._refusal: Exception | None = None
        self._not_run: Variant | None = None
        self._grown_at = 1
        self._compiled: Any = None
        self._seen: weakref.ref[nn.Module] | None = None
        self._nested: list[str] = []
        self._tells_of_transforms = False

    def how(self, module: nn.Module) -> str:
        """How calls run, in a sentence about the model."""
        return "captured by Dynamo"

    @contextlib.contextmanager
    def noting(self) -> Iterator[set[int]]:
        """Have graphs note what they are given, by identity."""
        given = self._given = set()
        try:
            yield given
        finally:
            self._given = None

    def __reduce__(self) -> Any:
        return DynamoForward, (self.options, self.rewrite)

    def look_for_regions(self, base: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Find the lines of forward that stand where torch.autocast is switched off, once; what stopped the search."""
        if self._stopped_by is None:
            self.protected, self._stopped_by = protected_lines(base, module, args, kwargs)
        return self._stopped_by

    def _call(self, base: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._stays_away(module):
            with plain_inside(module, nested(module)):
                return base.forward(module, *args, **kwargs)
        if follow_modules():  # for which Dynamo would capture it again
            return self._under_autocast(base, module, args, kwargs)
        self.calls += 1
        self.trains = self.trains or (module.training and torch.is_grad_enabled())
        self._seen = weakref.ref(module)
        if self._compiled is None:
            self.variants, self._nested, self._alike = [], nested(module), _most_alike(module)
            if stopped_by := self.look_for_regions(base, module, args, kwargs):
                log.warning(_IN_PART, type(module).__qualname__, stopped_by)
            self._compiled = compile_apart(base.forward, _weak_backend(self))
        running = self._compiled, self.variants, failed_captures()  # held while it runs, whatever other threads do
        known = len(running[1])
        try:
            inside = plain_inside(module, self._nested) if self._nested else contextlib.nullcontext()
            with (
                modes_wait(),
                casts_into(self.options.low),
                inside,
                captures_apart(self._give_up, self._most_captures()),
            ):
                result = running[0](module, *args, **kwargs)
        except BaseException as error:
            if failed_captures() != running[2]:
                self._compiled = None  # Dynamo would leave the frames alone in which it saw the error raised
            refused = self._refused(module, (args, kwargs), error)
            if refused is None:
                raise
            raise refused from error
        finally:
            if len(running[1]) > known and _are_fake(args, kwargs):
                for variant in running[1][known:]:
                    variant.is_preview = True
        if (refusal := self._taken_refusal()) is not None:
            raise refusal
        self.runs_as_written = not self.variants and not are_modes_active()
        return result

    def _under_autocast(self, base: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind, wanted = autocast_kind(device_of(module)), self.options.output_dtype
        with plain_inside(module, nested(module)), torch.autocast(kind, self.options.low):
            result = base.forward(module, *args, **kwargs)
        return result if wanted is None else Results(wanted).of(result)

    def _stays_away(self, module: nn.Module) -> bool:
        """Whether Dynamo must not see a call: it would give up, and not come back for others; or has given up."""
        is_transformed = torch._C._functorch.maybe_current_level() is not None
        if is_transformed and not self._tells_of_transforms:
            self._tells_of_transforms = True
            log.warning(_TRANSFORMED, type(module).__qualname__)
        return is_transformed or (are_modes_active() and (follow_modules() or (self.calls > 0 and not self.variants)))

    def _refused(self, module: nn.Module, given: Any, error: BaseException) -> Exception | None:
        """What to tell of an error in a call, None where it is the model's own."""
        if not isinstance(error, RuntimeError | ValueError):
            return None
        refused = self._taken_refusal() or refused_low_inputs(module, pytree.tree_leaves(given), error)
        return refused or failure(error)

    def _most_captures(self) -> int | None:
        """How often a piece of code may be captured: for each module that runs it as often as torch allows for one.

        None, so as often as torch allows for all, once a frame is captured anew in call after call.
        """
        allowed = int(torch._dynamo.config.recompile_limit)
        return allowed * self._alike if max(self._captures.values(), default=0) < allowed else None

    def _give_up(self, function: str, why: str) -> None:
        if self._not_run is not None:  # the graph was made, and failed to be kept
            self.variants, self._not_run = [each for each in self.variants if each is not self._not_run], None
        if self._refusal is None and function not in self.given_up:
            self.given_up[function] = why
            name = type(self._root).__qualname__
            how = ", in float32" if self.options.capture == "dynamo" else ""  # or all of the model runs low after it
            log.warning("%s: Dynamo gives up %s, which runs as it is written%s: %s.", name, function, how, why)

    def _taken_refusal(self) -> Exception | None:
        """What the passes refused a graph of this call with. Dynamo would not come back to its frame: start again."""
        refusal, self._refusal = self._refusal, None
        self._compiled = None if refusal is not None else self._compiled
        return refusal

    @property
    def _root(self) -> nn.Module | None:
        """The model of the last call."""
        return None if self._seen is None else self._seen()

    def take(self, module: fx.GraphModule, example_inputs: list[Any]) -> Variant:
        """One of Dynamo's graphs through the passes.

        Raises:
            Exception: what the passes refuse the graph with; Dynamo keeps it from the user, who is told after the call.
        """
        root = self._root or module
        try:
            with no_saved_tensor_hooks():
                variant = rewrite_dynamo_graph(
                    module,
                    example_inputs,
                    root,
                    self.options,
                    self.rewrite,
                    protected=self.protected,
                    keeps_model=False,
                )
        except Exception as error:
            self._refusal = error
            raise
        variant.captured.forget_values()
        variant.maker = self._seen
        hash(variant.maker)  # a reference that was not asked for it has none once the model is gone
        self.variants.append(variant)
        self._grown_at = self.calls
        if self._captured_at.get(number := frame_number()) != self.calls:
            self._captured_at[number] = self.calls
            self._captures[number] += 1
        self._not_run = variant
        return variant

    def run(self, variant: Variant, inputs: list[Any]) -> Any:
        self._not_run = None
        if self._given is not None:
            self._given.update(map(id, inputs))
        if self.calls == self._grown_at and self._root is not None:
            self._note_weights(variant, inputs, self._root)
        with modes_return():
            if self.watch is not None:
                return self.watch(variant, inputs)
            return variant.compiled.run(None, *inputs)

    def _note_weights(self, variant: Variant, inputs: list[Any], root: nn.Module) -> None:
        """Which weights graphs are given, and which of them another module's graph is given."""
        names: dict[int, list[str]] = {}
        for name, weight in every_parameter(root):
            names.setdefault(id(weight), []).append(name)
        placeholders = variant.graph.find_nodes(op="placeholder")
        for node, value in zip(placeholders, inputs, strict=False):
            found = names.get(id(value), [])
            self.weights.update(found)
            own = node.meta.get(ir.WEIGHT_PATH)
            if own is not None and found and own not in found:
                self.shared[found[0]] = str(own)


def _most_alike(model: nn.Module) -> int:
    """How many modules there are of one class that is not torch's: they share the code of their forward."""
    kinds = (type(module) for module in model.modules())
    counts = collections.Counter(kind for kind in kinds if not kind.__module__.startswith("torch.nn."))
    return max(counts.values(), default=1)


def _weak_backend(forward: DynamoForward) -> Callable[..., Any]:
    """What Dynamo hands its graphs to. Its caches keep that for ever, and must keep neither graphs nor model."""
    owner = weakref.ref(forward)

    def backend(module: fx.GraphModule, example_inputs: list[Any]) -> Any:
        taking = owner()
        assert taking is not None
        variant = weakref.ref(taking.take(module, example_inputs))

        def run(*inputs: Any) -> Any:
            running, graph = owner(), variant()
            assert running is not None
            assert graph is not None
            return running.run(graph, list(inputs))

        return run

    return backend


def _are_fake(*given: Any) -> bool:
    """Whether a call is one on fake tensors, for whose graphs Dynamo takes no others."""
    return any(isinstance(value, FakeTensor) for value in pytree.tree_leaves(given))


def _device_of(example_inputs: list[Any]) -> torch.device:
    return next((value.device for value in example_inputs if isinstance(value, torch.Tensor)), torch.device("cpu"))
