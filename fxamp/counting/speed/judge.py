"""What a row means: what limits it, and whether the goals are met."""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from fxamp.counting.speed.modes import BASELINE, MODES
from fxamp.counting.speed.workloads import SIZES

BUSY_ENOUGH = 0.85
"""A device that computes less of the time than this waits for launches."""
GEMM_MOST = 0.5
"""Of the device's time: above it the arithmetic of GEMMs limits, below it the bytes of everything else."""

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Goal:
    """A promise about ratios, and what was found: "met", "missed", or "not measured"."""

    text: str
    found: str
    verdict: str


def limit_of(row: Row) -> str:
    """What a faster step would need less of: launches, GEMM or bytes. Unknown where the profiler saw no kernel."""
    if not row["launches"]:
        return "not profiled"
    busy = min(1.0, row["busy_ms"] / row["ms"])
    if busy < BUSY_ENOUGH:
        return f"launches (device busy {busy:.0%})"
    gemm = row["gemm_ms"] / max(row["busy_ms"], 1e-9)
    if gemm >= GEMM_MOST:
        return f"GEMM ({gemm:.0%} of device time)"
    rate = f", {row['counted_gb'] / row['ms'] * 1e3:.0f} GB/s counted" if row.get("counted_gb") else ""
    return f"bytes (GEMM {gemm:.0%}{rate})"


def speedup(row: Row) -> float | None:
    """Over autocast, measured in the same turns."""
    return row["baseline_ms"] / row["ms"] if row.get("baseline_ms") and row.get("ms") else None


def goals(rows: Iterable[Row]) -> list[Goal]:
    """The four promises of the suite, over the rows that were measured."""
    measured = [row for row in rows if row["status"] == "ok"]
    return [_eager(measured), _graphed(measured), _compiled(measured), _memory(measured)]


def _named(row: Row) -> str:
    return f"{row['model']} {row['size']}"


def _ratios(rows: Iterable[Row], mode: str, size: str = "") -> dict[str, float]:
    chosen = (row for row in rows if row["mode"] == mode and size in ("", row["size"]))
    return {_named(row): ratio for row in chosen if (ratio := speedup(row)) is not None}


def means(rows: Iterable[Row]) -> list[tuple[str, dict[str, float]]]:
    """(mode, size -> geometric mean over the models of how many times as fast as autocast) of what was measured."""
    measured = [row for row in rows if row["status"] == "ok"]
    found = []
    for mode in (mode for mode in MODES if mode != BASELINE):
        ratios = {size: _ratios(measured, mode, size) for size in SIZES}
        if any(ratios.values()):
            found.append((mode, {s: statistics.geometric_mean(r.values()) for s, r in ratios.items() if r}))
    return found


def _goal(text: str, found: Mapping[str, float], is_met: bool, shown: str) -> Goal:
    if not found:
        return Goal(text, "", "not measured")
    return Goal(text, f"{shown}, {len(found)} rows", "met" if is_met else "missed")


def _extreme(found: Mapping[str, float], pick: Any) -> str:
    if not found:
        return ""
    name = pick(found, key=found.__getitem__)
    return f"{found[name]:.3f} ({name})"


def _eager(rows: list[Row]) -> Goal:
    found = _ratios(rows, "O1")
    mean = statistics.geometric_mean(found.values()) if found else 0.0
    is_met = mean >= 1.2 and min(found.values(), default=0.0) >= 1.0
    text = "eager O1 over autocast + GradScaler: geometric mean at least 1.2, no model below 1.0"
    return _goal(text, found, is_met, f"{mean:.3f}, least {_extreme(found, min)}")


def _graphed(rows: list[Row]) -> Goal:
    found = _ratios(rows, "O1 graphed", "small")
    for name, ratio in _ratios(rows, "O2 graphed", "small").items():
        found[name] = max(ratio, found.get(name, 0.0))
    mean = statistics.geometric_mean(found.values()) if found else 0.0
    text = "GraphedStep (O1 or O2) at the small batch over autocast + GradScaler: geometric mean at least 2"
    return _goal(text, found, mean >= 2.0, f"{mean:.3f}, least {_extreme(found, min)}")


def _compiled(rows: list[Row]) -> Goal:
    theirs = {(_named(row), row["run"]): row["ms"] for row in rows if row["mode"] == "compile autocast"}
    ours = {(_named(row), row["run"]): row["ms"] for row in rows if row["mode"] == "compile fxamp"}
    found = {name: ours[name, run] / theirs[name, run] for name, run in ours if (name, run) in theirs}
    text = 'backend="fxamp" against torch.compile + autocast: time of a step at most 1.01'
    return _goal(text, found, max(found.values(), default=9.0) <= 1.01, f"most {_extreme(found, max)}")


def _memory(rows: list[Row]) -> Goal:
    theirs = {_named(row): row["peak_gb"] for row in rows if row["mode"] == BASELINE and row["peak_gb"]}
    ours = [row for row in rows if row["mode"] in ("O1", "O2") and row["peak_gb"] and _named(row) in theirs]
    found = {f"{_named(row)} {row['mode']}": row["peak_gb"] / theirs[_named(row)] for row in ours}
    text = "peak memory of O1 and O2 against autocast's: at most 1"
    return _goal(text, found, max(found.values(), default=9.0) <= 1.0, f"most {_extreme(found, max)}")


def gaps_to_half(rows: Iterable[Row]) -> list[tuple[float, str]]:
    """(time of the best eager or graphed way of fxamp / time of pure half, which), the biggest first."""
    of: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["status"] == "ok":
            of.setdefault(_named(row), {})[row["mode"]] = row
    found = []
    for name, modes in of.items():
        ours = [row for mode, row in modes.items() if mode.startswith(("O1", "O2")) and "half" in modes]
        ours = [row for row in ours if row["run"] == modes["half"]["run"]]
        if ours:
            best = min(ours, key=lambda row: row["ms"])
            found.append((best["ms"] / modes["half"]["ms"], f"{name}, {best['mode']}"))
    return sorted(found, reverse=True)
