"""Tables of counts: every model in every way, and the ratios to autocast."""

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tabulate import tabulate

from fxamp.counting import results
from fxamp.counting.counts import Counts
from fxamp.counting.run import MORE_WAYS, WAYS, count
from fxamp.counting.zoo import BESIDE, COUNTED, MODELS
from fxamp.errors import FxampError, nearest
from fxamp.numerics.progress import watched

# What the ratios are taken of, and the models whose bytes have a row of their own.
MEASURES = {
    "cast launches": "casts",
    "kernel launches": "launches",
    "bytes moved": "nbytes",
    "bytes saved for backward": "saved_nbytes",
}
TRANSFORMERS = (
    "swin_t", "convnext_tiny", "vit_b_16", "nn_transformer", "hf_bert_mlm", "hf_gpt2", "hf_t5", "hf_llama", "hf_vit",
    "hf_whisper",
)  # fmt: skip
TRANSFORMER_BYTES = "bytes moved, transformers"
GOALS = {
    "cast launches": {"O1 balanced": 0.15, "O2": 0.05},
    "kernel launches": {"O1 balanced": 0.76, "O2": 0.74},
    "bytes moved": {"O1 balanced": 0.91, "O2": 0.88},
    "bytes saved for backward": {"O1 balanced": 0.86, "O2": 0.84},
    TRANSFORMER_BYTES: {"O1 balanced": 0.80, "O2": 0.75},
}
"""The most that the mean ratio to autocast should be: row of a table -> way -> ratio."""
KNOWN = tuple({**COUNTED, **MODELS})
HEADERS = ("model", "way", "launches", "casts", "forward", "tensors cast", "GB", "cast GB", "saved GB")

Table = Mapping[str, Mapping[str, Counts | str]]
"""Model -> way -> counts, or why there are none."""
Counted = Mapping[str, Mapping[str, Counts]]
"""The models of a table that were counted in every way."""


def count_all(
    models: Sequence[str], ways: Sequence[str], dtype: torch.dtype, device: str = "cuda", tiny: bool = False
) -> dict[str, dict[str, Counts | str]]:
    """Counts of these models prepared in these ways, or why they could not be had."""
    cells = watched([(name, way) for name in models for way in ways], "count")
    table: dict[str, dict[str, Counts | str]] = {name: {} for name in models}
    for name, way in cells:
        try:
            table[name][way] = count(name, way, dtype, device, tiny).counts
        except FxampError as error:
            table[name][way] = str(error).partition("\n")[0]
    return table


def counted(table: Table) -> dict[str, dict[str, Counts]]:
    """The models that were counted in every way: only they can be compared."""
    found = {}
    for name, row in table.items():
        counts = {way: cell for way, cell in row.items() if isinstance(cell, Counts)}
        if len(counts) == len(row):
            found[name] = counts
    return found


def with_beside(table: Counted) -> tuple[Counted, Counted]:
    """The models whose means are taken, and those beside them; where there are no others, means are of these."""
    main = {name: row for name, row in table.items() if name not in BESIDE}
    return (main, {name: row for name, row in table.items() if name in BESIDE}) if main else (table, {})


def not_counted(table: Table) -> list[str]:
    """A line "model, ways: reason" for whatever is missing."""
    lines = []
    for name, row in table.items():
        reasons = {cell: [way for way in row if row[way] == cell] for cell in row.values() if isinstance(cell, str)}
        for reason, ways in reasons.items():
            where = name if len(ways) == len(row) else f"{name}, {' and '.join(ways)}"
            lines.append(f"{where}: {reason}")
    return lines


def as_json(table: Table) -> dict[str, dict[str, Any]]:
    """What a result file holds: counts as dictionaries, reasons as they are."""
    return {
        name: {way: cell if isinstance(cell, str) else dataclasses.asdict(cell) for way, cell in row.items()}
        for name, row in table.items()
    }


def from_json(data: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Counts | str]]:
    """The table in a result file."""
    return {
        name: {way: cell if isinstance(cell, str) else Counts(**cell) for way, cell in row.items()}
        for name, row in data.items()
    }


def ratios(table: Counted, label: str, way: str) -> dict[str, float]:
    """Of the models in a row of the table of ratios: a way's count divided by autocast's (0 counts as 1)."""
    measure = "nbytes" if label == TRANSFORMER_BYTES else MEASURES[label]
    chosen = [name for name in table if label != TRANSFORMER_BYTES or name in TRANSFORMERS]
    return {
        name: max(getattr(table[name][way], measure), 1) / max(getattr(table[name]["autocast"], measure), 1)
        for name in chosen
    }


def labels(table: Counted) -> list[str]:
    """The rows of the table of ratios that these models have."""
    return [*MEASURES, *([TRANSFORMER_BYTES] if set(table) & set(TRANSFORMERS) else [])]


def mean_ratio(table: Counted, label: str, way: str) -> float:
    """Geometric mean of `ratios`."""
    return statistics.geometric_mean(ratios(table, label, way).values())


def missed_goals(table: Counted, way: str) -> list[str]:
    """A line for each goal that a way misses, and the models that are above it."""
    lines = []
    for label in labels(table):
        goal = GOALS[label].get(way, math.inf)
        if (mean := mean_ratio(table, label, way)) > goal:
            above = {name: each for name, each in ratios(table, label, way).items() if each > goal}
            named = ", ".join(f"{name} {each:.3f}" for name, each in sorted(above.items(), key=lambda pair: -pair[1]))
            lines.append(f"{way}, {label}: {mean:.3f}, goal {goal}; above it {named}")
    return lines


def worse_than_autocast(table: Counted, way: str) -> list[str]:
    """A line "model: measure 1.020" for each count in which a way is worse than autocast, by 0.05% at least."""
    of = {label: ratios(table, label, way) for label in MEASURES}
    return [f"{name}: {label} {of[label][name]:.3f}" for name in table for label in of if of[label][name] >= 1.0005]


def counts_text(table: Table) -> str:
    """One line per model and way."""
    rows = [
        (name, way, *(_numbers(cell) if isinstance(cell, Counts) else ("not counted",)))
        for name, row in table.items()
        for way, cell in row.items()
    ]
    missing = [f"not counted: {line}" for line in not_counted(table)]
    return "\n".join([tabulate(rows, headers=HEADERS), *missing])


def _numbers(counts: Counts) -> tuple[float, ...]:
    gigabytes = (round(value / 1e9, 3) for value in (counts.nbytes, counts.cast_nbytes, counts.saved_nbytes))
    return counts.launches, counts.casts, counts.forward_casts, counts.tensors_cast, *gigabytes


def ratios_text(table: Table) -> str:
    """Geometric means against autocast, one line per measure, over the models counted in every way."""
    complete = counted(table)
    if not complete:
        return "no model was counted in every way"
    main, beside = with_beside(complete)
    ways = [way for way in next(iter(complete.values())) if way not in ("fp32", "autocast")]
    rows = [(label, *(round(mean_ratio(main, label, way), 3) for way in ways)) for label in labels(main)]
    rows += [(label, *(round(by_way[way], 3) for way in ways)) for label, by_way in rows_beside(beside)]
    lines = [tabulate(rows, headers=(f"against autocast, geomean of {len(main)}", *ways))]
    for way in ways:
        lines += [f"{way} is worse than autocast: {line}" for line in worse_than_autocast(complete, way)]
    return "\n".join(lines)


def rows_beside(beside: Counted) -> list[tuple[str, dict[str, float]]]:
    """A label and the ratios to autocast by way, for each count of each model that is in no mean."""
    return [
        (f"{name}: {label}", {way: ratios({name: row}, label, way)[name] for way in row})
        for name, row in beside.items()
        for label in MEASURES
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: `tools/count` or `python -m fxamp.counting`."""
    parser = argparse.ArgumentParser(
        prog="count", description="What one training step (forward, loss, backward) of each zoo model costs."
    )
    parser.add_argument(
        "models", nargs="*", metavar="model", help=f"of {', '.join(KNOWN)}; default: the {len(COUNTED)} published"
    )
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated, of " + ", ".join((*WAYS, *MORE_WAYS)))
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cuda: fake tensors; cpu: it runs")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; always so on the CPU")
    results.add_save(parser, "count")
    typed = list(sys.argv[1:] if arguments is None else arguments)
    given = parser.parse_args(typed)
    models, ways = given.models or list(COUNTED), given.ways.split(",")
    for what, names, known in (("models", models, KNOWN), ("ways", ways, (*WAYS, *MORE_WAYS))):
        for name in names:
            if name not in known:
                parser.error(f"{name!r} is none of the {what}.{nearest(name, known)}")
    is_tiny = given.tiny or given.device == "cpu"
    start = time.perf_counter()
    table = count_all(models, ways, getattr(torch, given.dtype), given.device, is_tiny)
    where = "fake CUDA tensors" if given.device == "cuda" else "CPU tensors, really run"
    sizes = "tiny" if is_tiny else "published"
    print(f"torch {torch.__version__}, {given.dtype}, {where}, {sizes} sizes\n\n{counts_text(table)}")
    if "autocast" in ways:
        print(f"\n{ratios_text(table)}")
    if given.save:
        results.save(results.make("tools/count", typed, as_json(table), time.perf_counter() - start), given.save)
