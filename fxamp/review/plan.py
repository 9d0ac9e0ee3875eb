"""A plan: every node's precision in a file, to review in a pull request, hold in CI, and convert by.

    {
     "fxamp_plan": 1, "model": "Net", "low_dtype": "float16", ...
     "graphs": [{"title": "...", "nodes": {
      "encoder.fc:linear#0": "low",
      ...

A node's key is its module path, its op, and its number among such nodes: it survives renamed nodes and moved lines.
"""

import dataclasses
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import fx

from fxamp.errors import OptionError
from fxamp.ir import Reason
from fxamp.review.rows import Row, rows_of
from fxamp.review.words import plural
from fxamp.whole import write_whole

if TYPE_CHECKING:
    from fxamp.review.report import Report

FORMAT = 1
_NAMED = 10
"""Differences that a message names."""
_MADE = ("clone#", "copy#")
"""Ops that a pass may put in between the capture and the colouring: a plan has them, a captured graph not yet."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A saved plan.

    Attributes:
        graphs: title -> key of a node -> "low" | "high".
        casts: activation casts it had, for CI.
    """

    model: str
    low_dtype: str
    opt_level: str
    level: str
    casts: int
    weight_casts: int
    graphs: Mapping[str, Mapping[str, str]]

    def for_graph(self, graph: fx.Graph, title: str = "") -> tuple[dict[str, str], list[str]]:
        """Node name -> precision for a captured graph, and what no longer matches, in sentences.

        The plan's graph of the same title is taken, or else the one with the most nodes in common.
        """
        rows = list(rows_of(graph))
        keys = keys_of(rows)
        floats = {row.name for row in rows if "float32" in row.dtype}
        wanted = self.graphs.get(title) or max(
            self.graphs.values(), key=lambda nodes: len(nodes.keys() & keys.values()), default={}
        )
        found = {name: wanted[key] for name, key in keys.items() if key in wanted}
        present = {*keys.values()}
        lost = [key for key in wanted if key not in present and not key.partition(":")[2].startswith(_MADE)]
        gone = [f"{key} is in the plan and not in the model" for key in lost]
        added = [key for name, key in keys.items() if key not in wanted and name in floats]
        new = [f"{key} is in the model and not in the plan" for key in added]
        return found, [*gone, *new]


def as_plan(given: Any) -> Plan | None:
    """The `plan=` of convert(): a path, a Plan, or None.

    Raises:
        OptionError: anything else, or a file that is no plan.
    """
    if given is None or isinstance(given, Plan):
        return given
    if isinstance(given, (str, os.PathLike)):
        return load_plan(given)
    raise OptionError(f"plan is a {type(given).__qualname__}. Give the path of a saved plan.")


def plan_pins(plan: Plan, graph: fx.Graph, title: str) -> dict[str, tuple[Literal["low", "high"], Reason]]:
    """What a plan decides about a typed graph, with one warning on what no longer matches."""
    precisions, mismatches = plan.for_graph(graph, title)
    if mismatches:
        warnings.warn(mismatch_text(plan, mismatches), UserWarning, stacklevel=2)
    return {
        name: ("low" if precision == "low" else "high", Reason("plan", f"the plan of {plan.model} says so"))
        for name, precision in precisions.items()
    }


def plan_of(built: "Report") -> Plan:
    """The plan of a report."""
    options = built._options
    graphs: dict[str, dict[str, str]] = {}
    for number, title in enumerate(built.titles):
        rows = [row for row in built.rows if row.graph == number]
        keys = keys_of(rows)
        graphs[title] = {keys[row.name]: row.precision for row in rows if row.name in keys and row.precision != "none"}
    return Plan(
        model=built.model,
        low_dtype=built.low_dtype,
        opt_level=options.opt_level,
        level=options.level,
        casts=built.casts,
        weight_casts=built.weight_casts,
        graphs=graphs,
    )


def keys_of(rows: Sequence[Row]) -> dict[str, str]:
    """Node name -> key, for the nodes whose precision is decided: operations, not inputs, parameters or casts."""
    counts: Counter[str] = Counter()
    keys = {}
    for row in rows:
        if row.role or row.is_source or row.op == "output":
            continue
        stem = f"{row.module}:{row.op}"
        keys[row.name] = f"{stem}#{counts[stem]}"
        counts[stem] += 1
    return keys


# --------------------------------------------------------------------------------------------------------- files


def save_plan(built: "Report", path: str | Path) -> Path:
    """Write a report's plan, complete or not at all.

    Raises:
        OptionError: it cannot be written.
    """
    return write_whole(Path(path), plan_text(plan_of(built)), "the plan")


def plan_text(plan: Plan) -> str:
    """JSON with a line for each node, so that a diff of two files reads well."""
    text = json.dumps({"fxamp_plan": FORMAT, **dataclasses.asdict(plan)}, indent=1)
    return text + "\n"


def load_plan(path: "str | os.PathLike[str]") -> Plan:
    """Read a plan.

    Raises:
        OptionError: it is not there, or not a plan.
    """
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"the plan {str(path)!r} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise OptionError(f"{str(path)!r} is not a plan: it is not JSON ({error}).") from error
    return _checked(read, path)


def _checked(read: Any, path: "str | os.PathLike[str]") -> Plan:
    if not isinstance(read, dict) or "fxamp_plan" not in read:
        raise OptionError(f"{str(path)!r} is not a plan. Write one with fxamp.report(model).save_plan(path).")
    if read["fxamp_plan"] != FORMAT:
        raise OptionError(f"{str(path)!r} is a plan of format {read['fxamp_plan']}; this fxamp reads {FORMAT}.")
    fields = {field.name for field in dataclasses.fields(Plan)}
    missing = sorted(fields - read.keys())
    if missing:
        raise OptionError(f"the plan {str(path)!r} lacks {', '.join(missing)}.")
    for title, nodes in read["graphs"].items():
        wrong = next((key for key, value in nodes.items() if value not in ("low", "high")), None)
        if wrong is not None:
            raise OptionError(f"the plan {str(path)!r}: {title}: {wrong} is {nodes[wrong]!r}. Allowed: low, high.")
    return Plan(**{name: read[name] for name in fields})


def mismatch_text(plan: Plan, found: Sequence[str]) -> str:
    """One sentence on what a plan does not say, or says of what is gone."""
    more = f" ... and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return (
        f"the plan of {plan.model} does not fit this model in {plural(len(found), 'place')}: "
        + "; ".join(found[:_NAMED])
        + f"{more}. Nodes that are not in it are decided as without a plan; save it again when that is right."
    )


# ---------------------------------------------------------------------------------------------------------- diff


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
    """Every node on which two plans differ, in order."""
    changes = []
    for title, before, after in _pairs(old, new):
        for key in dict.fromkeys([*before, *after]):
            if before.get(key) != after.get(key):
                changes.append(Change(title, key, before.get(key), after.get(key)))
    return changes


def _pairs(old: Plan, new: Plan) -> Iterable[tuple[str, Mapping[str, str], Mapping[str, str]]]:
    """Graphs of the same title, or each plan's only graph, side by side."""
    if len(old.graphs) == len(new.graphs) == 1:
        (title,) = new.graphs
        return [(title, next(iter(old.graphs.values())), new.graphs[title])]
    return [(title, old.graphs.get(title, {}), new.graphs.get(title, {})) for title in {**old.graphs, **new.graphs}]


def diff_text(old: Plan, new: Plan) -> str:
    """The two plans' differences for a reader; "" where there are none."""
    lines = [
        f"{field}: {getattr(old, field)} -> {getattr(new, field)}"
        for field in ("model", "low_dtype", "opt_level", "level", "casts", "weight_casts")
        if getattr(old, field) != getattr(new, field)
    ]
    changes = diff_plans(old, new)
    for title in dict.fromkeys(change.graph for change in changes):
        lines.append(f"graph {title}:")
        lines += [f"  {change}" for change in changes if change.graph == title]
    return "\n".join(lines)
