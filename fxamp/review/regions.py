"""Connected parts of a graph that run in float32, largest first: where bytes are still to be won."""

import dataclasses
from collections.abc import Iterable, Sequence

from fxamp import ir
from fxamp.review.rows import Row

_CAUSES: tuple[ir.Rule, ...] = (
    "list",
    "override",
    "user cast",
    "user operand",
    "user region",
    "unlisted",
    "literal",
    "square",
    "integers",
    "taint",
    "stream",
    "state",
    "differences",
    "kernel",
    "gradient sums",
    "sum",
)
"""Kinds of reason that start a float32 region, the others follow from them; most telling first."""


@dataclasses.dataclass(frozen=True)
class Region:
    """Nodes that run in float32 and hand values to each other.

    Attributes:
        graph: number of the graph.
        nodes: names, in order.
        nbytes: of the float32 values they make in one forward, as often as their graph runs in it.
        cause: the node that holds the others in float32, and `reason` its reason.
        sources: the user's lines, each once.
    """

    graph: int
    nodes: tuple[str, ...]
    nbytes: int
    cause: str
    reason: str
    sources: tuple[str, ...]


def regions_of(rows: Iterable[Row]) -> list[Region]:
    """The float32 regions of all graphs, largest first; casts and parameters are no part of one."""
    members = [row for row in rows if row.precision == "high" and not row.role and not row.is_source]
    home: dict[tuple[int, str], list[int]] = {}
    for number, row in enumerate(members):
        home[row.graph, row.name] = [number]
        for name in row.inputs:
            if (row.graph, name) in home:
                _join(home, members, home[row.graph, row.name], home[row.graph, name])
    groups = {id(group): sorted(group) for group in home.values()}
    regions = [_region([members[number] for number in group]) for group in groups.values()]
    return sorted(regions, key=lambda region: (-region.nbytes, region.graph, region.nodes))


def _join(home: dict[tuple[int, str], list[int]], rows: Sequence[Row], one: list[int], other: list[int]) -> None:
    """Make two groups one: the smaller moves into the larger."""
    if one is other:
        return
    small, large = sorted((one, other), key=len)
    large += small
    for number in small:
        home[rows[number].graph, rows[number].name] = large


def _region(group: Sequence[Row]) -> Region:
    cause = min(group, key=lambda row: _CAUSES.index(row.reason_kind) if row.reason_kind in _CAUSES else 99)
    return Region(
        graph=group[0].graph,
        nodes=tuple(row.name for row in group),
        nbytes=sum(row.runs * (row.nbytes or 0) for row in group),
        cause=cause.name,
        reason=cause.reason,
        sources=tuple(dict.fromkeys(row.source for row in group if row.source)),
    )
