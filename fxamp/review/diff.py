"""Unified diffs of two listings whose lines have names: a changed line stands directly under its old form."""

import difflib
from collections.abc import Iterator, Sequence

CONTEXT = 3
"""Unchanged lines shown around a change, as `diff -u` has it."""

_Line = tuple[str, str]
"""(" " | "-" | "+", text)"""


def unified_diff(before: str, after: str) -> str:
    """A diff that `patch` applies to the one text, giving the other; "" where they are equal.

    Lines are matched by what stands left of their `=`: a node that changed shows as one `-` and one `+` line.
    """
    lines = list(_aligned(before.splitlines(), after.splitlines()))
    if all(sign == " " for sign, _ in lines):
        return ""
    return "".join(["--- before.txt\n+++ after.txt\n", *_hunks(lines)])


def _aligned(old: Sequence[str], new: Sequence[str]) -> Iterator[_Line]:
    matcher = difflib.SequenceMatcher(None, [*map(_name, old)], [*map(_name, new)], autojunk=False)
    for tag, start, stop, new_start, new_stop in matcher.get_opcodes():
        if tag == "equal":
            for one, other in zip(old[start:stop], new[new_start:new_stop], strict=True):
                yield from [(" ", one)] if one == other else [("-", one), ("+", other)]
        else:
            yield from (("-", line) for line in old[start:stop])
            yield from (("+", line) for line in new[new_start:new_stop])


def _name(line: str) -> str:
    return line.split(" = ", 1)[0] if " = " in line else line


def _hunks(lines: Sequence[_Line]) -> Iterator[str]:
    changed = [number for number, (sign, _) in enumerate(lines) if sign != " "]
    start = 0
    while start < len(changed):
        stop = start
        while stop + 1 < len(changed) and changed[stop + 1] - changed[stop] <= 2 * CONTEXT:
            stop += 1
        first = max(0, changed[start] - CONTEXT)
        yield _hunk(lines, first, min(len(lines), changed[stop] + CONTEXT + 1))
        start = stop + 1


def _hunk(lines: Sequence[_Line], first: int, stop: int) -> str:
    part = lines[first:stop]
    old, new = _count(part, "-"), _count(part, "+")
    old_first, new_first = _count(lines[:first], "-"), _count(lines[:first], "+")
    head = f"@@ -{_range(old_first, old)} +{_range(new_first, new)} @@\n"
    return head + "".join(f"{sign}{text}\n" for sign, text in part)


def _count(lines: Sequence[_Line], sign: str) -> int:
    return sum(found in (" ", sign) for found, _ in lines)


def _range(before: int, count: int) -> str:
    """Where a hunk starts, counted from 1, and its length; an empty one is named by the line before it."""
    return f"{before + 1 if count else before},{count}"
