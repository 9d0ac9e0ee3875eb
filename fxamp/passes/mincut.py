"""The exact colouring of free variables: a minimum s-t cut.

Source side is low, sink side is high. What costs are and which nodes share a variable is decided by the caller;
here a problem is a set of variables with

* `fixed`: variables whose side is given,
* `values`: one entry per value that several readers share: if any reader stands on the other side, one cast
  (`to_low` or `to_high`) is paid, once; a reader that casts up inside pays `inside` for itself, until the one cast that
  serves all costs no more,
* `high_cost`: what a variable pays for being high,
* `implies`: pairs (u, v): v high forces u high.

Among all minimum cuts the one with the largest low side is taken, which is unique, so the result does not depend
on the order of anything.

Source of the hyperedge construction: one auxiliary node per value and direction, joined to its readers by edges of
infinite capacity (Lawler, "Cutsets and partitions of hypergraphs", Networks 3, 1973); the price of casting inside is
the capacity of that reader's edge.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Mapping

from networkx.utils import UnionFind

from fxamp.passes.maxflow import SINK, SOURCE, Network

LOW, HIGH = "low", "high"
Variable = Hashable


@dataclasses.dataclass(frozen=True)
class SharedValue:
    """A value and those who read it as it is computed.

    Attributes:
        producer: the variable that decides the precision the value is made in.
        readers: the variables that decide the precision it is read in.
        to_low: cost of one cast down, shared by all readers that are low.
        to_high: cost of one cast up, shared by all readers that are high.
        promoting: the variables, one for each reader, that decide for readers which cast up inside.
        inside: what each of those pays for being high.
    """

    producer: Variable
    readers: frozenset[Variable]
    to_low: int
    to_high: int
    promoting: tuple[Variable, ...] = ()
    inside: int = 0

    @property
    def everybody(self) -> frozenset[Variable]:
        """The variables of all readers."""
        return self.readers.union(self.promoting)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One colouring problem; see the module docstring."""

    free: tuple[Variable, ...]
    fixed: Mapping[Variable, str]
    values: tuple[SharedValue, ...]
    high_cost: Mapping[Variable, int] = dataclasses.field(default_factory=dict)
    implies: tuple[tuple[Variable, Variable], ...] = ()


def solve(problem: Problem) -> dict[Variable, str]:
    """The side of every free variable in the minimum cut with the largest low side."""
    open_values = [simplified for value in problem.values if (simplified := _simplify(value, problem.fixed))]
    solution: dict[Variable, str] = {}
    for component in _components(problem, open_values):
        solution.update(_solve_component(problem, component))
    return solution


def _simplify(value: SharedValue, fixed: Mapping[Variable, str]) -> SharedValue | None:
    """Drop the casts no colouring can avoid or needs; None where nothing is left to decide."""
    producer = fixed.get(value.producer)
    to_low, to_high = value.to_low, value.to_high
    if producer == HIGH:
        to_high = 0
        if any(fixed.get(reader) == LOW for reader in value.everybody):
            to_low = 0
    if producer == LOW:
        to_low = 0
        if any(fixed.get(reader) == HIGH for reader in value.readers):
            to_high = 0
    if to_low == 0 and to_high == 0:
        return None
    if producer is not None and all(reader in fixed for reader in value.everybody):
        return None
    return dataclasses.replace(value, to_low=to_low, to_high=to_high)


@dataclasses.dataclass
class _Component:
    """Free variables that can influence one another, with the values and implications among them."""

    variables: list[Variable] = dataclasses.field(default_factory=list)
    values: list[SharedValue] = dataclasses.field(default_factory=list)
    implies: list[tuple[Variable, Variable]] = dataclasses.field(default_factory=list)


def _components(problem: Problem, values: list[SharedValue]) -> Iterable[_Component]:
    free = set(problem.free)
    links = UnionFind(problem.free)
    touching = [[v for v in (value.producer, *value.everybody) if v in free] for value in values]
    pairs = [[v for v in pair if v in free] for pair in problem.implies]
    for group in (*touching, *pairs):
        if group:
            links.union(*group)
    found: dict[Variable, _Component] = {}
    for variable in problem.free:
        found.setdefault(links[variable], _Component()).variables.append(variable)
    for value, group in zip(values, touching, strict=True):
        if group:
            found[links[group[0]]].values.append(value)
    for pair, group in zip(problem.implies, pairs, strict=True):
        if group:
            found[links[group[0]]].implies.append(pair)
    return found.values()


def _solve_component(problem: Problem, component: _Component) -> dict[Variable, str]:
    """Cut one component; a finite capacity that no sum of costs reaches stands for an infinite one."""
    prices = {v: problem.high_cost.get(v, 0) for v in component.variables}
    infinite = 1 + sum(prices.values()) + sum(value.to_low + value.to_high for value in component.values)
    number: dict[Variable, int] = {v: place + 2 for place, v in enumerate(component.variables)}
    network = Network(len(number) + 2)

    def side(variable: Variable) -> int:
        fixed = problem.fixed.get(variable)
        return number[variable] if fixed is None else (SOURCE if fixed == LOW else SINK)

    for value in component.values:
        producer = side(value.producer)
        if value.to_high:
            up = network.add_node()
            network.add_edge(producer, up, value.to_high)
            for reader in set(map(side, value.readers)):
                network.add_edge(up, reader, infinite)
            for reader in map(side, value.promoting):
                network.add_edge(up, reader, value.inside)
        if value.to_low:
            down = network.add_node()
            network.add_edge(down, producer, value.to_low)
            for reader in set(map(side, value.everybody)):
                network.add_edge(reader, down, infinite)
    for variable, price in prices.items():
        network.add_edge(SOURCE, number[variable], price)
    for above, below in component.implies:
        network.add_edge(side(above), side(below), infinite)
    high = network.smallest_sink_side()
    return {variable: HIGH if place in high else LOW for variable, place in number.items()}
