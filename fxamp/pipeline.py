"""From one call of a model to the graph that runs it: capture, and the passes in their order."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import fx, nn

from fxamp import ir
from fxamp.capture.captured import Captured
from fxamp.capture.data import NOTHING_LEFT_OUT, Answers, LeftOut
from fxamp.capture.inputs import CallSpec, unknown_call
from fxamp.capture.leaves import is_boundary
from fxamp.capture.places import Place
from fxamp.capture.promotion import read_as_own
from fxamp.capture.symbolic import capture_symbolic
from fxamp.dtypes import device_of
from fxamp.fakes import Fakes
from fxamp.model.codegen import compile_graph
from fxamp.model.variant import Variant
from fxamp.module_hooks import has_hooks
from fxamp.number_fits import NumberFits
from fxamp.numerics.pins import misfits_of, ranges_pins
from fxamp.options import Options, check_stored, check_whole
from fxamp.passes.absorb import Absorb
from fxamp.passes.base import Pass, run_passes
from fxamp.passes.cast import InsertCasts
from fxamp.passes.colour import ColourNodes
from fxamp.passes.compilable import LetCompilersFollow
from fxamp.passes.cpu_norms import WidenNorms
from fxamp.passes.fuse import FuseWrittenOut
from fxamp.passes.keep import KeepWeights, forget_copies
from fxamp.passes.literals import Fit
from fxamp.passes.losses import ReadLogitsLow
from fxamp.passes.normalise import Normalise
from fxamp.passes.outputs import ConnectOutputs
from fxamp.passes.overrides import names_kept
from fxamp.passes.pack import PackWeights
from fxamp.passes.pad import PadGemms
from fxamp.passes.pin import Decide, Pin, PinNodes
from fxamp.passes.policy import Policy
from fxamp.passes.settle_writes import SettleWrites
from fxamp.passes.shared_casts import SplitGradients
from fxamp.passes.types import InferTypes
from fxamp.passes.verify import ALWAYS, keeps_state, outputs_have, types_hold
from fxamp.paths import attribute_at
from fxamp.review.code import call_title
from fxamp.review.plan import plan_pins
from fxamp.runtime.apex_casts import casts_into
from fxamp.runtime.masters import is_stored_low, logical_dtype
from fxamp.switches import kept_switches
from fxamp.weight_fits import WeightFits, fit_of_weight


def build_variant(
    plain: nn.Module,
    spec: CallSpec | None,
    inputs: list[Any] | None,
    options: Options,
    live: frozenset[Place] = frozenset(),
    sizes: Literal["one", "tried", "condition"] = "one",
    again: Answers | None = None,
    left_out: LeftOut = NOTHING_LEFT_OUT,
) -> Variant:
    """Capture a model for one call and rewrite its graph.

    Args:
        plain: the model, of its own class.
        spec: structure of the call; None: a preview for a call with assumed types.
        inputs: the call's tensors and numbers, of which types are used, and what forward asks of the data.
        live: numbers of modules that the graph reads at each call.
        sizes: where forward decides on sizes, whether the graph holds for those of the call, for all that turn out to
            be decided alike when they are met, or for those of a condition, which Dynamo can trace.
        again: what the data of the call said, where it was captured before.
        left_out: what of forward is known by now to run before the graph.
    """
    check_stored(plain, options.low)
    if spec is None:
        spec = unknown_call(plain)
    fakes = Fakes(plain, logical_dtype)
    with casts_into(options.low):
        captured = capture_symbolic(
            plain, spec, inputs, fakes, lambda name: name in options.lists, live, again, left_out
        )
        if options.is_part and inputs is not None:
            read_as_own(captured.graph, plain, fakes)
        if sizes != "one":
            captured.generalise(fakes, as_condition=sizes == "condition")
    before = captured.text()
    total = len(captured.graph.nodes)
    fits = rewrite(captured, fakes if inputs is not None else None, options)
    compiled = compile_graph(captured.graph, plain, captured.constants, captured.build)
    weights = WeightFits(fits, options.low)
    numbers = NumberFits(captured.graph, options.low) or None
    variant = Variant(captured, before, compiled, total, is_preview=inputs is None, weights=weights, numbers=numbers)
    captured.forget_values()
    return variant


def keep_weights(variant: Variant, module: nn.Module) -> None:
    """Let a variant keep its low weights from call to call; a variant that does so makes them again."""
    if not KeepWeights().apply(variant.graph):
        forget_copies(variant.graph)
    variant.compiled = compile_graph(variant.graph, module, variant.captured.constants, variant.captured.build)


@kept_switches()
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
        InferTypes(root, fakes, captured.constants, policy),  # every later pass asks for ops and dtypes
        Normalise(),  # reads of dtypes must not see what casts will change
        FuseWrittenOut(
            policy, options.plan and options.plan.is_apart
        ),  # before anything is decided: decisions are about the op that runs
        PinNodes(pins_of(captured, options)),  # what a plan or measured ranges decided; the next passes must know it
        SettleWrites(policy, fit_of),  # a written storage must be able to have one precision
        ColourNodes(policy, fit_of),  # decides, changes nothing
        InsertCasts(policy, options.output_dtype, captured.had_gradients),  # does what was decided
        Absorb(policy.low, policy.is_users_choice),  # kernels take casts inside; before padding hides what a cast feeds
        ReadLogitsLow(policy.low, policy.device),  # so does the loss; the padding must see that nothing needs its cast
        ConnectOutputs(policy.low),  # behind both, which would take its casts away again
        LetCompilersFollow(),  # when it is known in which dtype an op runs
        WidenNorms(policy.device),  # likewise
        *_padding(captured, fakes, options),  # behind the casts: a cast moves the model's own sizes
        *((SplitGradients(policy),) if captured.had_gradients else ()),  # behind all that moves or pads casts
        *(() if fuses_casts else (PackWeights(),)),  # last: it groups the weight casts that are left
    )
    run_passes(captured.graph, pipeline, (*ALWAYS, keeps_state(root)))
    outputs_have(options.output_dtype)(captured.graph)
    if fakes is not None and captured.example is not None:
        types_hold(fakes, captured.example)(captured.graph)
    return {path: fit for path, fit in fits.items() if path not in captured.constants}


def pins_of(captured: Captured, options: Options) -> tuple[Decide, ...]:
    """What decides about single nodes before the rules do; a plan, which was reviewed, is stronger than ranges.

    What they say of other nodes than there are is noted. At O3 a plan of another opt_level decides nothing.
    """
    plan, ranges, is_preview = options.plan, options.ranges, captured.example is None

    def by_ranges(graph: fx.Graph) -> Mapping[str, Pin]:
        captured.misfits.extend(misfits_of(ranges, graph, options.low, is_preview))
        return ranges_pins(ranges, graph, options.low, is_shared=captured.method == "dynamo")

    def by_plan(graph: fx.Graph) -> Mapping[str, Pin]:
        pins, misfits = plan_pins(plan, graph, call_title(captured), is_preview)
        captured.misfits.extend(misfits)
        return pins

    is_planned = plan is not None and (options.opt_level != "O3" or plan.opt_level == "O3")
    return (*((by_ranges,) if ranges is not None else ()), *((by_plan,) if is_planned else ()))


def _padding(captured: Captured, fakes: Fakes | None, options: Options) -> tuple[Pass, ...]:
    """The padding pass; a graph of Dynamo's, and one that decided on sizes, is run with these sizes only."""
    if not options.pad_to:
        return ()
    is_bound = captured.is_for_one_size or captured.method == "dynamo"
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
        path = ir.weight_path(node)
        if path not in known:
            known[path] = fit_of_weight(path, captured.weight(node), options.low)
        is_lost_in_a_sum = known[path] == "small" and all(_is_bias_of_norm(node, user) for user in node.users)
        return "normal" if is_lost_in_a_sum else known[path]

    def _is_gemm(user: fx.Node) -> bool:
        op = ir.mark(user).op
        return options.lists.colour(op) == "allow" and "attention" not in op  # attention reads masks

    return fit_of


def _is_bias_of_norm(node: fx.Node, user: fx.Node) -> bool:
    """Whether a weight is added to normalised numbers, whose rounding is larger than a small bias and its own.

    A bias that begins with zeros is small for as long as few steps, or small ones, have moved it.
    """
    is_norm = ir.mark(user).op in ("layer_norm", "group_norm")
    is_scale = is_norm and node in (ir.argument_of(user, 0, "input"), ir.argument_of(user, 2, "weight"))
    return is_norm and not is_scale and ir.argument_of(user, 3, "bias") is node


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
        device=device_of(root).type,
    )


def _note_storage(captured: Captured, options: Options) -> None:
    for node in captured.graph.nodes:
        if node.op == "placeholder" and captured.method == "symbolic":
            node.meta[ir.FROM_CALLER] = True  # an input of one of Dynamo's graphs may be another graph's result
        if node.op == "get_attr":
            node.meta["stored_low"] = is_stored_low(attribute_at(captured.root, node.target))
        elif node.op == "call_module":
            module = captured.root.get_submodule(str(node.target))
            if options.opt_level != "O3":  # where every module runs low, masters or not
                check_whole(str(node.target), module)
            node.meta["boundary"] = is_boundary(module)
            node.meta["hooked"] = has_hooks(module)
            node.meta["weights"] = any(True for _ in module.parameters())
            node.meta["inplace"] = bool(getattr(module, "inplace", False))
            if "p" in vars(module):
                node.meta["dropout"] = module.p, module.training
