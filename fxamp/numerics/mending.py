"""The deny that mends a bad value: the node itself, then with its readers, then with theirs ..."""

import collections
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxamp import ir
from fxamp.errors import FxampError
from fxamp.inplace import mutated
from fxamp.numerics.blocks import boundary_of, denial
from fxamp.numerics.flow import CallFlow
from fxamp.numerics.origin import Origin, origin_of, value_of_gradient
from fxamp.numerics.reach import bad_values
from fxamp.numerics.run import Call, Rewriter
from fxamp.numerics.runner import Part
from fxamp.numerics.subset import SubsetSearch
from fxamp.numerics.twin import root_of
from fxamp.numerics.watcher import watch_flow

log = logging.getLogger("fxamp")

MAX_TRIES = 6
"""Sets of nodes that are tried as the deny that mends it, each one ring of readers larger."""
MAX_RUNS = 32
"""Runs in all, with those that look for a small set of everything."""
Loss = Callable[[Any], torch.Tensor]


def node_of(origin: Origin) -> fx.Node:
    """The node itself."""
    nodes: Iterable[fx.Node] = origin.flow.variant.graph.nodes
    return next(node for node in nodes if node.name == origin.node)


def mending(call: Call, watched: CallFlow, origin: Origin, loss_fn: Loss | None) -> tuple[str, ...]:
    """The smallest of a growing series of sets around the node whose denial makes the run finite, without what it does
    not need.

    Where none mends a value, and the denial of everything does, a small set of that is found by bisection, in
    `MAX_RUNS`: behind a value that overflows the next may, and its gradient. (A gradient alone has the loss scale.)
    """
    sets = SubsetSearch(lambda denied: float(not _mends(call, origin, loss_fn, denied)), 0.0, MAX_RUNS)
    parts = {flow.variant.graph: flow.part for flow in (*reversed(watched.parts), origin.flow)}
    named = functools.partial(_denials, call, parts)
    graphs = [part.variant.graph for part in watched.parts if part.part.number >= origin.flow.part.number]
    is_value = origin.phase in ("forward", "parameter")
    for nodes in _rings(node_of(origin), graphs, backward=not is_value):
        if sets.passes(denied := named(nodes)):
            return tuple(sets.reduced(denied)[0])
    if not is_value:
        return ()
    everything = named(_all_from(call, node_of(origin), watched))
    return tuple(sets.reduced(sets.shortest_prefix(everything))[0]) if sets.passes(everything) else ()


def _denials(call: Call, parts: Mapping[fx.Graph, Part], nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """What `overrides` of convert() names them by; what has no float, such as a size, has nothing to deny.

    Args:
        parts: whose nodes those of a graph are, where modules share it.
    """
    named = [node for node in nodes if ir.mark(node).precision != "none"]
    return tuple(dict.fromkeys(denial(call, parts[node.graph], node) for node in named))


def _mends(call: Call, origin: Origin, loss_fn: Loss | None, denied: Sequence[str]) -> bool:
    """Whether the call is finite with these denied."""
    overrides = {**call.engine.options.overrides, **dict.fromkeys(denied, "deny")}
    blocks = set(denied).intersection(call.engine.blocks)
    try:
        flow = watch_flow(call, loss_fn, Rewriter(call, blocks, overrides=overrides))
    except FxampError as error:
        log.debug("deny %s was tried and refused: %s", denied, error)
        return False
    return flow.has_finite_ends and _is_clean(flow, origin)


def _all_from(call: Call, node: fx.Node, watched: CallFlow) -> list[fx.Node]:
    """What runs low in the call, by its distance from the node; what is in other graphs comes last."""
    distances: dict[fx.Node, int] = {node: 0}
    frontier = collections.deque([node])
    while frontier:
        here = frontier.popleft()
        for near in (*here.users, *here.all_input_nodes):
            if near not in distances:
                distances[near] = distances[here] + 1
                frontier.append(near)
    parts = [(flow.part, found) for flow in watched.parts for found in flow.variant.graph.nodes if _is_operation(found)]
    low = [found for part, found in parts if _is_low(found) or boundary_of(call, found, part)]
    return sorted(low, key=lambda found: distances.get(found, len(parts) + len(distances)))


def _is_low(node: fx.Node) -> bool:
    return ir.mark(node).precision == "low"


def _is_clean(flow: CallFlow, origin: Origin) -> bool:
    """Whether the node, and what reaches the outputs and the parameters, is finite now."""
    same = [part for part in flow.parts if part.part.number == origin.flow.part.number]
    own = [part.values[origin.node] for part in same if origin.phase == "forward" and origin.node in part.values]
    if not origin.reaches and any(value_of_gradient(origin) in bad_values(part) for part in same):
        return False
    return origin_of(flow) is None and all(extent.is_finite for extent in own)


def _rings(node: fx.Node, graphs: Sequence[fx.Graph], backward: bool) -> Iterator[tuple[fx.Node, ...]]:
    """The node; with its readers; with their readers ...

    Args:
        graphs: the node's own and those that run after it: what one returns the next may read.
        backward: also towards its inputs, as a gradient flows.
    """
    after = dict(itertools.pairwise(graphs))
    chosen = dict.fromkeys(_models_own(node))
    for _ in range(MAX_TRIES):
        if chosen:
            yield tuple(chosen)
        here = list(chosen) or [node]
        following = [reader for found in here for reader in _models_readers(found)]
        ends = dict.fromkeys(found.graph for found in here if _is_returned(found))
        following += [reader for graph in ends if graph in after for reader in _first_readers(after[graph])]
        if backward:
            following += [given for found in list(chosen) for given in _models_inputs(found)]
        grown = {**chosen, **dict.fromkeys(following)}
        if len(grown) == len(chosen):
            return
        chosen = grown


def _is_returned(node: fx.Node) -> bool:
    """Whether the graph gives the value back, as it is or cast."""
    return any(user.op == "output" or (ir.mark(user).role and _is_returned(user)) for user in node.users)


def _first_readers(graph: fx.Graph) -> list[fx.Node]:
    """What reads the values that come into a graph."""
    inputs = [node for node in graph.nodes if node.op == "placeholder" and not ir.is_weight(node)]
    return [reader for given in inputs for reader in _models_readers(given)]


def _models_own(node: fx.Node) -> list[fx.Node]:
    """The node, or for a cast or pad those that read it; of a graph's output what it gives."""
    if node.op == "output":
        return [given for value in node.all_input_nodes if _is_operation(given := root_of(value))]
    return [node] if _is_operation(node) else _models_readers(node)


def _models_readers(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    for reader in node.users or _readers_of_written(node):
        found += [reader] if _is_operation(reader) else _models_readers(reader) if reader.op != "output" else []
    return found


def _models_inputs(node: fx.Node) -> list[fx.Node]:
    """What the node reads, behind casts and pads."""
    found: list[fx.Node] = []
    for given in node.all_input_nodes:
        found += [given] if _is_operation(given) else _models_inputs(given)
    return found


def _readers_of_written(node: fx.Node) -> list[fx.Node]:
    """What reads, behind an op that returns nothing, what it has written."""
    return [reader for written in mutated(node) for reader in written.users if node < reader]


def _is_operation(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method", "call_module") and not ir.mark(node).role


def first_ring(node: fx.Node) -> tuple[str, ...]:
    """What is tried first."""
    return tuple(found.name for found in next(_rings(node, (), backward=False), ()))
