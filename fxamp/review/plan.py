"""A plan: every node's precision in a file, to review in a pull request, hold in CI, and convert by.

    {
     "fxamp_plan": 2, "model": "Net", "low_dtype": "float16", ...
     "graphs": {"symbolic, forward(float32 tensor of 2 dimensions)": {
      "encoder.fc:linear#0": "low | y = self.fc(x) | layer_norm@norm, parameter, parameter | 8x64",
      ...

A node's key is its module path, its op, and its number among such nodes. Behind its precision stand its line, what it
reads and its shape: by them it is found again where nodes were put in before it, moved or renamed; see `match`.

Where parts of the model have graphs of their own, "blocks" has the paths of the equal ones that each is for; see
`plan_parts`. At O2 and O3 "parameters" has what is stored low.
"""

import dataclasses
import functools
import logging
import os
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx, nn

from fxamp.dtypes import dtype_name
from fxamp.errors import OptionError, warn
from fxamp.ir import Reason
from fxamp.lists import OpLists
from fxamp.override_keys import is_within
from fxamp.review.match import Item, Place, fit, is_widening, match, place_of, place_of_key
from fxamp.review.plan_file import line_of, read_plan, text_of
from fxamp.review.plan_parts import as_whole, base_title, expanded, key_at, module_of, plan_within, unique
from fxamp.review.rows import Row, rows_of
from fxamp.runtime.masters import is_stored_low
from fxamp.whole import checked_path, write_whole
from fxamp.words import listed, plural

if TYPE_CHECKING:
    from fxamp.review.report import Report

log = logging.getLogger("fxamp")

_NAMED = 10
"""Differences that a message names."""
_MADE = ("clone", "copy")
"""Ops that a pass may put in between the capture and the colouring: a plan has them, a captured graph not yet."""
_NOT_BY_PLAN = {"opt_level": "parameters (at O3 about everything)", "level": "nodes that are not in the plan"}
"""What an option of the conversion decides although it has a plan."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A saved plan.

    Attributes:
        graphs: title -> key of a node -> "low" | "high".
        casts: activation casts it had, for CI.
        places: title -> key of a node -> where it stands; empty in plans of format 1.
        blocks: title -> paths of the equal modules that the graph is for, in the first of which its nodes stand; none
            for one of the model as a whole.
        path: of the part of the model that it is for, "" for the model.
        parameters: at O2 and O3, path of each float parameter and buffer -> "low" | "high", as it is stored.
    """

    model: str
    low_dtype: str
    opt_level: str
    level: str
    casts: int
    weight_casts: int
    graphs: Mapping[str, Mapping[str, str]]
    places: Mapping[str, Mapping[str, Place]] = dataclasses.field(default_factory=dict)
    blocks: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    path: str = ""
    parameters: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def content(self) -> Hashable:
        """Equal for plans that decide alike."""
        return tuple((title, tuple(nodes.items())) for title, nodes in self.graphs.items())

    def within(self, path: str) -> "Plan":
        """What it says of one part of the model, as a plan of that part by itself."""
        return plan_within(self, path)

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of the modules in which nodes stand."""
        graphs = expanded(self).graphs.values()
        return tuple(path for path in dict.fromkeys(module_of(key) for nodes in graphs for key in nodes) if path)

    def keys_in(self, modules: Collection[str]) -> list[str]:
        """The keys of the nodes that stand in the forwards of these modules themselves."""
        keys = (key for nodes in self.graphs.values() for key in nodes)
        return [key for key in dict.fromkeys(keys) if module_of(key) in modules]

    def is_apart(self, module: str, op: str, parts: Collection[str]) -> bool:
        """Whether it decides about the parts of an op that a module writes out, and has no such op there."""
        ops = self._ops.get(module, set())
        return op not in ops and ops.issuperset(parts)

    @functools.cached_property
    def _ops(self) -> dict[str, set[str]]:
        """Module -> the ops in its own forward."""
        found: dict[str, set[str]] = {}
        for key in (key for nodes in self.graphs.values() for key in nodes):
            found.setdefault(module_of(key), set()).add(place_of_key(key).op)
        return found

    def for_graph(self, graph: fx.Graph, title: str = "", is_preview: bool = False) -> tuple[dict[str, str], list[str]]:
        """Node name -> precision for a captured graph, and what no longer matches, in sentences.

        1. The plan's graph of the same title is taken, or else the one with the most nodes in common. Where several of
           that title have the same nodes, and decide otherwise about some (weights, or numbers, did not fit one of
           them), these are left to the rules, which know such conditions.
        2. On a line that was edited, `u * v` to `u * u`, what the plan runs low is left to the rules, which know what
           overflows; but for GEMMs.
        3. A preview's types are assumed, and the ops inside of a module may be others: there whole modules count.
        """
        parts = {node.name: str(node.target) for node in graph.nodes if node.meta.get("boundary")}
        if self.blocks and not parts:
            return as_whole(self).for_graph(graph, title, is_preview)
        rows = list(rows_of(graph))
        keys = keys_of(rows)
        by_name = {row.name: row for row in rows}
        items = [Item("new", name, place_of(by_name[name], by_name)) for name in keys]
        found, unclear, chosen = self._nearest_graph(items, title)
        wanted = self.graphs.get(chosen, {})
        open_ones = self._open_in(chosen)
        places = {item.name: item.place for item in items}
        edited = [key for name, key in found.items() if self._is_edited(chosen, key, places[name])]
        sure = {name: wanted[key] for name, key in found.items() if key not in {*open_ones, *edited}}
        floats = {row.name for row in rows if "float32" in row.dtype and not is_widening(row)} - parts.keys()
        here = [key for key in wanted if not any(is_within(module_of(key), path) for path in parts.values())]
        if is_preview:
            both = {module_of(key) for key in here} & {module_of(key) for key in keys.values()}
            here = [key for key in here if module_of(key) not in both]
            floats = {name for name in floats & keys.keys() if module_of(keys[name]) not in both}
        new = [key for name, key in keys.items() if name in floats - found.keys()]
        lost = [key for key in here if key not in found.values()]
        added = [f"{self._named(key)} is in the model and not in the plan" for key in new if key not in lost]
        told = [f"{self._named(key)}, low in the plan, stands on a line that was edited" for key in edited]
        return sure, [*self._lost(lost, unclear, new), *told, *added]

    def _is_edited(self, title: str, key: str, now: Place) -> bool:
        """Whether a node that the plan runs low, and not for its op alone, stands on another line; unknown lines are
        the same."""
        was = self.places.get(title, {}).get(key)
        if was is None or self.graphs[title][key] != "low" or OpLists.default().colour(now.op) == "allow":
            return False
        return was.text != now.text and bool(was.text and now.text)

    def _nearest_graph(self, new: list[Item], title: str) -> tuple[dict[str, str], dict[str, int], str]:
        """The match with the graph of that title, or of several such, or of none, the one that fits best."""
        titles = [known for known in self.graphs if base_title(known) == title] or list(self.graphs)
        tried = [(*match(self.items(known), new), known) for known in titles]
        return max(tried, key=lambda trial: fit(self.items(trial[2]), new, trial[0]), default=({}, {}, ""))

    def _open_in(self, title: str) -> set[str]:
        """The nodes about which graphs of one title, which have the same nodes, decide otherwise."""
        wanted = self.graphs.get(title, {})
        same = [nodes for known, nodes in self.graphs.items() if base_title(known) == base_title(title)]
        others = [nodes for nodes in same if nodes.keys() == wanted.keys()]
        found = {key for key in wanted if any(nodes[key] != wanted[key] for nodes in others)}
        if found:
            named = listed([self._named(key) for key in wanted if key in found], _NAMED)
            log.info("%s: of the plan's graphs of one title each decides otherwise, so that the rules do", named)
        return found

    def items(self, title: str) -> list[Item]:
        """The nodes of one graph."""
        places = self.places.get(title, {})
        nodes = self.graphs[title].items()
        return [Item("old", key, places.get(key) or place_of_key(key), decided) for key, decided in nodes]

    def _lost(self, lost: Iterable[str], unclear: Mapping[str, int], new: Collection[str]) -> Iterator[str]:
        for key in lost:
            if key in unclear:
                yield f"{self._named(key)} of the plan may be any of {plural(unclear[key], 'node')} of the model"
            elif key in new:
                yield f"{self._named(key)} reads other values in the model than in the plan"
            elif place_of_key(key).op not in _MADE:
                yield f"{self._named(key)} is in the plan and not in the model"

    def _named(self, key: str) -> str:
        """A key as the whole model has it."""
        return key_at(self.path, key)


def as_plan(given: Any, dtype: torch.dtype, opt_level: str, level: str) -> Plan | None:
    """The `plan=` of convert(): a path, a Plan, or None.

    A plan is of one low dtype: it fixes nodes that the rules would protect, and what bfloat16 holds may be inf in
    float16. One of another opt_level or level is taken, with one warning.

    Args:
        dtype, opt_level, level: of this conversion.

    Raises:
        OptionError: anything else, a file that is no plan, or a plan of another low dtype.
    """
    if given is None:
        return None
    if isinstance(given, (str, os.PathLike)):
        given = load_plan(given)
    if not isinstance(given, Plan):
        raise OptionError(f"plan is a {type(given).__qualname__}. Give the path of a saved plan.")
    low = dtype_name(dtype)
    if given.low_dtype != low:
        raise OptionError(
            f"the plan of {given.model} was saved in {given.low_dtype}, and this conversion is in {low}, where other "
            f"numbers overflow or vanish. Convert with dtype={given.low_dtype!r}, or save a plan in {low}."
        )
    _compare_options(given, {"opt_level": opt_level, "level": level})
    return given


def _compare_options(plan: Plan, given: Mapping[str, str]) -> None:
    """Warn where a conversion has other options than the plan was saved at."""
    differing = [name for name, value in given.items() if getattr(plan, name) != value]
    if differing:
        was = ", ".join(f"{name}={getattr(plan, name)!r}" for name in differing)
        now = ", ".join(f"{name}={given[name]!r}" for name in differing)
        decided = " and ".join(_NOT_BY_PLAN[name] for name in differing)
        text = (
            f"the plan of {plan.model} was saved at {was}, this conversion is at {now}, which decides about {decided}"
        )
        warn(f"{text}. Give {was}, or save a plan at {now}.")


def plan_pins(
    plan: Plan, graph: fx.Graph, title: str, is_preview: bool = False
) -> tuple[dict[str, tuple[Literal["low", "high"], Reason]], list[str]]:
    """What a plan decides about a typed graph, and what no longer matches, in one sentence if anything."""
    precisions, mismatches = plan.for_graph(graph, title, is_preview)
    reason = Reason("plan", f"the plan of {plan.model} says so")
    pins: dict[str, tuple[Literal["low", "high"], Reason]] = {
        name: ("low" if precision == "low" else "high", reason) for name, precision in precisions.items()
    }
    return pins, [mismatch_text(plan, mismatches)] if mismatches else []


def plan_of(built: "Report") -> Plan:
    """The plan of a report."""
    options = built._options
    graphs: dict[str, dict[str, str]] = {}
    places: dict[str, dict[str, Place]] = {}
    titles = list(unique(built.titles))
    for number, title in enumerate(titles):
        rows = {row.name: row for row in built.rows if row.graph == number}
        keys = {name: key for name, key in keys_of([*rows.values()]).items() if rows[name].precision != "none"}
        graphs[title] = {key: rows[name].precision for name, key in keys.items()}
        places[title] = {key: place_of(rows[name], rows) for name, key in keys.items()}
    return Plan(
        model=built.model,
        low_dtype=built.low_dtype,
        opt_level=options.opt_level,
        level=options.level,
        casts=built.casts,
        weight_casts=built.weight_casts,
        graphs=graphs,
        places=places,
        blocks={title: paths for title, paths in zip(titles, built.blocks, strict=True) if paths},
        parameters=_stored(built._model) if options.opt_level in ("O2", "O3") and built._model is not None else {},
    )


def _stored(model: nn.Module) -> dict[str, str]:
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    return {name: "low" if is_stored_low(tensor) else "high" for name, tensor in floats.items()}


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
    """Write a report's plan, complete or not at all; nothing, with a warning, for a model left as it is.

    It holds the low dtype, which a conversion by it must have, and opt_level and level, on which that one is warned.

    Raises:
        OptionError: it cannot be written, or there is no graph.
    """
    found = checked_path(path, "the plan cannot be written")
    if built.left:
        log.warning("%s: there is no plan to save, %s is not written", built.left, path)
        return found
    if not built.captures:
        raise OptionError(f"no graph of {built.model} is there yet, so there is no plan to save. Call the model first.")
    return write_whole(found, plan_text(plan_of(built)), "the plan")


def plan_text(plan: Plan) -> str:
    """JSON with a line for each node, so that a diff of two files reads well."""
    graphs = {
        title: {key: line_of(decided, plan.places.get(title, {}).get(key)) for key, decided in nodes.items()}
        for title, nodes in plan.graphs.items()
    }
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    left = ("graphs", "places", "path", *(name for name in ("blocks", "parameters") if not fields[name]))
    return text_of({name: value for name, value in fields.items() if name not in left}, graphs)


def load_plan(path: "str | os.PathLike[str]") -> Plan:
    """Read a plan.

    Raises:
        OptionError: it is not there, or not a plan.
    """
    return Plan(**read_plan(path))


def mismatch_text(plan: Plan, found: Sequence[str]) -> str:
    """One sentence on what a plan does not say, or says of what is gone."""
    return (
        f"the plan of {plan.model} does not fit this model in {plural(len(found), 'place')}: "
        + listed(found, _NAMED, "; ")
        + ". Nodes that are not in it are decided as without a plan; save it again when that is right."
    )
