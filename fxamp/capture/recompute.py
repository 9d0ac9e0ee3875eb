"""Checkpointed regions of a graph: what the user recomputes in backward becomes one call of torch's checkpoint.

    y = checkpoint(block, x)                              # in the user's forward
    y = checkpointed_0(self, x, w, b)                     # in the compiled one: the block's nodes, under checkpoint

Capture notes on each node of a region which one it belongs to; the passes see plain nodes, and casts that they make
for a region alone are recomputed with it. A compiler behind Dynamo is given regions in Dynamo's own form instead.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx
from torch.utils.checkpoint import checkpoint

from fxamp import ir

CONTEXT = "_checkpoint_context_fn"  # where Dynamo keeps the context_fn of a region's graph module


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """One call of `torch.utils.checkpoint.checkpoint`.

    Attributes:
        options: what the user passed to it besides the function and its inputs.
    """

    options: dict[str, Any]


class _Self:
    """Stands for the module among a node's arguments."""

    def __repr__(self) -> str:
        return "self"


Call = Callable[[fx.Graph, str, Region, fx.Graph, list[fx.Node]], fx.Node]


def fold_checkpoints(graph: fx.Graph, make_call: Call) -> fx.Graph:
    """A copy of the graph with one call for each checkpointed region; the graph itself where it has none.

    Args:
        graph: not changed.
        make_call: adds the call of a region, `eager_call` or `compiler_call`.
    """
    regions = list(dict.fromkeys(node.meta[ir.REGION] for node in graph.nodes if ir.REGION in node.meta))
    if not regions:
        return graph
    folded = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    folded.output(folded.graph_copy(graph, copies))
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    for number, region in enumerate(regions):
        _fold(folded, region, f"checkpointed_{number}", make_call)
    folded.lint()
    return folded


def eager_call(compile_inner: Callable[[fx.Graph], Callable[..., Any]]) -> Call:
    """Regions as calls of torch.utils.checkpoint.

    Args:
        compile_inner: makes a function (module, *inputs) of a region's graph.
    """

    def make_call(graph: fx.Graph, name: str, region: Region, inner: fx.Graph, inputs: list[fx.Node]) -> fx.Node:
        run = compile_inner(inner)
        held = [position for position, given in enumerate(inputs) if _is_held(given)]

        def checkpointed(module: Any, *values: Any) -> Any:
            state = {position: values[position] for position in held}

            def recomputed(module: Any, *passed: Any) -> Any:
                rest = iter(passed)
                return run(module, *(state[at] if at in state else next(rest) for at in range(len(values))))

            passed = [value for position, value in enumerate(values) if position not in state]
            return checkpoint(recomputed, module, *passed, **region.options)

        checkpointed.__name__ = checkpointed.__qualname__ = name
        return graph.call_function(checkpointed, (_Self(), *inputs))  # type: ignore[arg-type]

    return make_call


def _is_held(given: fx.Node) -> bool:
    """Whether the user's function holds a value, as a module does its buffers, and is not passed it: torch's checkpoint
    saves what it is passed, and refuses in backward what was written since.
    """
    return ir.mark(given).op == "buffer"


def compiler_call(holder: fx.GraphModule) -> Call:
    """Regions as the op that Dynamo makes of them, for a compiler that decides itself what is computed again.

    Args:
        holder: is given a submodule for each region.
    """
    from torch._higher_order_ops.wrap import tag_activation_checkpoint  # slow to import, and there behind Dynamo

    def make_call(graph: fx.Graph, name: str, region: Region, inner: fx.Graph, inputs: list[fx.Node]) -> fx.Node:
        options = dict(region.options)
        body = fx.GraphModule(holder, inner)
        if "context_fn" in options:
            body.meta[CONTEXT] = options.pop("context_fn")
        holder.add_submodule(name, body)
        return graph.call_function(tag_activation_checkpoint, (graph.get_attr(name), *inputs), options)

    return make_call


def _fold(graph: fx.Graph, region: Region, name: str, make_call: Call) -> None:
    members = _members(graph, region)
    inputs = list(dict.fromkeys(given for node in members for given in node.all_input_nodes if given not in members))
    outputs = [node for node in members if any(user not in members for user in node.users)]
    if not outputs:
        return
    _gather(members)
    with graph.inserting_before(next(reversed(members)).next):
        call = make_call(graph, name, region, _inner_graph(members, inputs, outputs), inputs)
    _use_results(graph, call, outputs, members)
    for node in reversed(members):
        graph.erase_node(node)


def _members(graph: fx.Graph, region: Region) -> dict[fx.Node, None]:
    """The region's nodes in order, with what the passes made for it alone or between two of its nodes."""
    own = {
        node
        for node in graph.nodes
        if node.meta.get(ir.REGION) is region and node.op not in ("get_attr", "placeholder", "output")
    }
    for node in reversed(graph.nodes):
        if not _is_made(node):
            continue
        parts = [user for user in node.users if user.target is operator.getitem] if ir.is_tuple(node) else []
        readers = [reader for user in node.users for reader in (user.users if user in parts else [user])]
        if readers and all(reader in own for reader in readers):
            own.update([node, *parts])
    below: set[fx.Node] = set()
    for node in graph.nodes:
        if node in own or any(given in below for given in node.all_input_nodes):
            below.add(node)
    above: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in own or any(user in above for user in node.users):
            above.add(node)
    return {node: None for node in graph.nodes if node in below and node in above}


def _is_made(node: fx.Node) -> bool:
    """Whether the passes made a node; what they made of several values goes whole, or its values are passed one by one:
    of a tuple torch's checkpoint sees no tensor, and a reentrant one would send its gradients back on a way of its own.
    """
    is_part = node.target is operator.getitem and ir.is_tuple(node.args[0])  # type: ignore[arg-type]
    return node.op not in ("get_attr", "placeholder", "output") and not is_part and bool(ir.mark(node).role)


def _inner_graph(members: Iterable[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> fx.Graph:
    inner = fx.Graph()
    inside = {node: inner.placeholder(node.name) for node in inputs}
    for node in members:
        inside[node] = inner.node_copy(node, inside.__getitem__)
        inside[node].meta.pop(ir.REGION, None)
    inner.output(tuple(inside[node] for node in outputs))
    return inner


def _gather(members: dict[fx.Node, None]) -> None:
    """Move the members together, behind everything they need: what stands between them and reads them comes after."""
    last = next(reversed(members))
    node = next(iter(members))
    late: set[fx.Node] = set()
    moved = []
    while node is not last:
        if node not in members and any(given in members or given in late for given in node.all_input_nodes):
            late.add(node)
            moved.append(node)
        node = node.next
    for node in reversed(moved):
        last.append(node)


def _use_results(graph: fx.Graph, call: fx.Node, outputs: list[fx.Node], members: dict[fx.Node, None]) -> None:
    place = call
    for position, node in enumerate(outputs):
        with graph.inserting_after(place):
            place = graph.call_function(operator.getitem, (call, position))
        place.meta = {key: value for key, value in node.meta.items() if key != ir.REGION}
        node.replace_all_uses_with(place, delete_user_cb=lambda user: user not in members)
