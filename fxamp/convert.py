"""convert(): build the converted model, with its first graph where there are example inputs."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fxamp.boundaries import AsWritten, check_boundaries, make_tree
from fxamp.capture.hooks import warn_of_hooks_on
from fxamp.capture.inputs import check_call_fits, normalise_example
from fxamp.dtypes import device_of, dtype_name
from fxamp.dynamo.backend import DynamoForward
from fxamp.dynamo.preview import trace_on_fakes
from fxamp.errors import CaptureError, warn_once
from fxamp.lists import OpLists
from fxamp.lists.environment import disabled_by
from fxamp.lowering import stored_low
from fxamp.model.block_calls import calls_of_blocks
from fxamp.model.blocks import mark_blocks
from fxamp.model.converted import make_sibling
from fxamp.model.engine import Engine, engine_of
from fxamp.model.state_dicts import speak_float32
from fxamp.model.storage import lower_parameters, put_back
from fxamp.model.uncalled import watch_for_a_call
from fxamp.model.unconverted import leave
from fxamp.model.variant import Variant
from fxamp.model.views import forward_arguments, plain_tree, to_convert_again
from fxamp.model.workshop import Workshop
from fxamp.model.written import Written
from fxamp.numerics.pins import as_ranges
from fxamp.options import (
    Options,
    check_blocks,
    check_model,
    check_options,
    differing,
    module_of,
    say_what_is_inside,
)
from fxamp.otherwise import Otherwise
from fxamp.passes.overrides import check_overrides, unmatched_overrides
from fxamp.pipeline import build_variant, keep_weights, rewrite
from fxamp.review.announce import announce
from fxamp.review.plan import as_plan
from fxamp.review.uncaptured import is_given_up
from fxamp.review.unheld import decided_in_vain

log = logging.getLogger("fxamp")

_BY_LAYERS = (
    "%s: no graph of it is known, so that %s is the dtype of what its layers read low by themselves: %d tensors"
)


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
            (O1). A converted model is given back as it is, or with other options converted anew from its plain forward.
        dtype: torch.float16, torch.bfloat16, "auto" (bfloat16 where the device has it natively), or None:
            torch.autocast's default for the device (CUDA float16, CPU bfloat16); of a module without parameters, such
            as a loss, for the machine's accelerator.
        example_inputs: those of one call: a tensor, a tuple or list of args, (args, kwargs), or a dict of keywords;
            shapes, dtypes, and what forward asks of the data are used.
        opt_level: "O0" fp32, unchanged; "O1" casts, fp32 parameters; "O2" low-precision parameters, with fp32
            masters in fxamp.MasterWeightOptimizer; "O3" all low.
        level: how far low precision spreads: "strict" (as autocast), "balanced", "aggressive" (as grappler).
        lists: op colours; None: the defaults with the environment's changes.
        overrides: module path, glob or node name -> "allow" | "infer" | "deny" | "clear".
        pad_to: K and N of low-precision GEMMs are padded to multiples of it; 0 or None: not at all.
        pad: "auto": where it pays, by the sizes of the example inputs; "always": wherever it is safe.
        plan: a saved plan (path, or fxamp.review.plan.Plan): each node runs as it did, in graphs of parts of the model,
            too; a warning says what no longer matches, and where opt_level or level is another. One of another low
            dtype is refused.
        ranges: what fxamp.profile measured: nodes whose values low precision would not hold run in float32.
        boundaries: module classes, paths, globs, or "blocks" (repeated blocks): each such submodule is converted by
            itself and stays a module that is called: FSDP2 per block, checkpointing and hooks go on working, and
            equal blocks are converted once. Values cross a boundary in float32. O1 only.
        capture: "symbolic" (fxamp's own tracer), "dynamo" (torch.compile's front end, which follows Python control
            flow), or "auto": symbolic where it can follow, and one INFO line says why not. Else a model whose modules
            graphs can hold runs as it is written, under torch.autocast, and they as graphs; any other goes to dynamo
            at O1.
        output_dtype: float32 outputs come back in this dtype; None: as computed.

    Returns:
        A model of the same class, which shares its parameters and buffers with `model` (O2 and O3 change their dtype);
        with "O0" or FXAMP_DISABLE the model as it is.

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
    taken = as_plan(plan, options.low, options.opt_level, options.level)
    options = dataclasses.replace(options, plan=taken, ranges=as_ranges(ranges))
    example = normalise_example(example_inputs)
    known = engine_of(model)
    if known is not None:
        paths = check_boundaries(model, boundaries, options)
        adds = bool(paths) and not known.boundaries
        changed = differing(model, known.options, options, names_dtype=dtype is not None, stays=not adds)
        check_blocks(model, known, paths, changed)
        if not changed and adds:
            options = known.options
        elif not changed:
            if example is not None:
                _first_graph(model, known, _forward_example(model, example))
            return model
        model = to_convert_again(model)
    if opt_level == "O0":
        return leave(model, "opt_level='O0'")
    converted = convert_as(model, options, example, check_boundaries(model, boundaries, options))
    watch_for_a_call(converted)
    return converted


def convert_as(
    model: nn.Module, options: Options, example: tuple[Any, Any] | None, boundaries: tuple[str, ...] = ()
) -> nn.Module:
    """`convert` for checked options; FXAMP_DISABLE is not asked."""
    opt_level = options.opt_level
    say_what_is_inside(model, bool(boundaries))
    warn_of_hooks_on(model)
    if example is not None:
        example = _forward_example(model, example)
    workshop = Workshop(build_variant, tell, keep_weights, stored_low)
    if boundaries:
        return _convert_blocks(model, options, example, boundaries, workshop)
    o1 = DynamoForward if options.capture == "dynamo" else Otherwise
    engine = Engine(options, workshop, (o1 if opt_level == "O1" else Written)(options, rewrite))
    sibling = make_sibling(model, engine)
    first = _first_graph(sibling, engine, example)
    if graphs := [variant.graph for variant in engine.all_variants()]:
        is_partial = first is None or (
            first.is_preview and is_given_up(first, sibling)
        )  # Dynamo may have stopped early
        modules = [path for path, _ in model.named_modules()] if is_partial else ()
        check_overrides(graphs, options.overrides, modules, is_partial=is_partial)
    if opt_level in ("O2", "O3"):
        paths = stored_low(sibling, options, None if first is None else first.graph, log.info)
        engine.stored_by = "layers" if first is None else "preview" if first.is_preview else "call"
        if first is None:
            log.info(_BY_LAYERS, type(model).__qualname__, dtype_name(options.low), len(paths))
        lowered = lower_parameters(sibling, paths, options.low, opt_level == "O2", options.pad_to or 1)
        handles = speak_float32(sibling, model)
        try:
            engine.start_again()
            if first is not None:
                _first_graph(sibling, engine, example)
        except BaseException:
            put_back(lowered)
            for handle in handles:
                handle.remove()
            raise
    if engine.all_variants():
        tell(sibling)
    return sibling


def _forward_example(model: nn.Module, example: tuple[Any, Any]) -> tuple[Any, Any]:
    """The arguments of forward in the call that is the example.

    Raises:
        OptionError: they do not fit forward's signature.
    """
    given = forward_arguments(model, *example)
    check_call_fits(model, model.forward, *given)
    return given


def tell(converted: nn.Module) -> None:
    """Announce new graphs, what a plan or ranges say of other nodes, and the overrides that match none of them now that
    all are known."""
    engine = engine_of(converted)
    variants = engine.graphs() if engine is not None else []
    for variant in variants:
        if not (variant.is_preview and (variant.captured.method == "dynamo" or is_given_up(variant, converted))):
            for misfit in variant.captured.misfits:
                warn_once(misfit)
    unmatched: Mapping[str, str] = {}
    if engine is not None and variants and not any(variant.is_preview for variant in variants):
        modules = [path for path, _ in converted.named_modules()]
        unmatched = unmatched_overrides([variant.graph for variant in variants], engine.options.overrides, modules)
    vain = decided_in_vain(engine, converted) if engine is not None else []
    announce(converted, [*(f"of the graphs so far: {said}" for said in unmatched.values()), *vain])


def _convert_blocks(
    model: nn.Module, options: Options, example: tuple[Any, Any] | None, paths: tuple[str, ...], workshop: Workshop
) -> nn.Module:
    """`convert` with boundaries: each block, and what is around them."""
    outer = Engine(options, workshop, AsWritten())
    sibling = make_tree(model, outer, paths, lambda own: Engine(own, workshop, DynamoForward(own, rewrite)))
    first = _first_graph(sibling, outer, example)
    if example is not None and first is not None:
        _capture_blocks(sibling, first, device_of(model))
    for path, inner in outer.boundaries.items():
        if not inner.all_variants():
            _first_graph(sibling.get_submodule(path), inner, None)
    mark_blocks(sibling, outer.boundaries)
    check_overrides(
        [each.graph for each in outer.graphs()], options.overrides, [path for path, _ in model.named_modules()]
    )
    tell(sibling)
    return sibling


def _capture_blocks(model: nn.Module, around: Variant, device: torch.device) -> None:
    """The graphs of the blocks that a graph calls, of those that these call, and so on."""
    for path, args, kwargs in calls_of_blocks(around, device):
        block = model.get_submodule(path)
        if (engine := engine_of(block)) is not None:
            inner = _first_graph(block, engine, (args, kwargs))
            if inner is not None:
                _capture_blocks(block, inner, device)


def _first_graph(model: nn.Module, engine: Engine, example: tuple[Any, Any] | None) -> Variant | None:
    """The graph of the example call, or a preview from assumed types; None where there is none of them: where only
    Dynamo can follow the model, or the assumptions do not fit it."""
    if engine.options.capture != "dynamo":
        try:
            if example is not None:
                return engine.capture(model, *example, is_example=True)
            return engine.preview(model)
        except CaptureError as error:
            engine.fall_back(model, error)
    is_for_dynamo = engine.boundaries or not engine.way.runs
    if example is not None and engine.options.opt_level == "O1" and is_for_dynamo:
        previews = trace_on_fakes(plain_tree(model), *example, engine.options, rewrite)
        engine.previews = [] if engine.boundaries else previews  # around its blocks it runs as written
    return None
