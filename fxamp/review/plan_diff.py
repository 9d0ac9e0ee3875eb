"""Two plans side by side: what a change of code, lists or options did to the decisions."""

import dataclasses
from collections.abc import Iterator

from fxamp.review.match import match
from fxamp.review.plan import Plan


@dataclasses.dataclass(frozen=True)
class Change:
    """One node on which two plans differ; None: not in that plan."""

    graph: str
    node: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        words = {None: "-", "low": "low", "high": "float32"}
        return f"{self.node}: {words[self.before]} -> {words[self.after]}"


def diff_plans(old: Plan, new: Plan) -> list[Change]:
    """Every node on which two plans differ, in order; a node that moved, or whose module was renamed, is the same."""
    return [change for title, was in _pairs(old, new) for change in _changes(old, new, title, was)]


def _changes(old: Plan, new: Plan, title: str, was: str) -> Iterator[Change]:
    before, after = old.graphs.get(was, {}), new.graphs.get(title, {})
    ones = old.items(was) if was in old.graphs else []
    others = [item._replace(side="new") for item in new.items(title)] if title in new.graphs else []
    same, _ = match(ones, others)
    gone = before.keys() - same.values()
    for key in before:
        if key in gone:
            yield Change(title, key, before[key], None)
    for key, decided in after.items():
        earlier = before.get(same.get(key, ""))
        if earlier != decided:
            yield Change(title, key, earlier, decided)


def _pairs(old: Plan, new: Plan) -> list[tuple[str, str]]:
    """(title in the new plan, in the old one): the same, or each plan's only graph."""
    if len(old.graphs) == len(new.graphs) == 1:
        return [(next(iter(new.graphs)), next(iter(old.graphs)))]
    return [(title, title) for title in {**old.graphs, **new.graphs}]


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
        lines.append(f"graph {title}:")
        lines += [f"  {change}" for change in changes if change.graph == title]
    return "\n".join(lines)
