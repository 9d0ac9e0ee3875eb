"""Keep the low copies of weights from call to call, for inference."""

import dataclasses
import operator

from torch import fx

from fxamp import ir
from fxamp.passes.alias import find_aliases
from fxamp.passes.base import Pass
from fxamp.passes.pack import is_weight_cast
from fxamp.runtime.packed_weights import KeptCast, packed_cast


@dataclasses.dataclass(frozen=True)
class KeepWeights(Pass):
    """Replace casts of weights by casts that keep their result while gradients are off.

        a, b = packed_cast(low, w, v); c = u.to(low)
        a, b = kept_cast_0(low, w, v); c = kept_cast_1(low, u)[0]

    1. A weight that is written in place by the model keeps its own cast.
    """

    def apply(self, graph: fx.Graph) -> bool:
        aliases = find_aliases(graph)
        casts = [node for node in graph.nodes if node.target is packed_cast]
        singles = [n for n in graph.nodes if is_weight_cast(n) and n.args[0] not in aliases.storage_of]
        for number, node in enumerate(casts):
            node.target = KeptCast(number)
        for number, node in enumerate(singles, len(casts)):
            _keep_single(graph, node, KeptCast(number))
        return bool(casts or singles)


def _keep_single(graph: fx.Graph, cast: fx.Node, kept: KeptCast) -> None:
    with graph.inserting_before(cast):
        whole = graph.call_function(kept, (cast.args[1], cast.args[0]))
        item = graph.call_function(operator.getitem, (whole, 0))
    for node in (whole, item):
        node.meta.update(cast.meta)
    ir.set_mark(whole, op="packed_cast", type=(ir.mark(cast).type,))
    cast.replace_all_uses_with(item)
    graph.erase_node(cast)


def forget_copies(graph: fx.Graph) -> None:
    """Make kept copies again at the next call."""
    for node in graph.nodes:
        if isinstance(node.target, KeptCast):
            node.target.forget()
