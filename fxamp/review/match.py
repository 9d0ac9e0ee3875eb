"""Find the nodes of a saved plan in a graph that was captured later, perhaps of changed code.

    old   linear  exp  add          new   linear  exp  exp  add
            |      |    |                   |          |    |
            +------+----+-------------------+----------+----+      by what their lines say and what they read

A node is told by its module, its op, the text of its line, the ops it reads and its shape. What could be several
nodes is none of them: a decision is rather lost, and said to be, than given to the wrong node.
"""

import bisect
import difflib
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from fxamp.numerics.places import text_of
from fxamp.review.rows import Row


class Place(NamedTuple):
    """Where a node stands, without names that a change elsewhere in the code would change.

    Attributes:
        text: of the user's line, "" where it is not known.
        reads: ops it reads, each with its module where that is another one.
        shape: "2x8x48", "" where it is not known.
    """

    module: str
    op: str
    text: str
    reads: str
    shape: str


class Item(NamedTuple):
    """A node on one side: its name there, where it stands, and (in a plan) what was decided."""

    side: str
    name: str
    place: Place
    decided: str = ""


def place_of(row: Row, rows: Mapping[str, Row]) -> Place:
    """The place of a row.

    Args:
        rows: of the same graph, by name.
    """
    reads = [_read(_without_casts(rows[name], rows), row.module) for name in row.inputs if name in rows]
    shape = "" if row.shape is None else "x".join(map(str, row.shape))
    return Place(row.module, row.op.rstrip("_"), text_of(row.source).replace(" | ", " "), ", ".join(reads), shape)


def place_of_key(key: str) -> Place:
    """What the key of a node alone tells, "encoder.fc:linear#0"."""
    module, _, rest = key.partition(":")
    return Place(module, rest.rpartition("#")[0].rstrip("_"), "", "", "")


def _without_casts(row: Row, rows: Mapping[str, Row]) -> Row:
    """The model's own node that a cast or pad stands for, or that the user converts to float32: a kernel may take that
    conversion inside, and then it is no node of the plan."""
    seen = set()
    while (row.role or is_widening(row)) and row.name not in seen:
        seen.add(row.name)
        given = rows.get(row.reason_node or "") or next((rows[name] for name in row.inputs if name in rows), None)
        if given is None:
            break
        row = given
    return row


def is_widening(row: Row) -> bool:
    """Whether a row is `x.float()`, or a `.to(...)` that gives float32: nothing is decided about its precision."""
    return row.op in ("float", "to") and row.dtype == "float32" and not row.role


def _read(row: Row, module: str) -> str:
    op = row.op.rstrip("_")
    return op if row.module == module or row.is_source else f"{op}@{row.module.rpartition('.')[2]}"


# --------------------------------------------------------------------------------------------------- matching

_Key = Callable[[Item], Hashable]
_ANYWHERE: tuple[_Key, ...] = (
    lambda item: (item.place.op, item.place.text, item.place.reads, item.place.shape),
    lambda item: (item.place.op, item.place.text, item.place.reads),
    lambda item: (item.place.op, item.place.text),
)
"""What makes two nodes of a module the same wherever they stand in it, strongest first."""
_BETWEEN: tuple[_Key, ...] = (
    lambda item: (item.place.op, item.place.reads, item.place.shape),
    lambda item: (item.place.op, item.place.reads),
)
"""What makes two nodes the same that stand between the same neighbours."""


def match(old: Sequence[Item], new: Sequence[Item]) -> tuple[dict[str, str], dict[str, int]]:
    """Which old node each new one is, and the old ones that might be any of several.

    Returns:
        new name -> old name, and ambiguous old name -> how many nodes it might be.
    """
    found: dict[str, str] = {}
    unclear: dict[str, int] = {}
    before, after = _by_module(old), _by_module(new)
    for was, now in _modules(before, after):
        pairs, open_ones = _match_module(before[was], after[now])
        found.update({other.name: one.name for one, other in pairs})
        unclear.update({one.name: count for one, count in open_ones.items()})
    return found, unclear


def fit(old: Sequence[Item], new: Sequence[Item], found: Mapping[str, str]) -> tuple[float, float]:
    """How well two graphs fit: the share of the nodes of both that are found in place, and found at all.

    Args:
        found: as `match` gives it.
    """
    places = {item.name: item.place for item in old}
    in_place = sum(item.name in found and places[found[item.name]][:3] == item.place[:3] for item in new)
    both = max(1, len(old) + len(new))
    return 2 * in_place / both, 2 * len(found) / both


def _by_module(items: Sequence[Item]) -> dict[str, list[Item]]:
    modules: dict[str, list[Item]] = {}
    for item in items:
        modules.setdefault(item.place.module, []).append(item)
    return modules


def _modules(before: Mapping[str, list[Item]], after: Mapping[str, list[Item]]) -> list[tuple[str, str]]:
    """Pairs of the same module: of one path, with an op at least in common, or moved and renamed (the numbers of a
    Sequential's children, where one was put in) where the nodes and the neighbours tell so.

    Where these differ, in what stands between other paths, there is none.
    """
    outlines = (
        {path: _outline(items) for path, items in before.items()},
        {path: _outline(items) for path, items in after.items()},
    )
    places = list(before), list(after)
    titles = ([(_title(path), outline) for path, outline in side.items()] for side in outlines)
    moved = _aligned(*titles) if all(map(_are_in_order, places)) else ()
    origin = {places[1][other]: places[0][one] for one, other in moved}
    pairs = [
        (path, path)
        for path in before
        if path in after and _ops(before[path]) & _ops(after[path]) and origin.get(path, path) == path
    ]
    size = -1
    while size != len(pairs):
        size = len(pairs)
        for old, new in list(_gaps(*places, pairs)):
            aligned = _aligned([outlines[0][path] for path in old], [outlines[1][path] for path in new])
            pairs += [(old[one], new[other]) for one, other in aligned]
    return pairs


def _title(path: str) -> str:
    """A module's path without the numbers in it."""
    return re.sub(r"\d+", "#", path)


def _are_in_order(paths: Sequence[str]) -> bool:
    """Whether modules whose paths differ in numbers alone are called in the order of these."""
    last: dict[str, list[int]] = {}
    for path in paths:
        numbers = [int(number) for number in re.findall(r"\d+", path)]
        if numbers < last.get(_title(path), []):
            return False
        last[_title(path)] = numbers
    return True


def _ops(items: Sequence[Item]) -> set[str]:
    return {item.place.op for item in items}


def _aligned(old: Sequence[Hashable], new: Sequence[Hashable]) -> set[tuple[int, int]]:
    """Places of what is there as often, and in the same order, on both sides, where it is so from either end: else
    there is more than one way to align them."""
    counts = Counter(old), Counter(new)
    mine, theirs = (
        [place for place, one in enumerate(side) if counts[0][one] == counts[1][one]] for side in (old, new)
    )
    ones, others = [old[place] for place in mine], [new[place] for place in theirs]
    backwards = {(len(ones) - 1 - one, len(others) - 1 - other) for one, other in _equal(ones[::-1], others[::-1])}
    return {(mine[one], theirs[other]) for one, other in backwards & set(_equal(ones, others))}


def _equal(old: Sequence[Hashable], new: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    for one, other, size in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        yield from zip(range(one, one + size), range(other, other + size), strict=True)


def _outline(items: Sequence[Item]) -> tuple[tuple[str, str], ...]:
    return tuple((item.place.op, item.place.shape) for item in items)


def _match_module(old: Sequence[Item], new: Sequence[Item]) -> tuple[list[tuple[Item, Item]], dict[Item, int]]:
    pairs: list[tuple[Item, Item]] = []
    unclear: dict[Item, int] = {}
    spent: set[Item] = set()
    for key in _ANYWHERE:
        left, right = _groups(old, spent, key), _groups(new, spent, key)
        for token in [token for token in left if token in right]:
            ones, others = left[token], right[token]
            is_same = len({one.decided for one in ones}) == 1  # then it does not matter which of them are gone
            if len(ones) == len(others) or (len(ones) > len(others) and is_same):
                pairs += zip(ones, others, strict=False)
                spent.update(ones[: len(others)], others[: len(ones)])
            else:
                unclear.update(dict.fromkeys(ones, len(others)))
                spent.update(ones, others)
    for ones, others in list(_gaps(old, new, pairs)):
        pairs += _match_gap([one for one in ones if one not in spent], [one for one in others if one not in spent])
    return pairs, unclear


def _groups(items: Sequence[Item], spent: set[Item], key: _Key) -> dict[Hashable, list[Item]]:
    found: dict[Hashable, list[Item]] = {}
    for item in items:
        if item not in spent:
            found.setdefault(key(item), []).append(item)
    return found


def _match_gap(old: Sequence[Item], new: Sequence[Item]) -> list[tuple[Item, Item]]:
    """Nodes between the same neighbours: all where their ops are the same, else by what they read."""
    if [item.place.op for item in old] == [item.place.op for item in new]:
        return list(zip(old, new, strict=True))
    pairs: list[tuple[Item, Item]] = []
    spent: set[Item] = set()
    for key in _BETWEEN:
        left, right = _groups(old, spent, key), _groups(new, spent, key)
        for token in [token for token in left if token in right]:
            if len(left[token]) == len(right[token]) == 1:
                pairs.append((left[token][0], right[token][0]))
                spent.update(pairs[-1])
    return pairs


_T = TypeVar("_T", bound=Hashable)


def _gaps(old: Sequence[_T], new: Sequence[_T], pairs: Sequence[tuple[_T, _T]]) -> Iterator[tuple[list[_T], list[_T]]]:
    """What stands unpaired between the same neighbours, on both sides; pairs that changed places are no neighbours."""
    place_old = {item: number for number, item in enumerate(old)}
    place_new = {item: number for number, item in enumerate(new)}
    taken_old, taken_new = {one for one, _ in pairs}, {other for _, other in pairs}
    fixed = _rising(sorted((place_old[one], place_new[other]) for one, other in pairs))
    start = (-1, -1)
    for stop in (*fixed, (len(old), len(new))):
        ones = [item for item in old[start[0] + 1 : stop[0]] if item not in taken_old]
        others = [item for item in new[start[1] + 1 : stop[1]] if item not in taken_new]
        if ones and others:
            yield ones, others
        start = stop


def _rising(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest part, in order, whose second numbers rise too."""
    ends: list[int] = []  # ends[n]: smallest second number that a rising part of n + 1 points ends with
    last: list[int] = []
    before: list[int] = []
    for number, (_, height) in enumerate(points):
        length = bisect.bisect_left(ends, height)
        before.append(last[length - 1] if length else -1)
        ends[length : length + 1] = [height]
        last[length : length + 1] = [number]
    chain, number = [], last[-1] if last else -1
    while number >= 0:
        chain.append(points[number])
        number = before[number]
    return chain[::-1]
