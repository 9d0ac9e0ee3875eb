"""What was decided and what it costs, as one object."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fxamp.dtypes import device_of, dtype_name
from fxamp.lists import EnvironmentChange
from fxamp.model.engine import Engine, engine_of
from fxamp.model.unconverted import not_converted, why_left
from fxamp.model.variant import Variant
from fxamp.review.advice import advice_of, low_already, outside_of, unread_parameters
from fxamp.review.code import graph_title
from fxamp.review.counted import casts_inside, count, is_cast, is_node, is_weight_cast, user_casts
from fxamp.review.gemms import ALIGNMENT, Gemm, gemms_of
from fxamp.review.regions import Region, regions_of
from fxamp.review.rows import Row, rows_of
from fxamp.review.runs import runs_of
from fxamp.review.sharing import sharing
from fxamp.review.table import report_table
from fxamp.review.uncaptured import is_nothing_captured, uncaptured

if TYPE_CHECKING:
    from fxamp.review.what_if import Suggestion


@dataclasses.dataclass(frozen=True)
class Variable:
    """An active environment variable.

    Attributes:
        effect: what it did to the lists, in words.
        nodes: how many nodes of the model it touched.
    """

    name: str
    value: str
    effect: str
    nodes: int

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.effect} ({self.nodes} nodes of this model)"


@dataclasses.dataclass(frozen=True)
class Padding:
    """One GEMM dimension that was padded."""

    node: str
    dim: int
    logical: int
    padded: int


@dataclasses.dataclass(frozen=True)
class Report:
    """The decisions over all graphs of a converted model.

    `str(report)` is a table, `to_json()` the same for programs. What counts as a node, a cast and a weight
    cast is defined in fxamp/review/counted.py; the model runs the casts counted.

    Totals are of one forward of each of the model's graphs. Equal blocks that are converted by themselves share a
    graph: it has its rows once, and counts in every total as often as it runs.

    Attributes:
        model: class name.
        low_dtype: "float16" | "bfloat16".
        total_nodes, low_precision_nodes: of the captured graphs, before any cast is inserted.
        casts_to_low, casts_to_high: activation casts.
        weight_casts: parameters and buffers cast; of a frozen model, in the first forward.
        user_casts: conversions between the precisions that the user's code makes; not counted in `casts`.
        user_cast_bytes: read and written by them, None where shapes are not known.
        casts_inside: conversions that softmax, log_softmax and rms_norm make themselves; see fxamp/review/counted.py.
        cast_bytes, weight_cast_bytes: read and written by them, None where shapes are not known.
        rows: one per node of the rewritten graphs.
        regions: connected float32 parts, largest first.
        gemms: matrix products whose sizes are known.
        padded: GEMM dimensions that were padded.
        captures: how each graph was captured; `titles`: what calls it is for; `runs`: how often a forward runs it;
            `blocks`: paths of the equal modules that it is for, none where it is for the model as a whole.
        outside: what runs as the user wrote it, and why.
        environment: active variables and their effect.
        advice: what would make the model faster, in sentences.
        is_preview: made from assumed types, before the first call.
        left: why convert() was asked to leave the model as it is ("FXAMP_DISABLE=1"), "" for a converted one.
    """

    model: str
    low_dtype: str
    total_nodes: int
    low_precision_nodes: int
    casts_to_low: int
    casts_to_high: int
    weight_casts: int
    user_casts: int
    casts_inside: int
    cast_bytes: int | None
    weight_cast_bytes: int | None
    user_cast_bytes: int | None
    rows: tuple[Row, ...]
    regions: tuple[Region, ...]
    gemms: tuple[Gemm, ...]
    padded: tuple[Padding, ...]
    captures: tuple[str, ...]
    titles: tuple[str, ...]
    runs: tuple[int, ...]
    blocks: tuple[tuple[str, ...], ...]
    outside: tuple[str, ...]
    environment: tuple[Variable, ...]
    advice: tuple[str, ...]
    is_preview: bool
    left: str = ""
    _options: Any = dataclasses.field(default=None, repr=False, compare=False)
    _model: nn.Module | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def casts(self) -> int:
        """Activation casts in the graphs, both directions."""
        return self.casts_to_low + self.casts_to_high

    @property
    def coverage(self) -> float | None:
        """Share of the GEMMs' operations that run low, 0 to 1; None where there is no GEMM of known size."""
        total = sum(gemm.work for gemm in self.gemms)
        return sum(gemm.work for gemm in self.gemms if gemm.precision == "low") / total if total else None

    @property
    def launches(self) -> int:
        """Kernels of the casts that the pass put in; a bucket of weights is one."""
        return sum(row.runs * row.launches for row in self.rows)

    @property
    def cast_bytes_are_exact(self) -> bool:
        """Whether no cast is of a size that depends on data: behind a packed sequence `cast_bytes` is the most."""
        return not any(row.is_estimate for row in self.rows if is_cast(row))

    @property
    def preview_text(self) -> str:
        """What to know about a preview; "" where the graphs are those that run."""
        if not self.is_preview:
            return ""
        if "dynamo" in self.captures:
            return "preview: Dynamo's graphs of fake tensors, which take no branch that depends on data"
        return "preview: types are assumed until the model is called or example_inputs are given"

    def summary(self) -> str:
        """One line: low nodes of all nodes, casts to low, parameters cast.

        Converted 405/4897 nodes to float16 precision using 2 cast(s) to float16 (excluding 55 weight casts)
        """
        if self.left:
            return f"Not converted: {self.left}, so {self.model} runs as it is written"
        nodes, casts = f"{self.low_precision_nodes}/{self.total_nodes} nodes", f"{self.casts_to_low} cast(s)"
        return (
            f"Converted {nodes} to {self.low_dtype} precision using {casts} to {self.low_dtype} "
            f"(excluding {self.weight_casts} weight casts)"
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, totals first."""
        fields = {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if not field.name.startswith("_") and field.name != "rows"
        }
        names = ("casts", "launches", "cast_bytes_are_exact", "coverage")
        computed = {"summary": self.summary(), **{name: getattr(self, name) for name in names}}
        return {**computed, **fields, "rows": _plain(self.rows)}

    def to_json(self) -> str:
        """`as_dict()` as JSON text."""
        return json.dumps(self.as_dict(), indent=2)

    def suggest(self) -> "list[Suggestion]":
        """Moves of list entries that would save most, best first; each is tried on the model."""
        from fxamp.review.what_if import suggest

        return suggest(self)

    def save_plan(self, path: str | Path) -> Path:
        """Write every node's precision, for review and for `convert(..., plan=path)`."""
        from fxamp.review.plan import save_plan

        return save_plan(self, path)

    def __str__(self) -> str:
        return report_table(self)

    def __repr__(self) -> str:
        return f"<Report of {self.model}: {self.summary()}>"  # a shell shows it; print() gives the table


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(part) for part in value] if isinstance(value, (tuple, list)) else value


def report(converted: nn.Module) -> Report:
    """The report of a converted model.

        print(fxamp.report(model))

    Before the first call of a model that was converted without example inputs it is a preview: types are
    assumed, and shapes are not known.

    Args:
        converted: a converted model. Of one that convert() was asked to leave as it is (FXAMP_DISABLE, opt_level="O0")
            the report says that and is empty.

    Returns:
        What stands in each graph now; `str()` is a table.

    Raises:
        OptionError: the model was not converted.
    """
    left = why_left(converted) if engine_of(converted) is None else None
    if left is not None:
        return _report_of_left(converted, left)
    engine = require_engine(converted)
    built = build_report(engine.graphs(), engine.options, converted, runs_of(engine, converted))
    _, outside = uncaptured(engine, converted)
    if is_nothing_captured(engine):
        return dataclasses.replace(built, outside=(outside,), advice=(), is_preview=False)
    shared = sharing(engine)
    if not outside and not shared:
        return built
    outsides = (outside, *built.outside) if outside else built.outside
    return dataclasses.replace(built, outside=outsides, advice=(*shared, *built.advice))


def _report_of_left(model: nn.Module, reason: str) -> Report:
    counts = dict.fromkeys((field.name for field in dataclasses.fields(Report) if field.type in (int, "int")), 0)
    empty = dict.fromkeys((field.name for field in dataclasses.fields(Report) if "tuple" in str(field.type)), ())
    sizes: dict[str, Any] = {"cast_bytes": 0, "weight_cast_bytes": 0, "user_cast_bytes": 0}
    name = type(model).__qualname__
    return Report(name, "float32", **counts, **empty, **sizes, is_preview=False, left=reason)  # type: ignore[arg-type]


def require_engine(converted: Any) -> Engine:
    """The engine of a converted model, or an OptionError that says how to get one."""
    engine = engine_of(converted)
    if engine is None:
        raise not_converted(converted)
    return engine.current(converted)


def build_report(
    variants: Iterable[Variant], options: Any, model: nn.Module, runs: tuple[int, ...] | None = None
) -> Report:
    """One report of several graphs.

    Args:
        runs: how often one forward runs each; None: once.
    """
    variants = list(variants)
    graphs = [variant.graph for variant in variants]
    runs = (1,) * len(graphs) if runs is None else runs
    rows = [row for number, graph in enumerate(graphs) for row in rows_of(graph, number, runs[number])]
    alignment = options.pad_to or ALIGNMENT
    gemms = [
        dataclasses.replace(gemm, runs=runs[number])
        for number, graph in enumerate(graphs)
        for gemm in gemms_of(graph, number, alignment, variants[number].captured.root)
    ]
    casts = [row for row in rows if is_cast(row)]
    weight_casts = [row for row in rows if is_weight_cast(row)]
    written = user_casts(rows)
    regions = regions_of(rows)
    outside = [*outside_of(rows), *unread_parameters(model, variants)]
    low_nodes = count(row for row in rows if row.precision == "low" and is_node(row))
    return Report(
        model=type(model).__qualname__,
        low_dtype=dtype_name(options.low),
        total_nodes=sum(times * variant.total_nodes for times, variant in zip(runs, variants, strict=True)),
        low_precision_nodes=low_nodes,
        casts_to_low=count(row for row in casts if row.precision == "low"),
        casts_to_high=count(row for row in casts if row.precision == "high"),
        weight_casts=count(weight_casts),
        user_casts=count(made for _, made in written),
        casts_inside=casts_inside(rows, device_of(model).type),
        cast_bytes=_moved(casts),
        weight_cast_bytes=_moved(weight_casts),
        user_cast_bytes=_moved_by_user(written),
        rows=tuple(rows),
        regions=tuple(regions),
        gemms=tuple(gemms),
        padded=tuple(_paddings(rows)),
        captures=tuple(variant.captured.method for variant in variants),
        titles=tuple(map(graph_title, variants)),
        runs=runs,
        blocks=tuple(variant.blocks for variant in variants),
        outside=tuple(outside),
        environment=tuple(_variables(options.lists.environment, rows)),
        advice=(low,) if (low := low_already(model)) else tuple(advice_of(rows, gemms, regions, low_nodes, options)),
        is_preview=not variants or any(variant.is_preview for variant in variants),
        _options=options,
        _model=model,
    )


def _moved(casts: Sequence[Row]) -> int | None:
    known = [cast.runs * cast.moved for cast in casts if cast.moved is not None]
    return sum(known) if len(known) == len(casts) else None


def _moved_by_user(written: Sequence[tuple[Row, Row]]) -> int | None:
    sizes = [(made.runs, read.nbytes, made.nbytes) for read, made in written]
    known = [runs * (before + after) for runs, before, after in sizes if before is not None and after is not None]
    return sum(known) if len(known) == len(sizes) else None


def _paddings(rows: Sequence[Row]) -> Iterable[Padding]:
    """The dimensions that pads made longer; a weight's pad names the weight."""
    shapes = {(row.graph, row.name): row.shape for row in rows}
    for row in rows:
        source = row.reason_node if row.role in ("pad", "weight cast") and row.op in ("pad", "to") else None
        before = shapes.get((row.graph, source or ""))
        if source is None or before is None or row.shape is None:
            continue
        for dim, (logical, padded) in enumerate(zip(before, row.shape, strict=False)):
            if padded > logical:
                yield Padding(source, dim, logical, padded)


def _variables(changes: Iterable[EnvironmentChange], rows: Sequence[Row]) -> Iterable[Variable]:
    for change in changes:
        touched = count(row for row in rows if row.op in change.ops and is_node(row))
        yield Variable(change.variable, change.value, change.effect, touched)
