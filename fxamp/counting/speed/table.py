"""The speed suite's rows as a markdown table."""

import statistics
from collections.abc import Callable, Iterable

from fxamp.counting import results
from fxamp.counting.speed.judge import Row, gaps_to_half, goals, limit_of, means, speedup
from fxamp.counting.speed.modes import MODES
from fxamp.counting.speed.workloads import FAMILIES, SIZES


def _number(key: str, digits: int = 2) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:.{digits}f}" if row.get(key) is not None else "-"


def _share(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key] / row['busy_ms']:.0%}" if row.get("busy_ms") else "-"


def _ratio(row: Row) -> str:
    ratio = speedup(row)
    return "-" if ratio is None else f"{ratio:.3f}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "model": lambda row: row["model"],
    "batch": lambda row: str(row.get("batch", row["size"])),
    "mode": lambda row: row["mode"],
    "ms": _number("ms"),
    "x autocast": _ratio,
    "host ms": _number("host_ms"),
    "a second": lambda row: f"{row['throughput']:,.0f} {row['unit']}" if row.get("throughput") else "-",
    "peak GB": lambda row: f"{row['peak_gb']:.2f}" if row.get("peak_gb") else "-",
    "kernels": lambda row: str(row.get("launches", "-")),
    "casts": _share("copy_ms"),
    "GEMM": _share("gemm_ms"),
    "counted GB": _number("counted_gb", 1),
    "limited by": lambda row: limit_of(row) if row["status"] == "ok" else row["status"],
    "note": lambda row: row.get("note", ""),
}
LEGEND = """\
ms: a whole step (forward, loss, backward, scaler, AdamW), median of bursts, modes in turns, by CUDA events. x autocast:
autocast's time in the same turns, divided by this. host ms: until the host had issued it, in the first two steps after
the device was idle. peak GB: of this mode alone (parameters, gradients, optimizer, activations). casts, GEMM: share of
the device's time in kernels that copy and in GEMMs, convolutions, attention and RNNs, by name. counted GB: read and
written by the ops of forward, loss, backward."""
LEFT_BEHIND = 1.05
"""Launches that take so much longer (median) than before the first profile show that the profiler left a cost."""


def markdown(rows: Iterable[Row], is_dry: bool = False) -> str:
    """Rows in the order of the suite, goals (of a dry run none), and what is left to pure half."""
    rows = sorted(rows, key=_place)
    cells = [[cell(row) for cell in COLUMNS.values()] for row in rows]
    parts = [results.as_table(cells, list(COLUMNS)), LEGEND]
    if is_dry:
        return "\n\n".join(parts)
    if cost := profiler_cost(rows):
        parts.append(cost)
    verdicts = [(goal.text, goal.found, goal.verdict) for goal in goals(rows)]
    parts.append(results.as_table(verdicts, ("goal", "found", "")))
    parts.append(means_table(rows))
    gaps = [f"{ratio:.3f} ({name})" for ratio, name in gaps_to_half(rows)[:3]]
    if gaps:
        parts.append(f"Biggest gaps between fxamp's fastest step without a compiler and pure half: {', '.join(gaps)}.")
    return "\n\n".join(parts)


def means_table(rows: Iterable[Row]) -> str:
    """Geometric means over the models, of each mode at each size."""
    rows = list(rows)
    cells = [(mode, *(f"{at[size]:.3f}" if size in at else "-" for size in SIZES)) for mode, at in means(rows)]
    return results.as_table(cells, ("times as fast as autocast", *(f"{size} batch" for size in SIZES)))


def profiler_cost(rows: Iterable[Row]) -> str:
    """Whether launches became slower by the profiles that come before the times: the median says it.

    Single ones tell of the host: one that others use too is slower now, and then faster.
    """
    found = [(row["launch_us"], row["unprofiled_launch_us"]) for row in rows if row.get("launch_us")]
    if not found:
        return ""
    after, before = (list(times) for times in zip(*found, strict=True))
    ratio = statistics.median(one / other for one, other in found)
    left = "nothing was left" if ratio <= LEFT_BEHIND else f"what launches limit is about {ratio - 1:.0%} too slow"
    return (
        f"The profiler's cost: a launch took {statistics.median(before):.2f} us of the host before the first profile, "
        f"{statistics.median(after):.2f} us in the median ({min(after):.2f} to {max(after):.2f}) while steps were "
        f"timed: {left}."
    )


def _place(row: Row) -> tuple[int, int, int]:
    return list(FAMILIES).index(row["model"]), SIZES.index(row["size"]), list(MODES).index(row["mode"])
