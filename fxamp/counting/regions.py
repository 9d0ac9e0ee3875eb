"""Tables in the documentation, made from result files: `tools/tables`.

<!-- table: count -->
... is replaced by what docs/results/count.json says ...
<!-- end -->
"""

import argparse
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fxamp.counting import gpu_models_table, host, ranks, results, scale
from fxamp.counting.speed import judge
from fxamp.counting.speed import table as speed_table
from fxamp.counting.table import (
    GOALS,
    counted,
    from_json,
    labels,
    mean_ratio,
    missed_goals,
    not_counted,
    rows_beside,
    with_beside,
    worse_than_autocast,
)
from fxamp.demo.suite import table as suite_table
from fxamp.demo.suite.records import Store
from fxamp.errors import OptionError, nearest

PAGES = ("README.md", "docs/scale.md", "docs/models.md", "docs/speed.md")
REGION = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Record = dict[str, Any]


def rewrite(text: str, folder: Path) -> str:
    """The page with every region as its result file says.

    Raises:
        OptionError: a region names no table.
    """

    def replaced(match: re.Match[str]) -> str:
        return f"{match[1]}\n{region(match[2], folder)}\n\n{match[3]}"

    return REGION.sub(replaced, text)


def region(name: str, folder: Path) -> str:
    """What stands between the marks of a table."""
    known = [*TABLES, ACCURACY]
    if name not in known:
        raise OptionError(f"<!-- table: {name} --> is no table.{nearest(name, known)} Known: {', '.join(known)}.")
    if name == ACCURACY:
        return accuracy(folder.parent / "accuracy.json")
    file, command, render = TABLES[name]
    record = results.load(folder / f"{file}.json")
    if record is None:
        return f"Not measured yet: `{command}`."
    return f"{render(record['data'])}\n\n{source(record)}"


def source(record: Record) -> str:
    """The command, the machine, the versions and the day of a result, in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    day = f"; {record['date']}" if "date" in record else ""  # older results have none
    return f"`{record['command']}` ({record['machine']}; {versions}{day})"


def _prose(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


# ------------------------------------------------------------------------------------------------------ tables

COUNTED_WAYS = ("O1 strict", "O1 balanced", "O1 loss inside", "O2", "O2 loss inside", "half")
WITH_GOALS = ("O1 balanced", "O2")


def count(data: Any) -> str:
    """Ratios to autocast with their goals, which are missed and by whom, and where fxamp is worse."""
    whole = from_json(data)
    every = counted(whole)
    table, beside = with_beside(every)
    ways = [way for way in COUNTED_WAYS if way in next(iter(table.values()))]
    rows, headers = [], [f"against autocast, {len(table)} models"]
    for way in ways:
        headers += ["pure half" if way == "half" else way, *(["goal"] if way in WITH_GOALS else [])]
    for label in labels(table):
        cells = [label]
        for way in ways:
            cells += [f"{mean_ratio(table, label, way):.3f}"]
            cells += [f"{GOALS[label][way]:.2f}"] if way in WITH_GOALS else []
        rows.append(cells)
    for label, by_way in rows_beside(beside):
        rows.append([label, *(cell for way in ways for cell in (f"{by_way[way]:.3f}", "")[: 1 + (way in WITH_GOALS)])])
    missed = [line for way in ways for line in missed_goals(table, way)]
    found = {way: worse_than_autocast(every, way) for way in ways if way != "half"}
    worse = [f"{way}: {', '.join(line.replace(':', '') for line in lines)}." for way, lines in found.items() if lines]
    never = [way for way, lines in found.items() if not lines]
    worse += [f"No model with {' or '.join(never)}."] if never else []
    verdict = f"Missed: {'. '.join(missed)}." if missed else "Every goal is met."
    is_any_worse = any(found.values())
    losses = f"Worse than autocast, {' '.join(worse)}" if is_any_worse else "No model is worse than autocast in any."
    missing = [f"Not counted: {line}." for line in not_counted(whole)]
    return "\n\n".join([results.as_table(rows, headers), *map(_prose, [verdict, losses, *missing])])


ACCURACY = "accuracy"
IN_SHORT = ("autocast fp16", "O1 balanced fp16", "O2 fp16", "autocast bf16", "O1 balanced bf16", "O2 bf16")


def accuracy(path: Path) -> str:
    """The accuracy suite in short; its own page has every mode."""
    if not path.exists():
        return "Not measured yet: `tools/accuracy`."
    store = Store(path, {})
    machine = ", ".join(f"{name} {value}" for name, value in store.machine.items())
    counted_claims = suite_table.count(suite_table.verdicts(store)).partition("\n")[0]
    parts = [counted_claims, suite_table.overview(store, IN_SHORT).rstrip(), f"`tools/accuracy` ({machine})"]
    return "\n\n".join(parts)


def train(data: Any) -> str:
    """One table for each task."""
    parts = []
    for task, runs in data.items():
        baseline = [run for run in runs if run["mode"] == "fp32"]
        rows = [[
            "fp32", " / ".join(str(run["seed"]) for run in baseline),
            " / ".join(f"{run['loss']:.4f}" for run in baseline),
            " / ".join(f"{run['accuracy']:.2%}" for run in baseline), "0", "0", "0",
        ]]  # fmt: skip
        rows += [
            [run["mode"], str(run["seed"]), f"{run['loss']:.4f}", f"{run['accuracy']:.2%}", f"{run['casts']:g}",
             f"{run['tensors_cast']:g}", str(run["skipped"])]
            for run in runs if run["mode"] != "fp32"
        ]  # fmt: skip
        parts.append(
            results.as_table(rows, [task, "seed", "final loss", "test accuracy", "casts", "tensors", "skipped"])
        )
    return "\n\n".join(parts)


def zoo_summary(data: Any) -> str:
    """How many models keep to autocast's distance from fp32, and the others with their numbers."""
    rows, failures = data["rows"], data["failures"]
    others = [row for row in rows if far(row) or row["low_share"] < row["autocast_low_share"]]
    words = (
        f"{len(rows)} of {len(rows) + len(failures)} models convert and train; {len(rows) - len(others)} of them stay"
    )
    words += " within twice autocast's own distance from fp32 and run at least its share of GEMMs low."
    cells = [
        [row["name"], ", ".join(far(row)) or "-", f"{row['low_share']:.0%} / {row['autocast_low_share']:.0%}"]
        for row in others
    ]
    failed = [f"Failed: {failure}." for failure in failures]
    headers = ("the others", "further from fp32 (ours / autocast's)", "low GEMMs, ours / autocast's")
    table = [results.as_table(cells, headers)] if cells else []
    return "\n\n".join([_prose(words), *table, *failed, *map(_prose, _against_seeds(rows))])


def _against_seeds(rows: list[Record]) -> Iterator[str]:
    """Who is further from fp32 than autocast, and who nearer, beyond what the seeds differ by."""
    seeds = min((len(pairs) for row in rows for pairs in row.get("seeds", {}).values()), default=0)
    for what in ("outputs", "gradients") if seeds > 1 else ():
        ratios = {row["name"]: [(a + NOTHING) / (b + NOTHING) for a, b in row["seeds"][what]] for row in rows}
        means = {name: statistics.geometric_mean(found) for name, found in ratios.items()}
        further = [name for name, found in ratios.items() if min(found) > 1 and means[name] > CLEARLY]
        nearer = [name for name, found in ratios.items() if max(found) < 1 and means[name] < 1 / CLEARLY]
        named = ", ".join(f"{name} {means[name]:.2f}" for name in sorted(further, key=lambda name: -means[name]))
        yield (
            f"Distance of {what} from fp32, of autocast's: {statistics.geometric_mean(means.values()):.2f} (geomean of "
            f"all models, {seeds} seeds each); at every seed and by {CLEARLY - 1:.0%} or more in the mean, "
            f"{_are(len(further))} further{f' ({named})' if named else ''} and {len(nearer)} nearer."
        )


def _are(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"


CLEARLY = 1.05
NOTHING = 1e-6
"""Two roundings differ by less."""


def far(row: Record) -> list[str]:
    """The distances of a row that are more than twice autocast's, in words."""
    return [f"{what} {pair[0]:.1e} / {pair[1]:.1e}" for what, pair in row["errors"].items() if is_far(*pair)]


def is_far(ours: float, theirs: float) -> bool:
    """Whether a distance from fp32 is more than twice autocast's."""
    return ours > 2 * theirs + NOTHING


def zoo_rows(data: Any) -> str:
    """Every row of tools/zoo."""
    return results.as_table(data["cells"], data["headers"])


def speed_goals(data: Any) -> str:
    """Goals, and means over the models; the rows are on a page of their own."""
    rows = list(data["rows"].values())
    verdicts = [(goal.text, goal.found or "-", goal.verdict) for goal in judge.goals(rows)]
    return "\n\n".join([results.as_table(verdicts, ("goal", "found", "")), speed_table.means_table(rows)])


def speed_rows(data: Any) -> str:
    """Every row of tools/gpu_speed, and the goals."""
    return speed_table.markdown(data["rows"].values(), data["tiny"])


# Name of a region -> result file, command that makes it, what it prints.
TABLES: dict[str, tuple[str, str, Callable[[Any], str]]] = {
    "train": ("train", "tools/train --save", train),
    "count": ("count", "tools/count --save", count),
    "host": ("host", "tools/host --save", host.table),
    "zoo": ("zoo", "tools/zoo --save", zoo_summary),
    "zoo-rows": ("zoo", "tools/zoo --save", zoo_rows),
    "scale": ("scale", "tools/scale --save", scale.tables),
    "memory": ("ranks", "tools/ranks --save", ranks.memory_table),
    "traffic": ("ranks", "tools/ranks --save", ranks.traffic_table),
    "speed": ("gpu_speed", "tools/gpu_speed", speed_goals),
    "speed-rows": ("gpu_speed", "tools/gpu_speed", speed_rows),
    "gpu-times": ("gpu_models", "tools/gpu_models", gpu_models_table.times),
    "gpu-distances": ("gpu_models", "tools/gpu_models", gpu_models_table.distances),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; with --check returns 1 where a page is not what it should be."""
    parser = argparse.ArgumentParser(prog="tables", description="Rewrite the marked tables of README.md and docs/*.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page would change")
    parser.add_argument("--root", type=Path, default=Path("."), help="folder of the pages; default: this one")
    given = parser.parse_args(arguments)
    stale = []
    for page in (given.root / name for name in PAGES):
        if not page.exists():
            continue
        old = page.read_text()
        new = rewrite(old, given.root / results.FOLDER)
        if new != old:
            stale.append(str(page))
            if not given.check:
                page.write_text(new)
    print(f"{'would change' if given.check else 'changed'}: {', '.join(stale) or 'nothing'}", file=sys.stderr)
    return 1 if given.check and stale else 0
