"""States: what a model keeps from call to call stays float32 on the way from its old to its new numbers.

    self.mean = self.mean * 0.99 + 0.01 * low          # an average, a codebook, a queue's centre

Computed low and kept in float32, such a state is rounded at each call: one that moves by less than half a unit in the
last place, of 8 or 11 bits, does not move at all. torch.autocast computes it in float32, for that is what it reads.
"""

import math
from collections.abc import Container

import torch
from torch import fx

from fxamp import ir
from fxamp.inplace import mutated
from fxamp.passes.costs import GATHERS
from fxamp.passes.ruling import Ruling
from fxamp.value_types import TensorType


def protect_states(ruling: Ruling) -> None:
    """Fix high what is made of a parameter or buffer, and is kept in one, or returned and read by nothing else.

    1. It has the size of that, or of rows of it, and is float32 under autocast; no GEMM makes it.
    2. A graph that Dynamo makes returns what is kept as it does anything else: there what is returned may be kept, if
       what it is made of is not trained. A residual stream, which branches read as well, is no state.
    3. A node that the user has spoken of, by an override or the lists, is left to that.
    """
    parts = _parts_of_states(ruling)
    kept: dict[fx.Node, None] = {}
    returned: dict[fx.Node, None] = {}
    for node in reversed(ruling.graph.nodes):
        if node in parts and (node.meta.get(ir.KEPT) or _may_be_kept(node, parts[node])):
            kept[node] = None
        elif node in parts and _is_returned_alone(node, returned):
            returned[node] = None
        if node in kept or _writes_for_the_caller(ruling, node):
            kept |= dict.fromkeys(source for source in ruling.sources(node) if source in parts)
    for node in kept | returned:
        if node not in ruling.fixed:
            done = "kept: it" if node in kept else "returned: if it is kept, it"
            text = f"is made of {parts[node].name} and {done} would be rounded anew at each call"
            ruling.fix(node, "high", "state", text)


def _may_be_kept(node: fx.Node, origin: fx.Node) -> bool:
    is_returned = any(user.op == "output" for user in node.users)
    return is_returned and origin.op == "placeholder" and not ir.has_gradient(origin)


def _is_returned_alone(node: fx.Node, returned: Container[fx.Node]) -> bool:
    return bool(node.users) and all(user.op == "output" or user in returned for user in node.users)


def _parts_of_states(ruling: Ruling) -> dict[fx.Node, fx.Node]:
    """Values that are free or high and come of a parameter or buffer, with its size or moved -> that one."""
    origins: dict[fx.Node, fx.Node] = {}
    for node in ruling.graph.nodes:
        if ir.is_weight(node):
            origins[node] = node
        elif _may_be_high(ruling, node):
            sources = ruling.sources(node)
            found = [source for source in sources if source in origins]
            is_moved = ruling.colours[node] == "clear" and len(found) == len(sources)
            same = [source for source in found if is_moved or _size(source) == _size(node) is not None]
            if same:
                origins[node] = origins[same[0]]
    return {node: origin for node, origin in origins.items() if node is not origin}


def _may_be_high(ruling: Ruling, node: fx.Node) -> bool:
    is_passing = ruling.colours.get(node) in ("infer", "clear", "deny") and ir.mark(node).op not in GATHERS
    is_open = not ruling.is_fixed(node, "low") and not ruling.is_spoken_of(node)
    return node.op.startswith("call") and is_passing and is_open


def _size(node: fx.Node) -> int | None:
    kind = ir.mark(node).type
    if not isinstance(kind, TensorType) or kind.shape is None or kind.dtype != torch.float32:
        return None
    return math.prod(kind.shape)


def _writes_for_the_caller(ruling: Ruling, node: fx.Node) -> bool:
    """Whether a node writes into a parameter, a buffer or an input."""
    storages = (ruling.aliases.storage_of.get(written) for written in mutated(node))
    return any(storage is not None and storage.external for storage in storages)
