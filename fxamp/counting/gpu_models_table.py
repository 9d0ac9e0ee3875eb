"""The rows of tools/gpu_models as two tables: what a step takes, and how far its results are from float32's."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxamp.counting import results
from fxamp.counting.zoo import COUNTED

TIMED = ("fp32", "autocast", "O1", "O2", "half")
COMPARED = ("autocast", "O1", "O2")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

Row = dict[str, Any]

_RATIOS = (("O1", "O2", "half", "fp32"), ("O1", "O2", "half"), ("O1", "O2", "half"), ("O1", "O2", "half"))
_MEASURES = ("ms", "kernels", "copies", "peak_gb")
TIMES_LEGEND = """\
Of forward, loss and backward in float16: autocast's milliseconds, kernels, kernels that copy, and peak GB that the step
adds; the columns beside them are ratios to it (ms: how many times as fast)."""
DISTANCES_LEGEND = """\
Distances from float32 (relative, L2, without dropout) of outputs and of gradients: autocast's, root mean square over
{seeds}, and fxamp's in ratio to it. (-: autocast's is 0, as where a head begins with zeros.)"""


def markdown(data: Row) -> str:
    """Both tables, and what failed."""
    return "\n\n".join([times(data), distances(data)])


def times(data: Row) -> str:
    """One row for each model that was timed."""
    names = [name for name in COUNTED if "failed" not in data["times"].get(name, {"failed": ""})]
    heads = ("ms", "kernels", "copies", "peak GB")
    headers = [each for head, ways in zip(heads, _RATIOS, strict=True) for each in (head, *ways)]
    table = _table(names, headers, lambda name: _times_of(data["times"][name]))
    return "\n\n".join([table, TIMES_LEGEND, *failures(data, "times")])


def _times_of(of: Row) -> list[float]:
    found: list[float] = []
    for key, ways in zip(_MEASURES, _RATIOS, strict=True):
        theirs = of["autocast"].get(key, math.nan)
        found.append(theirs)
        for way in ways:
            ours = of.get(way, {}).get(key, math.nan)
            found.append(_divided(theirs, ours) if key == "ms" else _divided(ours, theirs))
    return found


def distances(data: Row) -> str:
    """One row for each model whose results were compared."""
    seeds = {key.rpartition("/")[2] for key in data["distances"]}
    names = [name for name in COUNTED if any(f"{name}/{seed}" in data["distances"] for seed in seeds)]
    heads = [f"{what} {dtype}" for dtype in ("fp16", "bf16") for what in ("outputs", "gradients")]
    headers = [each for head in heads for each in (head, *COMPARED[1:])]
    legend = DISTANCES_LEGEND.format(seeds=f"{len(seeds)} seed{'s' if len(seeds) != 1 else ''}")
    table = _table(names, headers, lambda name: _distances_of(data["distances"], name))
    return "\n\n".join([table, legend, *failures(data, "distances")])


def _distances_of(rows: Row, name: str) -> list[float]:
    found = []
    for dtype in DTYPES:
        for which in (0, 1):
            theirs = _over_seeds(rows, name, f"autocast {dtype}", which)
            found.append(theirs)
            found += [_divided(_over_seeds(rows, name, f"{way} {dtype}", which), theirs) for way in COMPARED[1:]]
    return found


def _over_seeds(rows: Row, name: str, way: str, which: int) -> float:
    seeds = [row for key, row in rows.items() if key.rpartition("/")[0] == name and way in row]
    return math.sqrt(sum(row[way][which] ** 2 for row in seeds) / len(seeds)) if seeds else math.nan


def _table(names: Sequence[str], headers: Sequence[str], row_of: Callable[[str], list[float]]) -> str:
    rows = [row_of(name) for name in names]
    shown = [[name, *map(_cell, row)] for name, row in zip(names, rows, strict=True)]
    shown.append(["geometric mean", *(_cell(_mean([row[at] for row in rows])) for at in range(len(headers)))])
    return results.as_table(shown, ["model", *headers])


def _divided(one: float, other: float) -> float:
    return one / other if other else math.nan


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if value > 0]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else math.nan


def failures(data: Row, *parts_of: str) -> list[str]:
    """What could not be measured, and why, of "times" or "distances" or of both; distances that are not finite, too."""
    found = []
    for what in parts_of or ("times", "distances"):
        for name, row in data[what].items():
            parts = {"": row} if "failed" in row else row
            told = [(way, facts["failed"]) for way, facts in parts.items() if "failed" in facts]
            if what == "distances" and "failed" not in row:
                told += [(way, "not finite") for way, pair in row.items() if not all(map(math.isfinite, pair))]
            found += [f"{' '.join((name, way)).strip()}, {what}: {why}" for way, why in told]
    return found
