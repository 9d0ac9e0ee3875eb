"""Take over decisions that were made elsewhere: by a saved plan, or by measured ranges."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

from torch import fx

from fxamp import ir
from fxamp.ir import Reason
from fxamp.passes.base import Pass
from fxamp.passes.ruling import Ruling, Verdict

Pin = tuple[Literal["low", "high"], Reason]
Decide = Callable[[fx.Graph], Mapping[str, Pin]]
"""Node name -> precision and why, for a typed graph; nodes it does not name are left to the rules."""

PINNED = "pinned"
# What stays stronger than a pin: facts about types, and what the user wrote in the code or the arguments.
_STRONGER: frozenset[ir.Rule] = frozenset(
    ("type", "override", "user cast", "user operand", "conversion", "input", "parameter")
)


@dataclasses.dataclass(frozen=True)
class PinNodes(Pass):
    """Note on each node the precision that somebody decided for it; the rules take it from there.

    1. Of two that decide about one node, the later wins.
    2. The graph itself is not changed.
    """

    decide: tuple[Decide, ...] = ()

    def apply(self, graph: fx.Graph) -> bool:
        pins = {name: pin for decide in self.decide for name, pin in decide(graph).items()}
        for node in graph.nodes:
            node.meta.pop(PINNED, None)
            if node.name in pins:
                node.meta[PINNED] = pins[node.name]
        return False


def follow_pin(ruling: Ruling, node: fx.Node) -> None:
    """Fix a pinned node as its pin says, unless something stronger has fixed it."""
    verdict, pin = ruling.fixed.get(node), node.meta.get(PINNED)
    if pin is not None and (verdict is None or verdict.reason.kind not in _STRONGER):
        ruling.fixed[node] = Verdict(*pin)
