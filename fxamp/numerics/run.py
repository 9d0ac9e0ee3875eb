"""Run a model's graphs node by node, on real values, and look at what flows: nothing of the model is changed."""

import copy
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxamp.capture.inputs import call_arguments
from fxamp.dtypes import LOW_DTYPES
from fxamp.errors import CaptureError, OptionError
from fxamp.inplace import mutated
from fxamp.model.engine import Engine, engine_of
from fxamp.model.rebuild import REFERENCE, rebuild_variant
from fxamp.model.unconverted import not_converted
from fxamp.model.used_weights import share_given
from fxamp.model.variant import Variant
from fxamp.model.views import base_of, forward_arguments
from fxamp.model.written import Written
from fxamp.numerics.extent import check_not_empty
from fxamp.numerics.given import copied
from fxamp.numerics.kept import state_kept, tensors_of
from fxamp.numerics.modes import usable
from fxamp.numerics.parts import Look, Turn, Turns
from fxamp.numerics.runner import Edge, Part, Runner, See, on_leaving, run_part, served, sizes_of


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a converted model, and what runs it.

    Attributes:
        variant: the graph and `inputs` its flat inputs; None where `dynamo` runs the call, or `turns` are given.
        dynamo: the model's forward through Dynamo, apart from the one that trains, so that looking adds no graph.
        turns: of the modules that forward calls as graphs, where it runs as it is written.
        weights: whose parameters are read: the model itself, or one with the same paths.
    """

    model: nn.Module
    engine: Engine
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weights: nn.Module
    variant: Variant | None = None
    inputs: tuple[Any, ...] = ()
    dynamo: Any = None
    turns: Turns | None = None

    def graph_of(self, variant: Variant) -> int:
        """The number of a graph in the model's report: the one of the same text, in order."""
        if self.dynamo is None:
            return next((n for n, known in enumerate(self.engine.all_variants()) if known is variant), 0)
        titles = [known.before for known in self.engine.all_variants()]
        position = next(n for n, known in enumerate(self.dynamo.variants) if known is variant)
        before = [known.before for known in self.dynamo.variants[:position]].count(variant.before)
        same = [number for number, text in enumerate(titles) if text == variant.before]
        return same[min(before, len(same) - 1)] if same else position

    @property
    def needs_gradients(self) -> bool:
        """Whether forward asks for gradients itself (forces, a penalty), or calls graphs with gradients on only."""
        is_asked = self.variant is not None and any(map(takes_derivative, self.variant.graph.nodes))
        return is_asked or self.turns is not None


def takes_derivative(node: fx.Node) -> bool:
    """Whether a node is a call of torch.autograd.grad."""
    return node.op == "call_function" and node.target is torch.autograd.grad


_looking: "weakref.WeakKeyDictionary[Engine, Any]" = weakref.WeakKeyDictionary()
_left_out: "weakref.WeakKeyDictionary[Engine, bool]" = weakref.WeakKeyDictionary()
_looks: "weakref.WeakKeyDictionary[Engine, Look]" = weakref.WeakKeyDictionary()


def call_of(converted: nn.Module, inputs: Any, only_fp32: bool = False) -> Call:
    """One call, ready to be run.

    Args:
        converted: a converted model.
        inputs: as `call_arguments` takes them.
        only_fp32: it is to be run in float32 alone: at O1 Dynamo's graphs, where they hold nearly all weights, hold
            more of a forward that runs as it is written than the modules that it calls as graphs.

    Raises:
        OptionError: not converted, or the inputs are none of a call or hold no sample.
    """
    engine = engine_of(converted)
    check_module(converted, "model")
    if engine is None:
        raise not_converted(converted)
    args, kwargs = arguments(usable(inputs))
    check_not_empty((args, kwargs), "the inputs are")
    args, kwargs = forward_arguments(converted, args, kwargs)
    variant = _symbolic(converted, engine, args, kwargs)
    if variant is None and _runs_as_written(converted, engine, args, kwargs, only_fp32):
        return Call(converted, engine, args, kwargs, converted, turns=Turns(engine))
    if variant is None:
        return Call(converted, engine, args, kwargs, converted, dynamo=looking_dynamo(engine))
    flat = pytree.tree_leaves((args, kwargs), is_leaf=lambda value: value is None)
    taken = [value for value, (kind, _) in zip(flat, variant.captured.spec.leaves, strict=True) if kind != "constant"]
    given = variant.captured.inputs_for(converted, taken)
    return Call(converted, engine, args, kwargs, converted, variant, tuple(taken if given is None else given))


def check_module(given: Any, name: str) -> None:
    """Raise an OptionError for what is no module."""
    if not isinstance(given, nn.Module):
        raise OptionError(f"{name} is a {type(given).__qualname__}, not an nn.Module. Pass the module itself.")


def looking_dynamo(engine: Engine) -> Any:
    """A model's forward through Dynamo, apart from the one that trains."""
    if engine not in _looking:
        _looking[engine] = copy.deepcopy(engine.otherwise.by_dynamo)
    return _looking[engine]


def _symbolic(converted: nn.Module, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant | None:
    """The graph of a call, None where Dynamo runs it."""
    if engine.options.capture == "dynamo":
        return None
    try:
        return engine.capture(converted, args, kwargs, is_example=True)
    except CaptureError as error:
        engine.fall_back(converted, error)
        return None


def _runs_as_written(
    converted: nn.Module, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], only_fp32: bool
) -> bool:
    """Whether a call that no graph holds is run as it is written, with graphs inside.

    What Dynamo's graphs would hold is asked where that is open, or where they are to be run instead.
    """
    way = engine.otherwise
    if way is way.present:
        return isinstance(way, Written)
    given = copied((args, kwargs))
    with state_kept(converted), torch.enable_grad():
        now = way.settled(base_of(converted), converted, *given)
    if isinstance(now, Written):
        return not only_fp32 or _is_too_much_for_dynamo(converted, engine, args, kwargs)
    return way.is_open and _is_too_much_for_dynamo(converted, engine, args, kwargs)


def _is_too_much_for_dynamo(
    converted: nn.Module, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether Dynamo's graphs would hold too little of what such a call uses; the first one tells of all."""
    if engine not in _left_out:
        way, given = looking_dynamo(engine), copied((args, kwargs))
        with state_kept(converted), torch.enable_grad(), way.noting() as read:
            result = way(base_of(converted), converted, *given)
        _left_out[engine] = engine.otherwise.is_too_little(share_given(converted, result, read), converted)
    return _left_out[engine]


class Rewriter:
    """Other graphs in the place of a call's, each made once.

        run(call, see, rewritten=Rewriter(call, overrides={"exp": "deny"}))

    Args:
        changes: of the options; see `rebuild_variant`.
        plain_blocks: paths of modules, converted by themselves, that now run as they are written, in float32.
    """

    def __init__(self, call: Call, plain_blocks: Collection[str] = (), **changes: Any) -> None:
        self.plain_blocks = plain_blocks
        self.call = call
        self.changes = changes
        self.made: dict[int, tuple[Variant, Variant]] = {}

    def __call__(self, variant: Variant) -> Variant:
        if id(variant) not in self.made:
            self.made[id(variant)] = (
                variant,
                rebuild_variant(self.call.model, self.call.engine, variant, **self.changes),
            )
        return self.made[id(variant)][1]

    @functools.cached_property
    def look(self) -> Look:
        """The same where forward runs as it is written."""
        return Look(self.call.engine, dataclasses.replace(self.call.engine.options, **self.changes))


def in_float32(call: Call) -> Rewriter:
    """The same graphs as an fp32 run has them."""
    return Rewriter(call, **REFERENCE)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The `inputs` of a public function as (args, kwargs); see `call_arguments`."""
    return call_arguments(inputs, "inputs")


def run(
    call: Call,
    see: See,
    edge: Edge | None = None,
    rewritten: Rewriter | None = None,
    as_float32: bool = False,
    runner: type[Runner] = Runner,
) -> Any:
    """What the call returns, each value shown to `see` on the way; stand in `state_kept`, backward included.

    What forward writes into its arguments, it writes into copies.

    Args:
        rewritten: runs other graphs in the place of the call's.

    Raises:
        OptionError: Dynamo gave up on the model, so that there is no graph.
    """
    numbers = itertools.count()
    run_in = functools.partial(_run_in, call, rewritten, as_float32, runner)

    def run_graph(variant: Variant, inputs: Any) -> Any:
        chosen = variant if rewritten is None else rewritten(variant)
        moved = None if call.variant is not None else served(variant, inputs, call.weights)
        part = Part(next(numbers), call.graph_of(variant), chosen, sizes_of(inputs), moved=moved)
        return run_in(see, edge, part, inputs)

    def run_turn(turn: Turn, variant: Variant, inputs: Any) -> Any:
        return run_in(see, edge, Part(turn.number, turn.graph, variant, sizes_of(inputs), turn), inputs)

    def run_again(turn: Turn, variant: Variant, inputs: Any) -> Any:
        return run_in(_nothing_seen, None, Part(turn.number, turn.graph, variant, sizes_of(inputs), turn), inputs)

    if call.variant is not None:
        return run_graph(call.variant, copied(call.inputs) if _writes_inputs(call.variant) else call.inputs)
    args, kwargs = copied((call.args, call.kwargs))
    if call.turns is not None:
        look = _look_of(call.engine) if rewritten is None else rewritten.look
        on_leaving(look.forget)
        return look(call.weights, args, kwargs, call.turns, run_turn, run_again)
    base = base_of(call.model)
    call.dynamo.watch = run_graph
    try:
        with tensors_of(call.weights, call.model):
            result = call.dynamo(base, call.model, args, kwargs)
    finally:
        call.dynamo.watch = None
    if next(numbers) == 0:
        raise OptionError(
            f"Dynamo made no graph of this call of {base.__qualname__} (a graph break in a loop, a sparse tensor, "
            f"Dynamo switched off, or a TorchDispatchMode): every op runs as it is written. {_instead(call.engine)}"
        )
    return result


def _instead(engine: Engine) -> str:
    if engine.boundaries:
        return "Its blocks have graphs: ask one of them, or have fxamp.watch_nan watch a step."
    return "Convert the submodules it consists of."


def _run_in(
    call: Call,
    rewritten: Rewriter | None,
    as_float32: bool,
    runner: type[Runner],
    see: See,
    edge: Edge | None,
    part: Part,
    inputs: Any,
) -> Any:
    """One graph's turn."""
    is_tried = rewritten is not None and not as_float32
    plain_blocks = () if rewritten is None else rewritten.plain_blocks
    running = runner(part.model(call.weights), part, see, edge, as_float32, is_tried, plain_blocks)
    widens = as_float32 and _is_low_by_itself(call)
    return run_part(running, [_widened(value) for value in inputs] if widens else inputs)


def _nothing_seen(part: Part, node: fx.Node, value: Any) -> Any:
    return value


def _look_of(engine: Engine) -> Look:
    """What a model's own calls run through, where they are looked at."""
    if engine not in _looks:
        _looks[engine] = Look(engine, engine.options)
    return _looks[engine]


def _writes_inputs(variant: Variant) -> bool:
    """Whether an op of the graph writes in place, as far as is known into what came in."""
    return any(map(mutated, variant.graph.nodes))


def _is_low_by_itself(call: Call) -> bool:
    """Whether weights are 16-bit that fxamp has not stored so: the model takes 16-bit inputs, and float32 runs none."""
    tensors = (*call.weights.parameters(), *call.weights.buffers())
    return call.engine.options.opt_level not in ("O2", "O3") and any(tensor.dtype in LOW_DTYPES for tensor in tensors)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in LOW_DTYPES else value
