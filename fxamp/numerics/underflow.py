"""Who lost it: the first node whose values, or the gradients it passes back, are zero where float32's are not."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator

from torch import fx

from fxamp import ir
from fxamp.numerics.flow import CallFlow, Edge, Flow
from fxamp.numerics.twin import position, reads_of, root_of, takes_part, twins

LOST = 0.1
"""Share of the non-zero elements that must be gone before it is an underflow: what rounding moves to zero, and what
dropout on a padded shape draws otherwise, is less."""


@dataclasses.dataclass(frozen=True)
class Underflow:
    """Where numbers become zero that are not zero in float32.

    Attributes:
        phase: "forward": its value; "backward": the gradient it passes back.
        lost: share of the elements that are not zero in float32.
        graph: number of the node's graph in `fxamp.report(converted)`.
    """

    name: str
    op: str
    phase: str
    lost: float
    precision: str
    source: str
    module: str
    graph: int = 0

    def __str__(self) -> str:
        name = f"{self.name} of graph {self.graph}" if self.graph > 0 else self.name
        what = "the gradients it passes back" if self.phase == "backward" else "its values"
        place = f" at {self.source}" if self.source else ""
        text = f"underflow: {name} (`{self.op}`, {self.precision}){place}: {self.lost:.0%} of {what} are 0 here only"
        if self.phase != "backward":
            return text
        if self.op == "clamp" and self.precision == "cast":  # fxamp's own
            return f"{text}; what it is given is beyond the low dtype, and is clamped: deny the op that reads it"
        return f"{text}; a larger loss scale keeps them (fxamp.LossScaler)"


def underflows(exact: CallFlow, mixed: CallFlow) -> tuple[Underflow, ...]:
    """The first node that loses values in forward, and the first that loses gradients in backward; none where fewer
    than a tenth are lost.

    Args:
        exact, mixed: the same call, watched with counts; `exact` ran the fp32 graphs.
    """
    pairs = [_Losses(*pair) for pair in twins(exact, mixed)]
    tries = (pair.forward() for pair in pairs), (pair.backward() for pair in reversed(pairs))
    return tuple(found for each in tries if (found := _first(each)) is not None)


def _first(searches: Iterable[Iterator[Underflow]]) -> Underflow | None:
    return next((found for search in searches for found in search), None)


class _Losses:
    """One graph's run beside its fp32 run.

    Casts, pads and packed weights, which the fp32 graph has not, are held against what they were given.
    """

    def __init__(self, exact: Flow, mixed: Flow) -> None:
        self.exact, self.mixed = exact, mixed
        self.nodes = {node.name: node for node in mixed.variant.graph.nodes}
        self.roots = {name: root_of(node) for name, node in self.nodes.items()}
        self.edges = [edge for edge in mixed.edge_counts if edge[1] in self.nodes and edge[0] in self.nodes]
        self.lost: set[fx.Node] = set()
        self.handed: dict[str, list[Edge]] = {}
        for edge in self.edges:
            self.handed.setdefault(edge[0], []).append(edge)

    def forward(self) -> Iterator[Underflow]:
        """Nodes that lose values of inputs that have lost none, in order."""
        for node, lost in self._losing():
            if lost > LOST and not self._has_lost(node.all_input_nodes) and node.op != "placeholder":
                yield self._described(node, "forward", lost)

    def _losing(self) -> Iterator[tuple[fx.Node, float]]:
        """Every node with the share of its values that it has lost; casts go on with what they are given."""
        self.lost.clear()
        for node in self.nodes.values():
            lost = self._lost_value(node)
            yield node, lost
            if lost > LOST or (ir.mark(node).role and self._has_lost(node.all_input_nodes)):
                self.lost.add(node)

    def _has_lost(self, nodes: Iterable[fx.Node]) -> bool:
        return any(node in self.lost for node in nodes)

    def _lost_value(self, node: fx.Node) -> float:
        found = self.mixed.counts.get(node.name)
        if found is None:
            return 0.0
        if ir.mark(node).role:
            expected = self._given(node)
        else:
            expected = self.exact.counts.get(node.name, [])
        return max((share_lost(was, now) for was, now in zip(expected, found, strict=False)), default=0.0)

    def _given(self, node: fx.Node) -> list[int]:
        """What a cast or a pad was given."""
        return [count for given in reads_of(node) for count in self.mixed.counts.get(given.name, [])]

    def backward(self) -> Iterator[Underflow]:
        """Nodes that lose gradients when they were handed good ones, in the order of backward.

        Not those that read, or hold, lost values: their gradients are products with zeros.
        """
        collections.deque(self._losing(), maxlen=0)
        bad: set[Edge] = set()
        for edge in self.edges:
            node = self.nodes[edge[1]]
            lost = self._lost_gradient(edge, node)
            handed = any(each in bad for each in self.handed.get(node.name, ()))
            inherits = handed or self._has_lost((node, *node.all_input_nodes))
            if lost > LOST and not inherits and node.op != "output":
                yield self._described(node, "backward", lost)
            if lost > LOST or (handed and ir.mark(node).role):
                bad.add(edge)

    def _lost_gradient(self, edge: Edge, reader: fx.Node) -> float:
        if ir.mark(reader).role:
            expected = self._total(_part_taken(self.nodes[edge[0]], reader))
        else:
            root = self.roots[edge[0]].name
            expected = self.exact.edge_counts.get((root, edge[1]))
            if expected is None and len(self.handed[edge[0]]) == 1:  # one op here, written out in the float32 run
                expected = self.exact.sum_counts.get(root)
        return 0.0 if expected is None else share_lost(expected, self.mixed.edge_counts[edge])

    def _total(self, node: fx.Node) -> int | None:
        """Of the gradient that a node is handed by all its readers."""
        if node.name in self.mixed.sum_counts:
            return self.mixed.sum_counts[node.name]
        handed = self.handed.get(node.name, ())
        return self.mixed.edge_counts[handed[0]] if len(handed) == 1 else None

    def _described(self, node: fx.Node, phase: str, lost: float) -> Underflow:
        mark = ir.mark(node)
        return Underflow(
            *(node.name, mark.op, phase, lost, mark.role or mark.precision),
            *(ir.source_line(node), self.mixed.part.module_path(node), self.mixed.part.graph),
        )


def share_lost(expected: int, found: int) -> float:
    """share_lost(8, 6) == 0.25; gains are no loss."""
    return max(0.0, 1 - found / expected) if expected else 0.0


def _part_taken(given: fx.Node, reader: fx.Node) -> fx.Node:
    """Of a packed cast the node that takes this weight out of it; else the reader itself."""
    if not any(takes_part(user) for user in reader.users):
        return reader
    place = reader.all_input_nodes.index(given)
    return next((user for user in reader.users if position(user) == place), reader)
