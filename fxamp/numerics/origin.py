"""Who began: the first node of a watched call whose value or gradient is not finite."""

import dataclasses
import math
from collections.abc import Container, Iterator

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.inplace import mutated
from fxamp.numerics.extent import Extent
from fxamp.numerics.flow import CallFlow, Edge, Flow
from fxamp.numerics.reach import bad_values, reach_of
from fxamp.numerics.twin import reads_of, root_of, twins


@dataclasses.dataclass(frozen=True)
class Origin:
    """The node where something stopped being finite.

    Attributes:
        flow: of its graph.
        phase: "input" | "parameter" | "forward" | "backward" | "sum of gradients" | "between graphs" | "loss" |
            "output".
        extent: of the first bad value or gradient; `edge`: the edge it flowed over, for gradients.
        weight: path of the parameter or buffer that is not finite in a module that the node calls whole; of a gradient
            that code around the graphs made, whose it is; "" for others.
        reaches: whether it got to an output, a parameter or an input; else an op of the model took it back.
    """

    node: str
    phase: str
    extent: Extent
    flow: Flow = dataclasses.field(repr=False)
    edge: Edge | None = None
    weight: str = ""
    reaches: bool = True


def origin_of(call: CallFlow, exact: CallFlow | None = None) -> Origin | None:
    """The first bad node of what reaches the outputs, or else of the gradients that reach a parameter or an input.

    Of several graphs the first has the forward's, and the last, whose backward is first, the backward's.

    Args:
        exact: the same call in fp32: what it has too, such as a mask's infinities, then explains nothing else.
    """
    if exact is not None:
        for flow_of_fp32, flow in twins(exact, call):
            flow.exact = flow_of_fp32
    seen = any(not extent.is_finite for extent in call.inputs)
    for flow in call.parts:
        flow.takes_masks = flow.part.number == 0 or seen
        seen = seen or any(not extent.is_finite for extent in flow.values.values())
    ends = [*call.outputs, *([call.loss] if call.loss else [])]
    reaches = not all(extent.is_finite for extent in ends) or not ends or len(call.parts) == 1
    found = next((origin for flow in call.parts if reaches and (origin := _reaching_origin(flow)) is not None), None)
    if found is None:
        led = reach_of(call)
        backwards = reversed(call.parts)
        found = next(
            (origin for flow in backwards if (origin := _gradient_origin(flow, led.of(flow))) is not None), None
        )
    if found is not None and found.phase == "input" and _is_from_around(call, found):
        return dataclasses.replace(found, phase="between graphs")
    return found


def _is_from_around(call: CallFlow, found: Origin) -> bool:
    is_arrived = (found.flow.part.number, found.node) in call.arrived
    return is_arrived or all(extent.is_finite for extent in call.inputs)


def is_of_output(origin: Origin) -> bool:
    """Whether the gradient came to the graph's output as bad as it is."""
    return any(node.op == "output" and node.name == origin.node for node in origin.flow.variant.graph.nodes)


def of_loss(call: CallFlow) -> Origin | None:
    """The last graph's output where that is finite, and the loss of it is not."""
    if call.loss is None or call.loss.is_finite or not all(extent.is_finite for extent in call.outputs):
        return None
    flow = call.parts[-1]
    output = flow.variant.graph.output_node()
    return Origin(output.name, "loss", call.loss, flow)


def of_output(call: CallFlow, exact: CallFlow | None = None) -> Origin | None:
    """The last graph's output, where the call gives what is not finite and no node is seen to have made it.

    Infinities are taken for meant ones, such as a mask's, where the same call in fp32 gives as many, or is not known;
    NaNs never are.
    """
    if not call.parts:
        return None
    meant = [extent.infs for extent in (call if exact is None else exact).outputs]
    bad = [extent for extent, infs in zip(call.outputs, meant, strict=False) if extent.nans or extent.infs != infs]
    flow = call.parts[-1]
    output = flow.variant.graph.output_node()
    return Origin(output.name, "output", bad[0], flow) if bad else None


def vanished_origin(call: CallFlow, exact: CallFlow) -> Origin | None:
    """The first bad node whose value, or else whose gradient, reached nothing: of what an fp32 run has too, the model
    takes care.
    """
    known = {id(flow): flow_of_fp32 for flow_of_fp32, flow in twins(exact, call)}
    for flow in call.parts:
        flow.exact = known.get(id(flow))
        values = flow.exact.values if flow.exact is not None else {}
        also = {name for name, extent in values.items() if not extent.is_finite}
        nodes = [node for node in flow.variant.graph.nodes if node.name not in also or _deviates(flow, node)]
        found = _first_new(flow, nodes)
        if found is not None:
            return found
    for flow in reversed(call.parts):
        also = bad_values(flow.exact) if flow.exact is not None else set()
        nodes_by_name = _nodes(flow)
        own = {name for name in bad_values(flow) if root_of(nodes_by_name[name]).name not in also}
        found = _gradient_origin(flow, own)
        if found is not None:
            return dataclasses.replace(found, reaches=False)
    return None


def value_of_gradient(origin: Origin) -> str | None:
    """The model's own value whose gradient began it, None where a value did: fp32's graph has a node of its name."""
    if origin.phase not in ("backward", "sum of gradients"):
        return None
    return root_of(_nodes(origin.flow)[origin.edge[0] if origin.edge else origin.node]).name


def _nodes(flow: Flow) -> dict[str, fx.Node]:
    return {node.name: node for node in flow.variant.graph.nodes}


def _reaching_origin(flow: Flow) -> Origin | None:
    """Walk back from bad outputs through bad values; the earliest node whose inputs explain nothing, or else the
    earliest GEMM that makes more of a meant infinity than there was.
    """
    reached = _reached(flow, [node for node in flow.variant.graph.nodes if node.op == "output"])
    return _first_new(flow, reached) or _first_spread(flow, reached)


def _reached(flow: Flow, readers: list[fx.Node]) -> list[fx.Node]:
    """The nodes that bad values come from, in the graph's order."""
    nodes = _nodes(flow)
    frontier = list(readers)
    reached: set[fx.Node] = set()
    while frontier:
        node = frontier.pop()
        if node in reached:
            continue
        reached.add(node)
        for given in reads_of(node):
            read = flow.reads.get((given.name, node.name))
            if read is not None and not read.is_finite:
                frontier += [given, *(nodes[writer] for writer in _writers(flow, (given.name, node.name)))]
    return [node for node in nodes.values() if node in reached]


def _writers(flow: Flow, edge: Edge) -> Iterator[str]:
    """The in-place ops that wrote the value's memory before it was read, the last first."""
    writer = flow.writers.get(edge)
    seen: set[str] = set()
    while writer is not None and writer not in seen:
        seen.add(writer)
        yield writer
        writer = flow.earlier.get(writer)


def _first_new(flow: Flow, among: list[fx.Node]) -> Origin | None:
    for node in among:
        if _is_bad(flow, node) and not _is_meant(flow, node) and _is_new(flow, node):
            if node.name in flow.held:
                weight, extent = flow.held[node.name]
                return Origin(node.name, "parameter", extent, flow, weight=weight)
            phase = "parameter" if ir.is_weight(node) else "input" if node.op == "placeholder" else "forward"
            return Origin(node.name, phase, flow.values[node.name], flow)
    return None


def _first_spread(flow: Flow, among: list[fx.Node]) -> Origin | None:
    """The first GEMM with a larger share of infinities than all that it reads have together: it makes rows of one.

    A sum of masked scores is infinite as well, and may be meant.
    """
    for node in among:
        is_gemm = node.op.startswith("call") and ir.mark(node).colour == "allow"
        if is_gemm and _is_bad(flow, node) and not mutated(node) and not _is_meant(flow, node):
            reads = (flow.reads.get((given.name, node.name)) for given in node.all_input_nodes)
            if _share(flow.values[node.name]) > sum(_share(read) for read in reads if read is not None) + 1e-6:
                return Origin(node.name, "forward", flow.values[node.name], flow)
    return None


def _share(extent: Extent) -> float:
    return (extent.nans + extent.infs) / max(1, math.prod(extent.shape))


def _is_bad(flow: Flow, node: fx.Node) -> bool:
    extent = flow.values.get(node.name)
    return extent is not None and not extent.is_finite


UNSET = ("empty", "empty_like", "empty_strided", "empty_permuted", "resize_", "resize_as_")
"""Ops that give memory as it is found."""
_ATTENTION = ("scaled_dot_product_attention", "multi_head_attention_forward")
"""Ops that answer a mask's -inf with a zero weight: it explains no infinity in what they give."""


def _is_new(flow: Flow, node: fx.Node) -> bool:
    """Whether the node made a nan or an inf of inputs that had none of that kind, or more of them than fp32 has."""
    own = flow.values[node.name]
    if ir.mark(node).op.endswith(UNSET):
        return False
    given = [value for value in reads_of(node) if value is not node.kwargs.get("out")]
    reads = [read for value in given if (read := flow.reads.get((value.name, node.name))) is not None]
    if own.nans:
        return not any(read.nans for read in reads) or _deviates(flow, node)
    explains = [read for read in reads if read.infs and not (ir.mark(node).op in _ATTENTION and read.is_mask)]
    return not explains or _deviates(flow, node)


def _deviates(flow: Flow, node: fx.Node) -> bool:
    """Whether the node has other nans or infs than in the fp32 run, of inputs that have the same; casts and pads,
    which that run has not, are held against what they read."""
    if node.name not in flow.values:
        return False
    own, inputs = _bad_counts(flow.values[node.name]), reads_of(node)
    reads = [(given, flow.reads[given.name, node.name]) for given in inputs if (given.name, node.name) in flow.reads]
    if ir.mark(node).role:
        return own > _bad_counts(reads[0][1]) if len(reads) == 1 else False
    if flow.exact is None or node.name not in flow.exact.values or own == _bad_counts(flow.exact.values[node.name]):
        return False
    others = [(flow.exact.reads.get((root_of(given).name, node.name)), read) for given, read in reads]
    return all(other is not None and _bad_counts(other) == _bad_counts(read) for other, read in others)


def _bad_counts(extent: Extent) -> tuple[int, int]:
    return extent.nans, extent.infs


def _is_meant(flow: Flow, node: fx.Node) -> bool:
    """Whether the user wrote the infinity: a fill with a literal inf, or a mask that is an input or a buffer."""
    if flow.values[node.name].nans:
        return False
    if node.op in ("placeholder", "get_attr") and ir.mark(node).op in ("input", "buffer"):
        return flow.takes_masks or ir.is_weight(node)
    return any(isinstance(part, float) and math.isinf(part) for part in pytree.tree_leaves((node.args, node.kwargs)))


def _gradient_origin(flow: Flow, among: Container[str]) -> Origin | None:
    """What made the first bad gradient: a node's backward, or the forward's bad value that it was handed.

    (Attention gives finite results of infinite scores, and NaN gradients.)

    Args:
        among: names of the values whose gradients are meant.
    """
    found = _bad_gradient(flow, among)
    if found is None:
        return None
    return _first_new(flow, _reached(flow, [_nodes(flow)[found.node]])) or found


def _bad_gradient(flow: Flow, among: Container[str]) -> Origin | None:
    """The first bad edge in backward order whose reader got good gradients: the reader's backward made it."""
    for (given, reader), extent in flow.edges.items():
        if extent.is_finite or given not in among:
            continue
        if not flow.sums.get(reader, _GOOD).is_finite:
            if _has_good_edges(flow, reader):
                return Origin(reader, "sum of gradients", flow.sums[reader], flow)
        elif _has_good_edges(flow, reader):
            return Origin(reader, "backward", extent, flow, (given, reader))
    sums = ((name, extent) for name, extent in flow.sums.items() if name in among and not extent.is_finite)
    bad_sum = next(((name, extent) for name, extent in sums if _has_good_edges(flow, name)), None)
    return None if bad_sum is None else Origin(bad_sum[0], "sum of gradients", bad_sum[1], flow)


def _has_good_edges(flow: Flow, value: str) -> bool:
    return all(found.is_finite for (given, _), found in flow.edges.items() if given == value)


_GOOD = Extent(torch.float32, (), None, None, 0, 0)
"""Of a gradient that is no sum."""
