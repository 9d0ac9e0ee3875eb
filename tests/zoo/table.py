"""The zoo as a table: `tools/zoo [name ...]`, or the hand-written models and then transformers' architectures."""

import argparse
import functools
import importlib
import os
import sys
import time
import warnings
from collections.abc import Sequence

import torch
from tabulate import tabulate

from fxamp.counting import results
from fxamp.errors import nearest
from tests.zoo import hugging_face, measure
from tests.zoo.test_zoo import HAND_WRITTEN

HEADER = "model, capture, nodes, casts, low GEMMs, autocast's, outputs, gradients, eval, buffers, s".split(", ")


def line(row: measure.Row, seconds: float) -> list[str]:
    """One row: errors are relative distances from fp32, ours / autocast's; a `!` marks more than twice as far."""
    shares = [f"{run.low}/{run.gemms}" for run in (row.ours, row.auto)]
    return [
        row.name, row.capture, str(row.nodes), str(row.casts), *shares,
        *(_errors(row, what) for what in measure.ERRORS), f"{seconds:.1f}",
    ]  # fmt: skip


def _errors(row: measure.Row, what: str) -> str:
    ours, theirs = row.error(row.ours, what), row.error(row.auto, what)
    return f"{ours:.1e} / {theirs:.1e}{' !' if ours > 2 * theirs + 1e-6 else ''}"


def facts(row: measure.Row) -> dict[str, object]:
    """The same as numbers: distances from fp32 (ours, autocast's), seed by seed too, and shares of low GEMMs."""
    errors = {what: [row.error(row.ours, what), row.error(row.auto, what)] for what in measure.ERRORS}
    return {
        "name": row.name,
        "errors": errors,
        "seeds": {what: row.errors_of_seeds(what) for what in measure.ERRORS},
        "low_share": row.ours.share,
        "autocast_low_share": row.auto.share,
        "low": row.ours.low,
        "losses": row.ours.losses,
    }


def measured(name: str, level: str, seeds: int) -> measure.Row:
    torch._dynamo.reset()
    if name in HAND_WRITTEN:
        module = importlib.import_module(f"tests.zoo.{name}")
        torch.manual_seed(1)
        return measure.measure(name, module.make, (module.inputs(), {}), seeds=seeds, level=level)
    kind = name.removeprefix("hf:")
    make, call = functools.partial(hugging_face.make, kind), hugging_face.call(kind)
    return measure.measure(name, make, call, seeds=seeds, level=level)


def main(arguments: Sequence[str] | None = None) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(prog="tools/zoo", description=__doc__)
    parser.add_argument("names", nargs="*", help="models; those of transformers as hf:bert")
    parser.add_argument("--level", default="balanced", choices=("strict", "balanced", "aggressive"))
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each model; default 3")
    results.add_save(parser, "zoo")
    typed = list(sys.argv[1:] if arguments is None else arguments)
    given = parser.parse_args(typed)
    every = [*HAND_WRITTEN, *(f"hf:{name}" for name in hugging_face.ARCHITECTURES)]
    names = given.names or every
    for name in names:
        if name not in (*every, *hugging_face.ARCHITECTURES):
            parser.error(f"{name!r} is none of the models.{nearest(name, (*hugging_face.ARCHITECTURES, *every))}")
    begun, rows, numbers, failures = time.time(), [], [], []
    for name in names:
        start = time.time()
        try:
            row = measured(name, given.level, given.seeds)
            rows.append(line(row, time.time() - start))
            numbers.append(facts(row))
        except Exception as error:  # one model that fails must not hide the others
            text = str(error).splitlines()[0][:100] if str(error) else ""
            failures.append(f"{name}: {type(error).__name__}: {text}")
    print(tabulate(rows, headers=HEADER, disable_numparse=True, tablefmt="github"))
    for failure in failures:
        print(f"FAILED {failure}")
    if given.save:
        data = {"rows": numbers, "failures": failures, "headers": HEADER, "cells": rows}
        results.save(results.make("tools/zoo", typed, data, time.time() - begun), given.save)


if __name__ == "__main__":
    main()
