"""Tables of counts: every model in every way, and the ratios to autocast."""

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Mapping, Sequence

import torch
from tabulate import tabulate

from fxamp.counting import results
from fxamp.counting.counts import Counts
from fxamp.counting.run import WAYS, count
from fxamp.counting.zoo import MODELS

# What the ratios are taken of, and the models whose bytes have a row of their own.
MEASURES = {
    "cast launches": "casts",
    "kernel launches": "launches",
    "bytes moved": "nbytes",
    "bytes saved for backward": "saved_nbytes",
}
TRANSFORMERS = ("vit_b16", "convnext_tiny", "bert_base", "gpt2_small", "llama_1b", "transformer_base")
HEADERS = ("model", "way", "launches", "casts", "forward", "tensors cast", "GB", "cast GB", "saved GB")

Table = Mapping[str, Mapping[str, Counts]]
"""Model -> way -> counts."""


def count_all(
    models: Sequence[str], ways: Sequence[str], dtype: torch.dtype, device: str = "cuda", tiny: bool = False
) -> dict[str, dict[str, Counts]]:
    """Counts of these models prepared in these ways."""
    return {name: {way: count(name, way, dtype, device, tiny).counts for way in ways} for name in models}


def ratio(table: Table, measure: str, way: str, models: Sequence[str] = ()) -> float:
    """Geometric mean over the models of a way's count divided by autocast's (a count of 0 counts as 1)."""
    chosen = [name for name in table if not models or name in models]
    logs = [
        math.log(max(getattr(table[name][way], measure), 1) / max(getattr(table[name]["autocast"], measure), 1))
        for name in chosen
    ]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def worse_than_autocast(table: Table, way: str) -> list[str]:
    """A line "model: measure 1.02" for each count in which a way is worse than autocast."""
    return [
        f"{name}: {label} {getattr(row[way], measure) / max(getattr(row['autocast'], measure), 1):.3f}"
        for name, row in table.items()
        for label, measure in MEASURES.items()
        if getattr(row[way], measure) > getattr(row["autocast"], measure)
    ]


def counts_text(table: Table) -> str:
    """One line per model and way."""
    rows = [
        (
            name,
            way,
            counts.launches,
            counts.casts,
            counts.forward_casts,
            counts.tensors_cast,
            *(round(value / 1e9, 3) for value in (counts.nbytes, counts.cast_nbytes, counts.saved_nbytes)),
        )
        for name, row in table.items()
        for way, counts in row.items()
    ]
    return tabulate(rows, headers=HEADERS)


def ratios_text(table: Table) -> str:
    """Geometric means against autocast, one line per measure."""
    ways = [way for way in next(iter(table.values())) if way not in ("fp32", "autocast")]
    rows = [(label, *(round(ratio(table, key, way), 3) for way in ways)) for label, key in MEASURES.items()]
    if any(name in TRANSFORMERS for name in table):
        shares = (round(ratio(table, "nbytes", way, TRANSFORMERS), 3) for way in ways)
        rows.append(("bytes moved, transformers", *shares))
    lines = [tabulate(rows, headers=(f"against autocast, geomean of {len(table)}", *ways))]
    for way in ways:
        lines += [f"{way} is worse than autocast: {line}" for line in worse_than_autocast(table, way)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: `tools/count` or `python -m fxamp.counting`."""
    parser = argparse.ArgumentParser(
        prog="count", description="What one training step (forward, loss, backward) of each zoo model costs."
    )
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated, of " + ", ".join(WAYS))
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cuda: fake tensors; cpu: it runs")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; always so on the CPU")
    results.add_save(parser, "count")
    typed = list(sys.argv[1:] if arguments is None else arguments)
    given = parser.parse_args(typed)
    unknown = [name for name in given.models if name not in MODELS]
    unknown += [way for way in given.ways.split(",") if way not in WAYS]
    if unknown:
        parser.error(f"{unknown[0]!r} is neither a model nor a way")
    models, ways = given.models or list(MODELS), given.ways.split(",")
    is_tiny = given.tiny or given.device == "cpu"
    start = time.perf_counter()
    table = count_all(models, ways, getattr(torch, given.dtype), given.device, is_tiny)
    where = "fake CUDA tensors" if given.device == "cuda" else "CPU tensors, really run"
    sizes = "tiny" if is_tiny else "published"
    print(f"torch {torch.__version__}, {given.dtype}, {where}, {sizes} sizes\n\n{counts_text(table)}")
    if "autocast" in ways:
        print(f"\n{ratios_text(table)}")
    if given.save:
        data = {name: {way: dataclasses.asdict(counts) for way, counts in row.items()} for name, row in table.items()}
        results.save(results.make("tools/count", typed, data, time.perf_counter() - start), given.save)
