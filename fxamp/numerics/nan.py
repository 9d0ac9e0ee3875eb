"""Name the op that overflowed: the first node whose output or gradient is not finite, and what would mend it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fxamp import ir
from fxamp.engine import Engine, engine_of
from fxamp.numerics.extent import extent_of
from fxamp.numerics.flow import CallFlow, CallWatcher, watch_flow
from fxamp.numerics.mending import first_ring, mending, node_of
from fxamp.numerics.origin import Origin, origin_of, vanished_origin
from fxamp.numerics.run import Call, Part, Runner, call_of, floats_in, in_float32, run_part
from fxamp.unconverted import check_left
from fxamp.variant import Variant

Loss = Callable[[Any], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class BadNode:
    """Where a run stopped being finite.

    Attributes:
        phase: "forward", "backward", "sum of gradients", or "input", "parameter" or "between graphs" where it came
            in from outside.
        graph: number of the node's graph in `fxamp.report(model)`.
        value: of the first bad value or gradient, in words.
        inputs: of everything the node read, in words.
        overrides: the deny entries with which the run is finite; empty where none was found.
        is_bad_in_float32: whether the fp32 run is not finite either: then it is not a matter of precision.
        error: what then stopped the run, "" where nothing did.
    """

    name: str
    op: str
    phase: str
    value: str
    inputs: tuple[str, ...]
    source: str
    module: str
    colour: str
    precision: str
    overrides: dict[str, str]
    is_bad_in_float32: bool
    graph: int = 0
    error: str = ""

    def __str__(self) -> str:
        where = {"forward": "its output", "backward": "the gradient it passes back"}.get(self.phase, self.phase)
        name = f"{self.name} of graph {self.graph}" if self.graph else self.name
        lines = [
            f"{name} (`{self.op}`, {self.colour}, {self.precision}): {where} is the first that is not finite",
            f"  {self.value}",
            *([f"  at {self.source}" + (f", in module {self.module}" if self.module else "")] if self.source else []),
            *(f"  it reads {text}" for text in self.inputs),
            *([f"  then the run stops: {self.error}"] if self.error else []),
            f"  {self.remedy}",
        ]
        return "\n".join(lines)

    @property
    def remedy(self) -> str:
        """What to do, in a sentence."""
        if self.phase == "input":
            return "the input itself is not finite: look at the data"
        if self.phase == "between graphs":
            return "it was made by code between two of Dynamo's graphs, which runs as it is written: look there"
        if self.phase == "parameter":
            return "the parameter itself is not finite: an earlier step wrote it, see fxamp.LossScaler"
        if self.is_bad_in_float32:
            return "the float32 run is not finite here either: it is not a matter of precision, look at the line"
        if self.overrides:
            return f"convert(..., overrides={self.overrides}) makes the run finite"
        if self.phase != "forward":
            return "no deny near it mends it: use a smaller loss scale (fxamp.LossScaler finds one), or bfloat16"
        return "no deny near it mends it: try dtype=torch.bfloat16, whose range is float32's"


def find_nan(converted: nn.Module, inputs: Any, loss_fn: Loss | None = None) -> BadNode | None:
    """The first node, forward or backward, whose output is not finite; None where everything is finite.

        print(fxamp.find_nan(model, (x,), loss_fn=lambda output: scaler.scale(criterion(output, y))))

    Infinities that are written in the code or come in with a mask are not meant; of those that are made, the one that
    reaches the output is named, or else the one that reaches a gradient, or else the first that float32 has not.

    Args:
        inputs: of one call, as `example_inputs` of convert().
        loss_fn: gives a scalar of the output, scaled as in training; without it only the forward is looked at.

    Raises:
        OptionError: the model was not converted, or the loss is no scalar.
    """
    if engine_of(converted) is None:
        check_left(converted, "find_nan looks at nothing")
        return None
    call = call_of(converted, inputs)
    flow = watch_flow(call, loss_fn)
    if not flow.has_bad_values:
        origin = origin_of(flow)
    else:
        exact = watch_flow(call, loss_fn, in_float32(call), as_float32=True)
        origin = origin_of(flow, exact) or vanished_origin(flow, exact)
    return None if origin is None else describe(call, flow, origin, loss_fn)


def describe(call: Call, flow: CallFlow, origin: Origin, loss_fn: Loss | None) -> BadNode:
    """All about an origin, with the deny that mends it; runs the call a few times more."""
    from_outside = origin.phase in ("input", "parameter", "between graphs")
    fp32 = None if from_outside else watch_flow(call, loss_fn, in_float32(call), as_float32=True)
    is_bad = fp32 is not None and not fp32.is_finite
    mended = () if from_outside or is_bad else mending(call, flow, origin, loss_fn)
    error = "" if flow.error is None else f"{type(flow.error).__name__}: {flow.error}".partition("\n")[0]
    return dataclasses.replace(_bad_node(origin, mended, is_bad), error=error)


def _bad_node(origin: Origin, denied: tuple[str, ...], is_bad_in_float32: bool) -> BadNode:
    node, reads = node_of(origin), origin.flow.reads
    mark = ir.mark(node)
    read = [given.name for given in node.all_input_nodes]
    words = f"{origin.edge[0]}'s gradient" if origin.edge else node.name
    return BadNode(
        name=node.name,
        op=mark.op,
        phase=origin.phase,
        value=f"{words}: {origin.extent}",
        inputs=tuple(f"{name}: {extent}" for name in read if (extent := reads.get((name, node.name)))),
        source=ir.source_line(node),
        module=ir.module_path(node),
        colour=mark.role or mark.colour,
        precision=mark.precision,
        overrides=dict.fromkeys(denied, "deny"),
        is_bad_in_float32=is_bad_in_float32,
        graph=origin.flow.part.graph,
    )


# ------------------------------------------------------------------------------------------------- in training


class NanWatch:
    """What `watch_nan` gives: `.found` is the first bad node, None for as long as all is finite."""

    def __init__(self) -> None:
        self.flows: list[CallFlow] = []

    @property
    def found(self) -> BadNode | None:
        """The first bad node of all calls so far, forward before backward, with the deny that is likely to mend it."""
        origin = next((origin for flow in self.flows if (origin := origin_of(flow)) is not None), None)
        return None if origin is None else _bad_node(origin, first_ring(node_of(origin)), False)


@contextlib.contextmanager
def watch_nan(converted: nn.Module, raises: bool = True) -> Iterator[NanWatch]:
    """Watch every call of a converted model, forward and backward; slow, so for the steps that go wrong.

        with fxamp.watch_nan(model):
            scaler.scale(criterion(model(x), y)).backward()     # raises FloatingPointError naming the op

    The deny it names is the likely one, not tried; `find_nan` with the same inputs tries it.

    Args:
        raises: raise on leaving the block; else look at `.found`.

    Raises:
        FloatingPointError: on leaving, where a value or gradient was not finite.
        OptionError: the model was not converted.
    """
    engine = engine_of(converted)
    if engine is None:
        check_left(converted, "watch_nan watches nothing")
        yield NanWatch()
        return
    watch, workshop = NanWatch(), engine.workshop
    changed: list[tuple[Variant, Any]] = []

    def watched(variant: Variant) -> Variant:
        changed.append((variant, variant.compiled))
        variant.compiled = dataclasses.replace(variant.compiled, run=_watching(watch, engine, variant))
        return variant

    for variant in engine.all_variants():
        watched(variant)
    engine.workshop = dataclasses.replace(workshop, build=lambda *given: watched(workshop.build(*given)))
    if engine.dynamo is not None:
        engine.dynamo.watch = _watching_graphs(watch, engine, converted)
    try:
        yield watch
    finally:
        engine.workshop = workshop
        if engine.dynamo is not None:
            engine.dynamo.watch = None
        for variant, compiled in changed:
            variant.compiled = compiled
    if raises and (found := watch.found) is not None:
        raise FloatingPointError(str(found))


def _watching(watch: NanWatch, engine: Engine, variant: Variant) -> Callable[..., Any]:
    """The forward of a graph that is a whole call."""

    def run(module: nn.Module, *inputs: Any) -> Any:
        watcher = CallWatcher(with_gradients=torch.is_grad_enabled())
        return _watched_part(watch, watcher, engine, variant, module, 0, inputs)

    return run


def _watching_graphs(watch: NanWatch, engine: Engine, model: nn.Module) -> Callable[..., Any]:
    """What runs Dynamo's graphs: those of one call belong together."""
    calls: dict[int, CallWatcher] = {}

    def run(variant: Variant, inputs: Any) -> Any:
        watcher = calls.setdefault(engine.dynamo.calls, CallWatcher(with_gradients=torch.is_grad_enabled()))
        return _watched_part(watch, watcher, engine, variant, model, len(watcher.flow.parts), inputs)

    return run


def _watched_part(
    watch: NanWatch,
    watcher: CallWatcher,
    engine: Engine,
    variant: Variant,
    module: nn.Module,
    number: int,
    inputs: Any,
) -> Any:
    graph = next((place for place, known in enumerate(engine.all_variants()) if known is variant), 0)
    if watcher.flow not in watch.flows:
        watch.flows.append(watcher.flow)
        watcher.flow.inputs = [extent_of(tensor) for tensor in floats_in(list(inputs))]
    return run_part(Runner(module, Part(number, graph, variant), watcher.see, watcher.edge), inputs)
