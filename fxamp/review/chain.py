"""The chain of reasons of a node: from its own, through the nodes it comes from, to the one that began it."""

from collections.abc import Callable, Mapping, Sequence

from fxamp import ir
from fxamp.review.rows import Row

ROOTS: frozenset[ir.Rule] = frozenset(
    {
        *("list", "unlisted", "override", "plan", "ranges", "level", "not between"),
        *("literal", "square", "user cast", "user region", "type", "input", "parameter", "conversion", "pack", "pad"),
        *("user dtype", "creation", "absorbed", "stream", "state", "differences", "author", "kernel"),
        *("gradient sums", "sum"),
    }
)
"""Kinds of reason that begin a chain, unless they name the node they come from."""

_FOLLOWED = ("infer", "clear")
Rows = Mapping[str, Row]


def chain_of(row: Row, rows: Rows) -> list[Row]:
    """The rows from this one to the root of its reason, each once.

    Args:
        rows: of the same graph, by name.
    """
    chain, current = [row], row
    while (following := _next(current, rows)) is not None and following not in chain:
        chain.append(following)
        current = following
    return chain


def _next(row: Row, rows: Rows) -> Row | None:
    stated = rows.get(row.reason_node or "")
    if row.reason_kind in ROOTS:
        return stated
    if row.reason_kind == "downstream":
        return _deny_origin(stated, rows) or stated
    if row.reason_kind == "not low-born" or (row.reason_kind == "cut" and row.precision == "high"):
        return _origin(stated, rows, _is_high_root) if stated is not None else None
    return stated


def _deny_origin(source: Row | None, rows: Rows) -> Row | None:
    """The deny node in float32 that `source` is downstream of, or is itself: of several the one that the passes named.

    They ask what a node reads in order. A cast is no reader of its own, and a reason of that kind names its source.
    """
    seen, stack = set[str](), [source]
    while stack:
        row = stack.pop()
        if row is None or row.name in seen:
            continue
        seen.add(row.name)
        if row.colour == "deny" and row.precision == "high" and not row.role:
            return row
        if row.reason_kind == "downstream":
            stack.append(rows.get(row.reason_node or ""))
        elif row.role or row.colour in _FOLLOWED:
            stack += [rows.get(name) for name in reversed(row.inputs)]
    return None


def _origin(start: Row, rows: Rows, is_origin: Callable[[Row], bool]) -> Row | None:
    """The nearest row, going up through infer and clear rows from `start`, that is an origin."""
    if is_origin(start):
        return start
    seen, frontier = {start.name}, [start]
    while frontier:
        current = frontier.pop(0)
        for name in current.inputs:
            found = rows.get(name)
            if found is None or found.name in seen:
                continue
            seen.add(found.name)
            if is_origin(found):
                return found
            if found.role or found.colour in _FOLLOWED:
                frontier.append(found)
    return None


def _is_high_root(row: Row) -> bool:
    return row.precision == "high" and not row.role and row.reason_kind in ROOTS


def by_name(rows: Sequence[Row], graph: int) -> dict[str, Row]:
    """The rows of one graph by node name."""
    return {row.name: row for row in rows if row.graph == graph}


def readers_of(row: Row, rows: Rows) -> list[Row]:
    """The rows that read this one's value."""
    return [found for found in rows.values() if row.name in found.inputs]
