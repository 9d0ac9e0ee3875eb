"""Two plans side by side: what a change of code, lists or options did to the decisions."""

import dataclasses
from collections.abc import Iterator

from fxamp.review.match import Item, fit, match
from fxamp.review.plan import Plan
from fxamp.review.plan_parts import base_title, expanded

_STORED = "parameters"


@dataclasses.dataclass(frozen=True)
class Change:
    """One node, or stored parameter, on which two plans differ; None: not in that plan."""

    graph: str
    node: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        words = {None: "-", "low": "low", "high": "float32"}
        return f"{self.node}: {words[self.before]} -> {words[self.after]}"


def diff_plans(old: Plan, new: Plan) -> list[Change]:
    """Every node on which two plans differ, in order; a node that moved, or whose module was renamed, is the same.

    Of equal modules that share a graph each is looked at by itself. Behind the nodes comes what is stored otherwise,
    where both plans tell (at O2 and O3).
    """
    old, new = expanded(old), expanded(new)
    changes = [change for title, was in _pairs(old, new) for change in _changes(old, new, title, was)]
    stored = old.parameters, new.parameters
    names = dict.fromkeys((*stored[0], *stored[1])) if all(stored) else ()
    found = ((name, stored[0].get(name), stored[1].get(name)) for name in names)
    return [*changes, *(Change(_STORED, *each) for each in found if each[1] != each[2])]


def _changes(old: Plan, new: Plan, title: str | None, was: str | None) -> Iterator[Change]:
    before, after = old.graphs.get(was or "", {}), new.graphs.get(title or "", {})
    same = _matched(old, was, new, title)
    gone, shown = before.keys() - same.values(), title or was or ""
    for key in before:
        if key in gone:
            yield Change(shown, key, before[key], None)
    for key, decided in after.items():
        earlier = before.get(same.get(key, ""))
        if earlier != decided:
            yield Change(shown, key, earlier, decided)


def _matched(old: Plan, was: str | None, new: Plan, title: str | None) -> dict[str, str]:
    """Key in a graph of the new plan -> in one of the old."""
    return {} if was is None or title is None else match(old.items(was), _new_items(new, title))[0]


def _new_items(new: Plan, title: str) -> list[Item]:
    return [item._replace(side="new") for item in new.items(title)]


def _pairs(old: Plan, new: Plan) -> list[tuple[str | None, str | None]]:
    """(title in the new plan, in the old one), None where it has none: the only graphs, or those of one title.

    Of several with one title, whose numbers tell when they were captured, those are paired that fit best.
    """
    if len(old.graphs) == len(new.graphs) == 1:
        return [(next(iter(new.graphs)), next(iter(old.graphs)))]
    ours: dict[str, str] = {}
    fits = sorted(_fits(old, new), key=lambda trial: trial[0], reverse=True)  # in order where they fit as well
    for _, title, was in fits:
        if title not in ours and was not in ours.values():
            ours[title] = was
    alone = [(None, was) for was in old.graphs if was not in ours.values()]
    return [*((title, ours.get(title)) for title in new.graphs), *alone]


def _fits(old: Plan, new: Plan) -> Iterator[tuple[tuple[float, ...], str, str]]:
    """How well each graph of the new plan fits each of the old one with its title, and agrees with it."""
    for title in new.graphs:
        items = _new_items(new, title)
        for was in old.graphs:
            if base_title(title) == base_title(was):
                found = _matched(old, was, new, title)
                equal = sum(new.graphs[title][key] == old.graphs[was][before] for key, before in found.items())
                yield (*fit(old.items(was), items, found), equal), title, was


def diff_fields(old: Plan, new: Plan) -> dict[str, tuple[str | int, str | int]]:
    """What the plans say of themselves and differ in: name -> (old, new)."""
    both = {
        field: (getattr(old, field), getattr(new, field))
        for field in ("model", "low_dtype", "opt_level", "level", "casts", "weight_casts")
    }
    return {field: (was, now) for field, (was, now) in both.items() if was != now}


def diff_text(old: Plan, new: Plan) -> str:
    """The two plans' differences for a reader; "" where there are none."""
    lines = [f"{field}: {was} -> {now}" for field, (was, now) in diff_fields(old, new).items()]
    changes = diff_plans(old, new)
    for title in dict.fromkeys(change.graph for change in changes):
        lines.append(f"{title}:" if title == _STORED else f"graph {title}:")
        lines += [f"  {change}" for change in changes if change.graph == title]
    return "\n".join(lines)
