"""A report as text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tabulate import tabulate

from fxamp.review.advice import region_advice
from fxamp.review.rows import Row
from fxamp.words import bytes_in_words, plural, size_in_words

if TYPE_CHECKING:
    from fxamp.review.report import Report

_REGIONS = 5
"""Float32 regions shown."""


def report_table(built: "Report") -> str:
    """Totals, regions, advice, and a line for every node; parameter reads are left out."""
    return "\n".join([*overview(built), *(("", node_table(built)) if built.rows else ())])


def overview(built: "Report") -> Iterator[str]:
    """The totals and what to do about them, a line each."""
    yield built.summary()
    if built.left:
        return
    if built.is_preview:
        yield built.preview_text
    cost = [
        plural(built.casts_to_low, "cast") + f" to {built.low_dtype}",
        f"{built.casts_to_high} to float32",
    ]
    most = "" if built.cast_bytes_are_exact else "at most "
    moved = f", {most}{bytes_in_words(built.cast_bytes)} moved" if built.cast_bytes is not None else ""
    weights = f" ({bytes_in_words(built.weight_cast_bytes)})" if built.weight_cast_bytes is not None else ""
    yield f"casts: {' and '.join(cost)}{moved}; {plural(built.weight_casts, 'weight cast')}{weights}"
    if built.user_casts:
        moved = f", {bytes_in_words(built.user_cast_bytes)} moved" if built.user_cast_bytes is not None else ""
        yield f"the model's own code makes {plural(built.user_casts, 'conversion')} between the precisions{moved}"
    if built.coverage is not None:
        gemms = plural(sum(gemm.runs for gemm in built.gemms), "GEMM")
        yield f"GEMM work in {built.low_dtype}: {built.coverage:.1%} of {gemms}"
    for count, method in sorted({(built.captures.count(m), m) for m in built.captures}):
        yield f"captured: {plural(count, 'graph')} ({method})"
    if sum(built.runs) > len(built.runs):
        yield f"equal blocks share graphs: {len(built.runs)} run {sum(built.runs)} times, and totals count each time"
    shown = built.regions[:_REGIONS]
    for region in shown:
        yield (
            f"float32 region: {size_in_words(region.nbytes)} in {plural(len(region.nodes), 'node')}, "
            f"because of {region.cause}: {region.reason}"
        )
    yield from (f"environment: {variable}" for variable in built.environment)
    yield from (f"outside: {text}" for text in built.outside)
    told = {region_advice(region) for region in shown}
    yield from (f"advice: {text}" for text in built.advice if text not in told)


def node_table(built: "Report") -> str:
    """A line for every node but reads of float32 parameters."""
    shown = [row for row in built.rows if not (row.op in ("parameter", "buffer") and row.reason_kind == "parameter")]
    many = len(built.captures) > 1
    lines = [_line(row, many) for row in shown]
    headers = (
        *(("graph",) if many else ()),
        "node",
        "op",
        "colour",
        "runs in",
        "shape",
        "line",
        "module",
        "reason",
    )
    left_out = len(built.rows) - len(shown)
    note = f"\n({plural(left_out, 'read')} of float32 parameters and buffers not shown)" if left_out else ""
    return tabulate(lines, headers=headers, disable_numparse=True) + note


def _line(row: Row, many: bool) -> tuple[object, ...]:
    shape = "" if row.shape is None else "x".join(map(str, row.shape)) or "scalar"
    colour = f"({row.role})" if row.role else row.colour
    cells = (
        row.name,
        row.op,
        colour,
        row.runs_in if row.precision != "none" else "-",
        shape,
        row.line,
        row.module,
    )
    return (*((row.graph,) if many else ()), *cells, row.reason)
