"""Casts that many read: their gradients come back to float32 by several ways."""

import dataclasses

import torch
from torch import fx

from fxamp import ir
from fxamp.ir import Reason
from fxamp.passes.base import Pass
from fxamp.passes.policy import Policy
from fxamp.runtime.cast_again import cast_again

TOGETHER = 4
"""Readers whose gradients are added low: queries, keys and values, or two projections, cost nothing by it."""


@dataclasses.dataclass(frozen=True)
class SplitGradients(Pass):
    """Let no more than four readers of a low copy add up their gradients in low precision, at level strict none.

    low = x.to(low); a = linear(low, w); b = linear(low, v)     # before: the gradients of both are added low
    again = cast_again(x, low); b = linear(again, v)            # after, at level strict: they are added in float32

    1. A value that every layer of a decoder reads has two gradients for each: added low, each sum rounds all before it,
       while autocast, which casts anew for each reader, adds in float32.
    2. The copy is made once; in backward each way is one more conversion, and stands before its first reader, so that
       its gradient is converted and added as soon as it is there.
    3. Readers in different checkpointed regions go different ways: each is a part of its region.
    4. Weights stay as they are: autocast casts them once, too.
    """

    policy: Policy

    @property
    def together(self) -> int:
        return 1 if self.policy.level == "strict" else TOGETHER

    def apply(self, graph: fx.Graph) -> bool:
        changed = False
        for cast in list(graph.nodes):
            if self._is_shared(cast):
                changed |= self._split(graph, cast)
        return changed

    def _is_shared(self, node: fx.Node) -> bool:
        if node.target != "to" or ir.mark(node).role != "cast" or ir.dtype_of(node) != self.policy.low:
            return False
        (value,) = node.all_input_nodes
        return ir.dtype_of(value) == torch.float32 and ir.has_gradient(node) and ir.is_tensor(value)

    def _split(self, graph: fx.Graph, cast: fx.Node) -> bool:
        readers = sorted(user for user in cast.users if _is_way_back(user, cast))
        changed = False
        for group in self._groups(readers)[1:]:
            with graph.inserting_before(group[0]):
                again = graph.call_function(cast_again, (cast.args[0], cast))
            _describe(again, cast)
            for reader in group:
                reader.replace_input_with(cast, again)
            changed = True
        return changed

    def _groups(self, readers: list[fx.Node]) -> list[list[fx.Node]]:
        groups: list[list[fx.Node]] = []
        for reader in readers:
            region = reader.meta.get(ir.REGION)
            last = groups[-1] if groups else []
            if not last or len(last) >= self.together or last[0].meta.get(ir.REGION) != region:
                groups.append([])
            groups[-1].append(reader)
        return groups


def _is_way_back(reader: fx.Node, cast: fx.Node) -> bool:
    """Whether a gradient comes back from a reader that is not outside of the checkpointed region of the cast."""
    region = cast.meta.get(ir.REGION)
    return ir.has_gradient(reader) and region in (None, reader.meta.get(ir.REGION))


def _describe(again: fx.Node, cast: fx.Node) -> None:
    ir.keep_place(again, cast)
    if ir.REGION in cast.meta:
        again.meta[ir.REGION] = cast.meta[ir.REGION]
    text = f"{cast.name} again, so that the gradients of its readers are added up in float32"
    reason = Reason("cast", text, cast.name)
    ir.set_mark(
        again, op="cast_again", type=ir.mark(cast).type, colour="clear", precision="low", reason=reason, role="cast",
        serves=ir.mark(cast).serves,
    )  # fmt: skip
