"""Checkpointed regions of Dynamo's graphs.

Dynamo makes one node of a checkpointed region, with the region's graph as its first argument. That node trusts a
compiler to draw the same random numbers when it computes the region again; run as it is, it draws others.
`open_checkpoints` puts the region's own nodes in its place, marked as those of a symbolic trace are, so that the passes
see them.
"""

import operator
from typing import Any

import torch
from torch import fx

from fxamp import ir
from fxamp.capture.recompute import CONTEXT, Region


def open_checkpoints(graph: fx.Graph, module: fx.GraphModule) -> None:
    """Put the nodes of each checkpointed region in the place of the call that holds them; in place.

    Args:
        module: has the regions' graphs among its submodules.
    """
    for node in list(graph.nodes):
        if _is_checkpoint(node):
            body: Any = module.get_submodule(str(node.args[0].target))
            options = {"use_reentrant": False, "preserve_rng_state": True, **node.kwargs}
            if CONTEXT in body.meta:
                options["context_fn"] = body.meta[CONTEXT]
            _open(graph, node, module, Region(options))


def _is_checkpoint(node: fx.Node) -> bool:
    is_higher = isinstance(node.target, torch._ops.HigherOrderOperator)
    return is_higher and node.target.__name__ == "tag_activation_checkpoint"  # type: ignore[union-attr]


def _open(graph: fx.Graph, call: fx.Node, module: fx.GraphModule, region: Region) -> None:
    """A region inside a region is part of it."""
    holder, *given = call.args
    path = str(holder.target)  # type: ignore[union-attr]
    body: Any = module.get_submodule(path)
    inside: dict[fx.Node, Any] = {}
    results: Any = ()
    for node in body.graph.nodes:
        if node.op == "placeholder":
            inside[node] = given[len(inside)]
        elif node.op == "output":
            results = fx.node.map_arg(node.args[0], inside.__getitem__)
        else:
            with graph.inserting_before(call):
                inside[node] = twin = graph.node_copy(node, inside.__getitem__)
            twin.meta = {**node.meta, ir.REGION: region}
            if node.op in ("get_attr", "call_module"):
                twin.target = f"{path}.{node.target}"
    _use(results, call)
    graph.erase_node(call)
    if not holder.users:  # type: ignore[union-attr]
        graph.erase_node(holder)  # type: ignore[arg-type]
    for twin in list(inside.values()):
        if isinstance(twin, fx.Node) and _is_checkpoint(twin) and twin.meta.get(ir.REGION) is region:
            _open(graph, twin, module, region)


def _use(results: Any, call: fx.Node) -> None:
    """What reads the call's results reads the region's nodes."""
    if isinstance(results, fx.Node):
        call.replace_all_uses_with(results)
        return
    for user in list(call.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])
            user.graph.erase_node(user)
        else:
            user.args = fx.node.map_arg(user.args, lambda node: list(results) if node is call else node)
