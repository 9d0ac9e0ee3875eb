"""Name the op that overflowed: the first node whose output or gradient is not finite, and what would mend it."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.converted import Variant, engine_of
from fxamp.errors import FxampError, OptionError
from fxamp.numerics.flow import Flow, Origin, Watcher, origin_of, watch_flow
from fxamp.numerics.run import Call, Runner, call_of
from fxamp.rebuild import rebuild_variant, reference

log = logging.getLogger("fxamp")

MAX_TRIES = 6
"""Sets of nodes that are tried as the deny that mends it, each one ring of readers larger."""
Loss = Callable[[Any], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class BadNode:
    """Where a run stopped being finite.

    Attributes:
        phase: "forward", "backward", "sum of gradients", or "input" or "parameter" where it came in from outside.
        value: of the first bad value or gradient, in words.
        inputs: of everything the node read, in words.
        overrides: the deny entries with which the run is finite; empty where none was found.
        is_bad_in_float32: whether the fp32 run is not finite either: then it is not a matter of precision.
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

    def __str__(self) -> str:
        where = {"forward": "its output", "backward": "the gradient it passes back"}.get(self.phase, self.phase)
        lines = [
            f"{self.name} (`{self.op}`, {self.colour}, {self.precision}): {where} is the first that is not finite",
            f"  {self.value}",
            *([f"  at {self.source}" + (f", in module {self.module}" if self.module else "")] if self.source else []),
            *(f"  it reads {text}" for text in self.inputs),
            f"  {self.remedy}",
        ]
        return "\n".join(lines)

    @property
    def remedy(self) -> str:
        """What to do, in a sentence."""
        if self.phase == "input":
            return "the input itself is not finite: look at the data"
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
    reaches the output is named, or else the one that reaches a gradient, or else the first.

    Args:
        inputs: of one call, as `example_inputs` of convert().
        loss_fn: gives a scalar of the output, scaled as in training; without it only the forward is looked at.

    Raises:
        OptionError: the model was not converted, or the loss is no scalar.
    """
    call = call_of(converted, inputs)
    flow = watch_flow(call, loss_fn)
    origin = origin_of(flow)
    return None if origin is None else describe(call, flow, origin, loss_fn)


def describe(call: Call, flow: Flow, origin: Origin, loss_fn: Loss | None) -> BadNode:
    """All about an origin, with the deny that mends it; runs the call a few times more."""
    node = next(node for node in call.variant.graph.nodes if node.name == origin.node)
    from_outside = origin.phase in ("input", "parameter")
    fp32 = None if from_outside else watch_flow(call, loss_fn, reference(call.model, call.engine, call.variant), True)
    is_bad = fp32 is not None and not fp32.is_finite
    mended = () if from_outside or is_bad else _mending(call, node, origin, loss_fn)
    return _bad_node(flow, origin, node, mended, is_bad)


def _bad_node(flow: Flow, origin: Origin, node: fx.Node, denied: tuple[str, ...], is_bad_in_float32: bool) -> BadNode:
    mark = ir.mark(node)
    read = [given.name for given in node.all_input_nodes]
    words = f"{origin.edge[0]}'s gradient" if origin.edge else node.name
    return BadNode(
        name=node.name,
        op=mark.op,
        phase=origin.phase,
        value=f"{words}: {origin.extent}",
        inputs=tuple(f"{name}: {extent}" for name in read if (extent := flow.reads.get((name, node.name)))),
        source=ir.source_line(node),
        module=ir.module_path(node),
        colour=mark.role or mark.colour,
        precision=mark.precision,
        overrides=dict.fromkeys(denied, "deny"),
        is_bad_in_float32=is_bad_in_float32,
    )


def _mending(call: Call, node: fx.Node, origin: Origin, loss_fn: Loss | None) -> tuple[str, ...]:
    """The smallest of a growing series of sets around the node whose denial makes the run finite."""
    for denied in _rings(node, backward=origin.phase not in ("forward",)):
        overrides = {**call.engine.options.overrides, **dict.fromkeys(denied, "deny")}
        try:
            variant = rebuild_variant(call.model, call.engine, call.variant, overrides=overrides)
            flow = watch_flow(call, loss_fn, variant)
        except FxampError as error:
            log.debug("deny %s was tried and refused: %s", denied, error)
            continue
        if flow.is_finite and origin_of(flow) is None:
            return denied
    return ()


def _rings(node: fx.Node, backward: bool) -> Iterator[tuple[str, ...]]:
    """The node; with its readers; with their readers ... For a gradient also towards its inputs."""
    chosen = dict.fromkeys(_models_own(node))
    for _ in range(MAX_TRIES):
        if chosen:
            yield tuple(found.name for found in chosen)
        following = [reader for found in list(chosen) or [node] for reader in _models_readers(found)]
        if backward:
            following += [given for found in list(chosen) for given in found.all_input_nodes if _is_operation(given)]
        grown = {**chosen, **dict.fromkeys(following)}
        if len(grown) == len(chosen):
            return
        chosen = grown


def _models_own(node: fx.Node) -> list[fx.Node]:
    """The node, or for a cast or pad those that read it."""
    return [node] if _is_operation(node) else _models_readers(node)


def _models_readers(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    for reader in node.users:
        found += [reader] if _is_operation(reader) else _models_readers(reader) if reader.op != "output" else []
    return found


def _is_operation(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method", "call_module") and not ir.mark(node).role


# ------------------------------------------------------------------------------------------------- in training


class NanWatch:
    """What `watch_nan` gives: `.found` is the first bad node, None for as long as all is finite."""

    def __init__(self) -> None:
        self.flows: list[tuple[Call, Flow]] = []

    @property
    def found(self) -> BadNode | None:
        """The first bad node of all calls so far, forward before backward, without the deny that mends it."""
        for _, flow in self.flows:
            origin = origin_of(flow)
            if origin is not None:
                nodes = {node.name: node for node in flow.variant.graph.nodes}
                found = _bad_node(flow, origin, nodes[origin.node], (), False)
                return dataclasses.replace(found, overrides=dict.fromkeys(_first_ring(nodes[origin.node]), "deny"))
        return None


def _first_ring(node: fx.Node) -> tuple[str, ...]:
    return next(_rings(node, backward=False), ())


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
        raise OptionError(f"this {type(converted).__qualname__} was not converted: fxamp.convert(model) first.")
    watch, workshop = NanWatch(), engine.workshop
    changed: list[tuple[Variant, Any]] = []

    def watched(variant: Variant) -> Variant:
        changed.append((variant, variant.compiled))
        variant.compiled = dataclasses.replace(variant.compiled, run=_watching(watch, engine, variant))
        return variant

    for variant in engine.all_variants():
        watched(variant)
    engine.workshop = dataclasses.replace(workshop, build=lambda *given: watched(workshop.build(*given)))
    try:
        yield watch
    finally:
        engine.workshop = workshop
        for variant, compiled in changed:
            variant.compiled = compiled
    if raises and (found := watch.found) is not None:
        raise FloatingPointError(str(found))


def _watching(watch: NanWatch, engine: Any, variant: Variant) -> Callable[..., Any]:
    def run(module: nn.Module, *inputs: Any) -> Any:
        flow = Flow(variant)
        watcher = Watcher(flow, with_gradients=torch.is_grad_enabled())
        watch.flows.append((Call(module, engine, variant, list(inputs)), flow))
        result = Runner(module, variant, watcher.see, watcher.edge).run(*inputs)
        tree = variant.captured.output_tree
        return result if tree is None else pytree.tree_unflatten(result, tree)

    return run
