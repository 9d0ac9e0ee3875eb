"""Give every node a colour, a precision and a reason: the rules fix what they fix, a minimum cut decides the rest."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import ClassVar

from networkx.utils import UnionFind
from torch import fx

from fxamp import ir
from fxamp.ir import Reason
from fxamp.passes import mincut
from fxamp.passes.absorb import can_promote
from fxamp.passes.alias import Aliases
from fxamp.passes.base import Pass
from fxamp.passes.costs import Costs
from fxamp.passes.literals import Fit
from fxamp.passes.mincut import HIGH, LOW, Problem, SharedValue
from fxamp.passes.policy import Policy
from fxamp.passes.reads import float_reads, is_exact_question, picks_positions, sends_gradient_to_positions
from fxamp.passes.rules import apply_rules
from fxamp.passes.ruling import Ruling, Verdict
from fxamp.passes.settle_writes import must_be_high
from fxamp.passes.verify import every_node_coloured

_Version = tuple[fx.Node, int]  # a value, and how often it has been written into when it is read
# The two ends of the cut as variables: who reads in a precision that is not a node's own.
_ALWAYS: dict[mincut.Variable, str] = {HIGH: HIGH, LOW: LOW}


@dataclasses.dataclass(frozen=True)
class ColourNodes(Pass):
    """Mark every node with colour, precision and reason; the graph itself is not changed.

    1. Nodes the rules fix keep their verdict.
    2. Nodes that share written storage, and a tuple and its items, have one precision.
    3. The free nodes take the sides of a minimum cut; ties go low.
    """

    ensures: ClassVar = (every_node_coloured,)
    policy: Policy
    fit_of: Callable[[fx.Node], Fit]

    def apply(self, graph: fx.Graph) -> bool:
        ruling = apply_rules(graph, self.policy, self.fit_of)
        aliases = ruling.aliases
        fix_written_storages(ruling, aliases)
        variables = one_variable_each(graph, aliases)
        problem = build_problem(graph, self.policy, ruling, aliases, variables)
        sides = {**mincut.solve(problem), **problem.fixed}
        for node in graph.nodes:
            self._mark(node, ruling, sides.get(variables[node]))
        return False

    def _mark(self, node: fx.Node, ruling: Ruling, side: str | None) -> None:
        colour = ruling.colours[node]
        reads = float_reads(node, self.policy.lists, self.policy.output_mode)
        ir.set_mark(node, modes=tuple((read.position, read.keyword, read.mode) for read in reads))
        if node not in ruling.participants:
            is_asking = reads and is_exact_question(node, self.policy.lists)
            text = "reads its operands as they come" if is_asking else "handles no float32 value"
            reason = Reason("type", text)
            ir.set_mark(node, colour=colour, precision="none", reason=reason)
            return
        verdict = ruling.fixed.get(node)
        if verdict is not None and verdict.precision == side:
            reason = verdict.reason
        else:
            reason = _cut_reason(side or HIGH)
        ir.set_mark(node, colour=colour, precision=side or HIGH, reason=reason, tainted=node in ruling.tainted)


def _cut_reason(side: str) -> Reason:
    if side == LOW:
        return Reason("cut", "free, and low costs no more than float32 here (minimum cut)")
    return Reason("cut", "free, and float32 needs fewer or smaller casts here (minimum cut)")


def fix_written_storages(ruling: Ruling, aliases: Aliases) -> None:
    """A written storage that belongs to the caller, or has a node that must be high, is high as a whole.

    What an override wants low in it cannot be, unless SettleWrites took it out of the storage.
    """
    for storage in aliases.storages:
        if not must_be_high(ruling, storage):
            continue
        nodes = [node for node in storage.nodes if node in ruling.participants]
        culprit = next((node for node in nodes if ruling.is_fixed(node, HIGH)), storage.nodes[0])
        for node in nodes:
            if not ruling.is_fixed(node, HIGH):
                text = "shares storage that is written in place with a value that must be float32"
                ruling.fixed[node] = _high(text, culprit)


def _high(text: str, culprit: fx.Node) -> Verdict:
    return Verdict("high", Reason("aliasing", f"{text} ({culprit.name})", culprit.name))


def one_variable_each(graph: fx.Graph, aliases: Aliases) -> UnionFind:
    """Nodes that must have one precision: written storages, and tuples with their items."""
    variables = UnionFind()
    for storage in aliases.storages:
        for node in storage.nodes[1:]:
            variables.union(node, storage.nodes[0])
    for node in graph.nodes:
        is_item = ir.mark(node).op == "getitem" and isinstance(node.args[0], fx.Node) and ir.is_tuple(node.args[0])
        if is_item and not ir.stays_float32(node):
            variables.union(node, node.args[0])
    return variables


def build_problem(graph: fx.Graph, policy: Policy, ruling: Ruling, aliases: Aliases, variables: UnionFind) -> Problem:
    """The cut problem of a graph under a ruling."""
    costs = Costs.of(graph)
    fixed: dict[mincut.Variable, str] = {**_ALWAYS}
    for node, verdict in ruling.fixed.items():
        _fix(fixed, variables[node], verdict.precision)
    for node in graph.nodes:
        if node in ruling.participants and node not in ruling.born and not ir.holds_float32(node):
            fixed.setdefault(variables[node], HIGH)
    readers: dict[_Version, set[mincut.Variable]] = {}
    promoting: dict[_Version, list[mincut.Variable]] = {}
    implies: dict[tuple[mincut.Variable, mincut.Variable], None] = {}
    for node in graph.nodes:
        for read in float_reads(node, policy.lists, policy.output_mode):
            reader = variables[node] if read.mode == "with" else read.mode
            value = variables[read.value]
            if read.mode == "with" and node not in ruling.participants:
                continue
            if read.value not in ruling.born and value not in fixed:
                implies[(value, HIGH if read.mode == "any" else reader)] = None
            if picks_positions(node) or sends_gradient_to_positions(node):
                for below, above in _down_to(node, read.value, ruling):
                    ends = variables[below], variables[above]
                    if ends[0] not in fixed and ends[0] != ends[1]:
                        implies[ends] = None
            if read.mode != "any" and reader != value:
                key = (read.value, aliases.epoch(read.value, node))
                if _promotes(node, read.value, fixed, variables):
                    promoting.setdefault(key, []).append(reader)
                else:
                    readers.setdefault(key, set()).add(reader)
    free = dict.fromkeys(variables[n] for n in graph.nodes if n in ruling.participants)
    values = tuple(_shared_values(readers, promoting, variables, costs))
    prices: dict[mincut.Variable, int] = {}
    for node in graph.nodes:
        if node in ruling.participants and (variable := variables[node]) not in fixed:
            prices[variable] = prices.get(variable, 0) + costs.high(node)
    values += tuple(_saved_for_backward(graph, costs, ruling, variables, prices))
    return _closed(Problem(tuple(v for v in free if v not in fixed), fixed, values, prices, tuple(implies)))


def _down_to(node: fx.Node, value: fx.Node, ruling: Ruling) -> Iterator[tuple[fx.Node, fx.Node]]:
    """A node and the value it reads, and the same of the clear nodes that value comes through."""
    yield node, value
    origin = ruling.through_clear(value)
    while value is not origin:
        yield value, ruling.reads[value][0].value
        value = ruling.reads[value][0].value


def _promotes(node: fx.Node, value: fx.Node, fixed: dict[mincut.Variable, str], variables: UnionFind) -> bool:
    """Whether a node reads a low `value` as it is where it is high, beside an operand that is float32 anyway."""
    if fixed.get(variables[node], HIGH) != HIGH or not can_promote(node, value):
        return False
    return all(other is value or fixed.get(variables[other]) == HIGH for other in node.all_input_nodes)


def _shared_values(
    readers: dict[_Version, set[mincut.Variable]],
    promoting: dict[_Version, list[mincut.Variable]],
    variables: UnionFind,
    costs: Costs,
) -> Iterator[SharedValue]:
    """What casts of values cost, one for all readers or inside of promoting kernels (see Absorb)."""
    for key in dict.fromkeys((*readers, *promoting)):
        value, cast = key[0], costs.cast(key[0])
        plain, inside = frozenset(readers.get(key, ())), tuple(promoting.get(key, ()))
        yield SharedValue(variables[value], plain, cast, cast, inside, costs.inside(value))


def _saved_for_backward(
    graph: fx.Graph, costs: Costs, ruling: Ruling, variables: UnionFind, prices: dict[mincut.Variable, int]
) -> Iterator[SharedValue]:
    """A saved value takes 4 bytes an element if any of its keepers is high, and 2 if any is low."""
    for kept in costs.kept(graph):
        keepers = frozenset(variables[node] for node in kept.keepers if node in ruling.participants)
        if len(keepers) == 1:  # the difference is the keeper's alone to pay
            keeper = next(iter(keepers))
            if keeper in prices:
                prices[keeper] += 2 * kept.elements
        elif keepers:
            yield SharedValue(LOW, keepers, 0, 4 * kept.elements)
            yield SharedValue(HIGH, keepers, 2 * kept.elements, 0)


def _fix(fixed: dict[mincut.Variable, str], variable: mincut.Variable, precision: str) -> None:
    """High wins where one variable holds nodes of both kinds; SettleWrites leaves no such written storage."""
    if fixed.get(variable) != HIGH:
        fixed[variable] = precision


def _closed(problem: Problem) -> Problem:
    """Variables that an implication chain ties to HIGH are fixed there before the cut."""
    fixed: dict[mincut.Variable, str] = dict(problem.fixed)
    above: dict[mincut.Variable, list[mincut.Variable]] = {}
    for value, reader in problem.implies:
        above.setdefault(reader, []).append(value)
    frontier = [variable for variable, side in fixed.items() if side == HIGH]
    while frontier:
        for value in above.get(frontier.pop(), ()):
            if value not in fixed:
                fixed[value] = HIGH
                frontier.append(value)
    free = tuple(variable for variable in problem.free if variable not in fixed)
    return dataclasses.replace(problem, free=free, fixed=fixed)
