"""What the rules found out about one graph: their working state, and their outcome."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from torch import fx

from fxamp import ir
from fxamp.ir import Colour, Reason
from fxamp.lists import TRAITS
from fxamp.passes.alias import Aliases, find_aliases
from fxamp.passes.literals import Fit
from fxamp.passes.policy import Policy
from fxamp.passes.reads import Read, float_reads, is_conversion

# What they make holds small integers, exact in any dtype, but for a number that a literal gives them.
EXACT_CREATORS = frozenset("zeros ones zeros_like ones_like new_zeros new_ones eye full full_like new_full".split())


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A node's fixed precision and why."""

    precision: Literal["low", "high"]
    reason: Reason


@dataclasses.dataclass
class Ruling:
    """The outcome of the rules for one graph.

    Attributes:
        reads: how each node reads its float32 arguments.
        colours: of every node, overrides applied.
        chosen: why, for nodes whose colour an override gave.
        fixed: nodes whose precision is not free.
        born: nodes whose value is low-born: rounding it once more loses nothing that matters.
        tainted: nodes whose value holds numbers beyond the low range.
        integers: nodes whose float32 value is made of exact integers.
        rounded: nodes that low numbers of a GEMM or of a bounded op, or rows of a table, are a part of.
        participants: nodes that handle float32 values.
    """

    graph: fx.Graph
    policy: Policy
    fit_of: Callable[[fx.Node], Fit]
    aliases: Aliases
    reads: dict[fx.Node, list[Read]]
    participants: set[fx.Node]
    colours: dict[fx.Node, Colour] = dataclasses.field(default_factory=dict)
    chosen: dict[fx.Node, Reason] = dataclasses.field(default_factory=dict)
    fixed: dict[fx.Node, Verdict] = dataclasses.field(default_factory=dict)
    born: set[fx.Node] = dataclasses.field(default_factory=set)
    tainted: set[fx.Node] = dataclasses.field(default_factory=set)
    integers: set[fx.Node] = dataclasses.field(default_factory=set)
    rounded: set[fx.Node] = dataclasses.field(default_factory=set)

    def fix(
        self, node: fx.Node, precision: Literal["low", "high"], kind: ir.Rule, text: str, via: fx.Node | None = None
    ) -> None:
        """Give a node its precision; `via` is the node the reason came from."""
        self.fixed[node] = Verdict(precision, Reason(kind, text, via.name if via is not None else None))

    def is_fixed(self, node: fx.Node, precision: str) -> bool:
        verdict = self.fixed.get(node)
        return verdict is not None and verdict.precision == precision

    def is_spoken_of(self, node: fx.Node) -> bool:
        """Whether the user has said what is to become of the node, by an override or the lists."""
        return node in self.chosen or self.policy.is_users_choice(ir.mark(node).op)

    def is_reader(self, node: fx.Node) -> bool:
        """Whether float32 values flow into or out of the node."""
        return ir.holds_float32(node) or bool(self.reads[node])

    def sources_of(self, read: Read, reader: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes whose properties the read value has: its producer, and who last wrote into its storage."""
        writer = self.aliases.last_writer(read.value, reader)
        return (read.value,) if writer is None or writer is read.value else (read.value, writer)

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """The sources of everything a node reads."""
        return [source for read in self.reads[node] for source in self.sources_of(read, node)]

    def first_source(self, node: fx.Node, marked: "set[fx.Node] | dict[fx.Node, fx.Node]") -> fx.Node | None:
        """A source that is marked, None where none is."""
        return next((source for source in self.sources(node) if source in marked), None)

    def through_clear(self, node: fx.Node) -> fx.Node:
        """The node whose numbers a clear node passes on; a node of another colour is itself."""
        while (
            node.op.startswith("call")
            and self.colours[node] == "clear"
            and not is_conversion(node)
            and len(self.reads[node]) == 1
        ):
            node = self.reads[node][0].value
        return node


def start_ruling(graph: fx.Graph, policy: Policy, fit_of: Callable[[fx.Node], Fit]) -> Ruling:
    """A ruling that has fixed nothing yet."""
    reads = {node: float_reads(node, policy.lists, policy.output_mode) for node in graph.nodes}
    participants = {node for node in graph.nodes if _participates(node, reads[node])}
    aliases = find_aliases(graph, with_results=policy.output_mode == "high")
    return Ruling(graph, policy, fit_of, aliases, reads, participants)


def _participates(node: fx.Node, reads: list[Read]) -> bool:
    if node.op == "output":
        return False
    return ir.holds_float32(node) or any(read.mode == "with" for read in reads)


def gives_exact(node: fx.Node) -> bool:
    """Whether the result is exact in any dtype, whatever it reads (0 and 1), so that nothing spreads from it."""
    return ir.mark(node).op in TRAITS["exact_result"]


def is_bounded(node: fx.Node) -> bool:
    """Whether the node's result is bounded or normalised, whatever it reads."""
    return ir.mark(node).op in TRAITS["bounded"]
