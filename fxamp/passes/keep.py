"""Keep the low copies of weights from call to call, for inference."""

import dataclasses
import operator

from torch import fx

from fxamp import ir
from fxamp.passes.alias import find_aliases
from fxamp.passes.base import Pass
from fxamp.passes.pack import growth_by, is_weight_cast
from fxamp.runtime.packed_weights import KeptCast, packed_cast


@dataclasses.dataclass(frozen=True)
class KeepWeights(Pass):
    """Replace casts of weights by casts that keep their result while gradients are off.

        a, b = packed_cast(low, w, v); c = u.to(low)
        a, b = kept_cast_0(low, w, v); c = kept_cast_1(low, u)[0]

    1. A weight that is written in place by the model keeps its own cast.
    2. A weight that is stored low and padded is kept padded.
    3. What is computed from parameters is computed at each call, and so is its copy.
    """

    def apply(self, graph: fx.Graph) -> bool:
        aliases = find_aliases(graph)
        casts = [node for node in graph.nodes if node.target is packed_cast and _is_of_weights(node)]
        singles = [node for node in graph.nodes if _is_copy(node) and node.args[0] not in aliases.storage_of]
        for number, node in enumerate(casts):
            node.target = KeptCast(number)
        for number, node in enumerate(singles, len(casts)):
            _keep_single(graph, node, KeptCast(number))
        return bool(casts or singles)


def _is_of_weights(packed: fx.Node) -> bool:
    return all(map(ir.is_weight, packed.all_input_nodes))


def _is_copy(node: fx.Node) -> bool:
    """Whether a node makes a copy of a weight, by itself: its cast, or the pad of one that is stored low."""
    return is_weight_cast(node) or (growth_by(node) is not None and ir.is_weight(node.args[0]))  # type: ignore[arg-type]


def _keep_single(graph: fx.Graph, copy: fx.Node, kept: KeptCast) -> None:
    kind, growth = ir.mark(copy).type, growth_by(copy)
    dtype = copy.args[1] if growth is None else kind.dtype  # type: ignore[union-attr]
    with graph.inserting_before(copy):
        whole = graph.call_function(kept, (dtype, copy.args[0]), {} if growth is None else {"pads": (growth,)})
        item = graph.call_function(operator.getitem, (whole, 0))
    for node in (whole, item):
        node.meta.update(copy.meta)
    ir.set_mark(whole, op="packed_cast", type=(kind,))
    copy.replace_all_uses_with(item)
    graph.erase_node(copy)


def forget_copies(graph: fx.Graph) -> None:
    """Make kept copies again at the next call."""
    for node in graph.nodes:
        if isinstance(node.target, KeptCast):
            node.target.forget()
