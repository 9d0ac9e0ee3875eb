"""convert(): capture a model, run the passes in their order, build the converted model."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxamp import ir
from fxamp.backend import DynamoForward, trace_on_fakes
from fxamp.boundaries import AsWritten, calls_of_blocks, check_boundaries, make_tree
from fxamp.capture.captured import Captured
from fxamp.capture.inputs import CallSpec, check_call_fits, normalise_example, unknown_call
from fxamp.capture.leaves import has_hooks, is_boundary
from fxamp.capture.reads import Place
from fxamp.capture.symbolic import capture_symbolic
from fxamp.codegen import compile_graph
from fxamp.converted import make_sibling
from fxamp.engine import Engine, Workshop, engine_of, mark_block
from fxamp.errors import CaptureError, OpListError, OptionError
from fxamp.fakes import Fakes
from fxamp.lists import OpLists
from fxamp.lists.environment import disabled_by
from fxamp.number_fits import NumberFits
from fxamp.numerics.pins import as_ranges, ranges_pins
from fxamp.options import (
    Options,
    check_blocks,
    check_model,
    check_options,
    check_stored,
    check_whole,
    device_of,
    differing,
    module_of,
    say_what_is_inside,
)
from fxamp.passes.absorb import Absorb
from fxamp.passes.base import Pass, run_passes
from fxamp.passes.cast import InsertCasts
from fxamp.passes.colour import ColourNodes
from fxamp.passes.fuse import FuseWrittenOut
from fxamp.passes.keep import KeepWeights, forget_copies
from fxamp.passes.literals import Fit, fit_in
from fxamp.passes.losses import ReadLogitsLow
from fxamp.passes.normalise import Normalise
from fxamp.passes.overrides import check_overrides, names_kept, unmatched_overrides
from fxamp.passes.pack import PackWeights
from fxamp.passes.pad import PadGemms
from fxamp.passes.pin import Decide, PinNodes
from fxamp.passes.rules import Policy
from fxamp.passes.settle_writes import SettleWrites
from fxamp.passes.types import InferTypes
from fxamp.passes.verify import ALWAYS, keeps_state, outputs_have, types_hold
from fxamp.review.announce import announce
from fxamp.review.code import call_title
from fxamp.review.plan import as_plan, plan_pins
from fxamp.storage import is_stored_low, logical_dtype, lower_parameters, put_back, speak_float32
from fxamp.unconverted import leave
from fxamp.variant import Variant
from fxamp.views import plain_tree, plain_view
from fxamp.weight_fits import WeightFits

log = logging.getLogger("fxamp")


def convert(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    example_inputs: Any = None,
    opt_level: str = "O1",
    level: str = "balanced",
    lists: OpLists | None = None,
    overrides: Mapping[str, str] | None = None,
    pad_to: int | None = 8,
    pad: str = "auto",
    capture: str = "auto",
    boundaries: Any = (),
    plan: Any = None,
    ranges: Any = None,
    output_dtype: torch.dtype | None = torch.float32,
) -> nn.Module:
    """The model with a forward that runs in mixed precision.

        model = fxamp.convert(model)        # before training; nothing else changes

    The result is the user's model: same class, parameters, `state_dict` and methods; only `forward` is rewritten.
    Without example inputs the graph is completed at the first call, whose dtypes and shapes it needs; what a graph
    cannot hold is an error here all the same.

    Args:
        model: an nn.Module, an fx.GraphModule, or a torch.export.ExportedProgram. It still works and is not changed
            (O1). A converted model is given
            back as it is, or with other options converted anew from its plain forward.
        dtype: torch.float16, torch.bfloat16, "auto" (bfloat16 where the device has it natively), or None:
            torch.autocast's default for the device (CUDA float16, CPU bfloat16).
        example_inputs: the arguments of one call, a tuple of args or (args, kwargs); only shapes and dtypes are used.
        opt_level: "O0" fp32, unchanged; "O1" casts, fp32 parameters; "O2" low-precision parameters, with fp32
            masters in fxamp.MasterWeightOptimizer; "O3" all low.
        level: how far low precision spreads: "strict" (as autocast), "balanced", "aggressive" (as grappler).
        lists: op colours; None: the defaults with the environment's changes.
        overrides: module path, glob or node name -> "allow" | "infer" | "deny" | "clear".
        pad_to: K and N of low-precision GEMMs are padded to multiples of it; 0 or None: not at all.
        pad: "auto": where it pays, by the sizes of the example inputs; "always": wherever it is safe.
        plan: a saved plan (path, or fxamp.review.plan.Plan): each node runs as it did; a warning says what no longer
            matches.
        ranges: what fxamp.profile measured: nodes whose values low precision would not hold run in float32.
        boundaries: module classes, paths, globs, or "blocks" (repeated blocks): each such submodule is converted by
            itself and stays a module that is called: FSDP2 per block, checkpointing and hooks go on working, and
            equal blocks are converted once. Values cross a boundary in float32. O1 only.
        capture: "symbolic" (an own tracer), "dynamo" (torch.compile's front end, which follows Python control flow),
            or "auto": symbolic where it can follow, else dynamo, and one INFO line says why.
        output_dtype: float32 outputs come back in this dtype; None: as computed.

    Raises:
        OptionError: an argument has a value that is not allowed.
        CaptureError: the model cannot be captured; the message names the line.
        OpListError: the lists contradict themselves.
    """
    model = module_of(model)
    check_model(model)
    options = check_options(
        device_of(model), dtype, opt_level, level, lists, overrides, pad_to, pad, capture, output_dtype
    )
    if (disabled := disabled_by()) is not None:
        return leave(model, disabled)
    options = dataclasses.replace(options, plan=as_plan(plan), ranges=as_ranges(ranges))
    example = normalise_example(example_inputs)
    known = engine_of(model)
    if known is not None:
        changed = differing(model, known.options, options, names_dtype=dtype is not None)
        check_blocks(model, known, check_boundaries(model, boundaries, options), changed)
        if not changed:
            if example is not None:
                check_call_fits(model, model.forward, *example)
                _first_graph(model, known, example)
            return model
        model = plain_view(model)
    if opt_level == "O0":
        return leave(model, "opt_level='O0'")
    return convert_as(model, options, example, check_boundaries(model, boundaries, options))


def convert_as(
    model: nn.Module, options: Options, example: tuple[Any, Any] | None, boundaries: tuple[str, ...] = ()
) -> nn.Module:
    """`convert` for checked options, whatever FXAMP_DISABLE says."""
    opt_level = options.opt_level
    say_what_is_inside(model)
    if example is not None:
        check_call_fits(model, model.forward, *example)
    workshop = Workshop(build_variant, tell, keep_weights)
    if boundaries:
        return _convert_blocks(model, options, example, boundaries, workshop)
    engine = Engine(options, workshop, DynamoForward(options, rewrite))
    sibling = make_sibling(model, engine)
    first = _first_graph(sibling, engine, example)
    if graphs := [variant.graph for variant in engine.all_variants()]:
        modules = [path for path, _ in model.named_modules()] if first is None else ()
        check_overrides(graphs, options.overrides, modules, is_partial=first is None)  # Dynamo may have stopped early
    if opt_level in ("O2", "O3"):
        if first is None:
            raise OptionError(f"opt_level={opt_level!r} lowers what the graph reads low: give example_inputs.")
        paths = _lowered_paths(first.graph, opt_level, sibling)
        lowered = lower_parameters(sibling, paths, options.low, opt_level == "O2", options.pad_to or 1)
        handles = speak_float32(sibling)
        try:
            engine.start_again()
            _first_graph(sibling, engine, example)
        except BaseException:
            put_back(lowered)
            for handle in handles:
                handle.remove()
            raise
    if engine.all_variants():
        tell(sibling)
    return sibling


def tell(converted: nn.Module) -> None:
    """Announce new graphs, and the overrides that match none of them now that all are known."""
    engine = engine_of(converted)
    variants = engine.graphs() if engine is not None else []
    unmatched: Mapping[str, str] = {}
    if engine is not None and variants and not any(variant.is_preview for variant in variants):
        modules = [path for path, _ in converted.named_modules()]
        unmatched = unmatched_overrides([variant.graph for variant in variants], engine.options.overrides, modules)
    announce(converted, [f"of the graphs so far: {said}" for said in unmatched.values()])


def _convert_blocks(
    model: nn.Module, options: Options, example: tuple[Any, Any] | None, paths: tuple[str, ...], workshop: Workshop
) -> nn.Module:
    """`convert` with boundaries: each block, and what is around them."""
    outer = Engine(options, workshop, AsWritten())
    sibling = make_tree(model, outer, paths, lambda own: Engine(own, workshop, DynamoForward(own, rewrite)))
    first = _first_graph(sibling, outer, example)
    if example is None or first is None:
        for path, inner in outer.blocks.items():
            if not inner.all_variants():
                _first_graph(sibling.get_submodule(path), inner, None)
    else:
        for path, args, kwargs in calls_of_blocks(first, device_of(model)):
            block = sibling.get_submodule(path)
            if (engine := engine_of(block)) is not None:
                _first_graph(block, engine, (args, kwargs))
    check_overrides(
        [each.graph for each in outer.graphs()], options.overrides, [path for path, _ in model.named_modules()]
    )
    tell(sibling)
    return sibling


def _first_graph(model: nn.Module, engine: Engine, example: tuple[Any, Any] | None) -> Variant | None:
    """The graph of the example call, or a preview from assumed types; None where only Dynamo can follow."""
    if engine.options.capture != "dynamo":
        try:
            if example is not None:
                return engine.capture(model, *example)
            return _preview(model, engine)
        except CaptureError as error:
            engine.fall_back(model, error)
    if example is not None:
        engine.previews = trace_on_fakes(plain_tree(model), *example, engine.options, rewrite)
    return None


def _preview(model: nn.Module, engine: Engine) -> Variant | None:
    """The graph as it would be for assumed types; None where the assumptions do not fit the model."""
    try:
        preview = build_variant(plain_tree(model), None, None, engine.options)
    except (CaptureError, OptionError, OpListError):
        raise
    except Exception as error:  # a preview never runs, so what is wrong with it must not stop the conversion
        name = type(model).__qualname__
        log.info("no preview of %s from assumed types (%s); its first call makes its graph", name, error)
        return None
    if engine.is_boundary:
        mark_block(preview, engine.paths)
    engine.previews = [preview]
    return preview


# --------------------------------------------------------------------------------------------- one variant


def build_variant(
    plain: nn.Module,
    spec: CallSpec | None,
    inputs: list[Any] | None,
    options: Options,
    live: frozenset[Place] = frozenset(),
) -> Variant:
    """Capture a model for one call and rewrite its graph.

    Args:
        plain: the model, of its own class.
        spec: structure of the call; None: a preview for a call with assumed types.
        inputs: the call's tensors and numbers; only their types are used.
        live: numbers of modules that the graph reads at each call.
    """
    check_stored(plain, options.low)
    if spec is None:
        spec = unknown_call(plain)
    fakes = Fakes(plain, logical_dtype)
    captured = capture_symbolic(plain, spec, inputs, fakes, lambda name: name in options.lists, live)
    before = captured.text()
    total = len(captured.graph.nodes)
    fits = rewrite(captured, fakes if inputs is not None else None, options)
    compiled = compile_graph(captured.graph, plain, captured.constants, captured.output_tree)
    weights = WeightFits(fits, options.low)
    numbers = NumberFits(captured.graph, options.low) or None
    variant = Variant(captured, before, compiled, total, is_preview=inputs is None, weights=weights, numbers=numbers)
    captured.forget_values()
    return variant


def keep_weights(variant: Variant, module: nn.Module) -> None:
    """Let a variant keep its low weights from call to call; a variant that does so makes them again."""
    if not KeepWeights().apply(variant.graph):
        forget_copies(variant.graph)
    variant.compiled = compile_graph(variant.graph, module, variant.captured.constants, variant.captured.output_tree)


def rewrite(captured: Captured, fakes: Fakes | None, options: Options, fuses_casts: bool = False) -> Mapping[str, Fit]:
    """Run the pipeline on a captured graph, in place, with every invariant checked between the passes.

    Args:
        fuses_casts: what runs the graph fuses casts itself (Inductor), so weights are cast one by one.

    Returns:
        How the weights that the rules asked about fit into the low dtype, by path.
    """
    root = captured.root
    policy = policy_of(root, options)
    fits: dict[str, Fit] = {}
    fit_of = _weight_reader(captured, options, fits)
    _note_storage(captured, options)
    pipeline: tuple[Pass, ...] = (
        InferTypes(root, fakes, captured.constants),  # every later pass asks for ops and dtypes
        Normalise(),  # reads of dtypes must not see what casts will change
        FuseWrittenOut(policy),  # before anything is decided: decisions are about the op that runs
        PinNodes(pins_of(captured, options)),  # what a plan or measured ranges decided; the next passes must know it
        SettleWrites(policy, fit_of),  # a written storage must be able to have one precision
        ColourNodes(policy, fit_of),  # decides, changes nothing
        InsertCasts(policy, options.output_dtype),  # does what was decided
        Absorb(policy.low),  # kernels take casts inside; before padding hides what a cast feeds
        ReadLogitsLow(policy.low, policy.device),  # so does the loss; the padding must see that nothing needs its cast
        *_padding(captured, fakes, options),  # behind the casts: a cast moves the model's own sizes
        *(() if fuses_casts else (PackWeights(),)),  # last: it groups the weight casts that are left
    )
    run_passes(captured.graph, pipeline, (*ALWAYS, keeps_state(root)))
    outputs_have(options.output_dtype)(captured.graph)
    if fakes is not None and captured.example is not None:
        types_hold(root, fakes, captured.example)(captured.graph)
    return {path: fit for path, fit in fits.items() if path not in captured.constants}


def pins_of(captured: Captured, options: Options) -> tuple[Decide, ...]:
    """What decides about single nodes before the rules do; a plan, which was reviewed, is stronger than ranges."""
    found: list[Decide] = []
    title = call_title(captured)
    if options.ranges is not None:
        found.append(lambda graph: ranges_pins(options.ranges, graph, options.low))
    if options.plan is not None:
        found.append(lambda graph: plan_pins(options.plan, graph, title))
    return tuple(found)


def _padding(captured: Captured, fakes: Fakes | None, options: Options) -> tuple[Pass, ...]:
    """The padding pass; a graph of Dynamo's, and one that decided on sizes, is run with these sizes only."""
    if not options.pad_to:
        return ()
    is_bound = bool(captured.decisions) or captured.method == "dynamo"
    training = dict(captured.training)
    return (PadGemms(captured.root, fakes, options.pad_to, options.pad, training, is_bound),)


def _weight_reader(captured: Captured, options: Options, known: dict[str, Fit]) -> Callable[[fx.Node], Fit]:
    """How a weight's numbers fit into the low dtype; read, once, only for weights that the rules ask about.

    Args:
        known: what was found, by path.
    """

    def fit_of(node: fx.Node) -> Fit:
        if all(_is_gemm(user) for user in node.users):
            return "normal"
        path = str(node.meta.get(ir.WEIGHT_PATH, node.target))
        if path not in known:
            known[path] = fit_in(captured.weight(node), options.low)
        return known[path]

    def _is_gemm(user: fx.Node) -> bool:
        op = ir.mark(user).op
        return options.lists.colour(op) == "allow" and "attention" not in op  # attention reads masks

    return fit_of


def policy_of(root: nn.Module, options: Options) -> Policy:
    """The colouring policy for a model."""
    if options.output_dtype is None:
        output_mode = "any"
    else:
        output_mode = "low" if options.output_dtype == options.low else "high"
    return Policy(
        low=options.low,
        lists=options.lists,
        level=options.level,
        overrides=options.overrides,
        protected=names_kept(root, options.low),
        output_mode=output_mode,  # type: ignore[arg-type]
        everything_low=options.opt_level == "O3",
        device=next((t.device.type for t in (*root.parameters(), *root.buffers())), "cpu"),
    )


def _note_storage(captured: Captured, options: Options) -> None:
    for node in captured.graph.nodes:
        if node.op == "get_attr":
            node.meta["stored_low"] = is_stored_low(ir.attribute(captured.root, node.target))
        elif node.op == "call_module":
            module = captured.root.get_submodule(str(node.target))
            if options.opt_level != "O3":
                check_whole(str(node.target), module)
            node.meta["boundary"] = is_boundary(module)
            node.meta["hooked"] = has_hooks(module)
            node.meta["weights"] = any(True for _ in module.parameters())
            node.meta["inplace"] = bool(getattr(module, "inplace", False))


def _lowered_paths(graph: fx.Graph, opt_level: str, model: nn.Module) -> list[str]:
    """O2: the parameters that are only read low; O3: every float32 parameter and buffer."""
    if opt_level == "O3":
        return [name for name, value in _named_tensors(model) if value.dtype == torch.float32]
    lowered = []
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(ir.attribute(model, node.target), nn.Parameter):
            if node.users and all(ir.mark(user).role == "weight cast" for user in node.users):
                lowered.append(str(node.target))
    return lowered


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
