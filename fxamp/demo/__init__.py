"""The main job: two real tasks, each trained in fp32, with torch.autocast and with fxamp, side by side.

    fxamp demo                       # two minutes on two CPU cores with bfloat16 units
    fxamp demo --tasks digits        # one of the two
    fxamp demo --device cuda
    fxamp demo --json > demo.json    # the tables and claims as data; progress goes to stderr

fp32 runs with three seeds first; the others repeat the seed whose test accuracy is the middle one: same first
weights, same batches. The exit code is 1 where one of the claims under the tables does not hold.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fxamp.counting import results
from fxamp.demo.jobs import Job, Runner, task_of
from fxamp.demo.loop import FEWEST, FP32, MIXED, Mode, Result
from fxamp.demo.table import LEGEND, Claim, claims, median_of, table
from fxamp.demo.tasks import TASKS
from fxamp.errors import FxampError, OptionError

SEEDS = (1, 2, 3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns 0 where every claim holds, else 1.

    Raises:
        FxampError: a package of the extra `demo` is missing, or the device is.
        OptionError: a number of steps in which no cast could be counted.
    """
    parser = argparse.ArgumentParser(
        prog="fxamp demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs; progress goes to stderr")
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def run(chosen: argparse.Namespace) -> int:
    """The same, from parsed arguments."""
    device = _device(chosen.device)
    if chosen.steps is not None and chosen.steps < FEWEST:
        raise OptionError(
            f"--steps {chosen.steps}: the casts of one step are counted and another is timed, give at least {FEWEST}."
        )
    if device.type == "cpu":
        torch.set_num_threads(1)
    check_folder(chosen.out)
    if chosen.json:
        with contextlib.redirect_stdout(sys.stderr):
            found = _train(chosen, device)
        print(json.dumps(found.as_dict(), indent=2))
    else:
        found = _train(chosen, device)
    return 0 if all(claim.holds for claim in found.claims) else 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the whole demo gave: the runs of each task by its title, and the claims."""

    runs: dict[str, list[Result]]
    claims: list[Claim]
    seconds: float
    out: Path

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "torch": torch.__version__,
            "tasks": {title: [facts(result) for result in trained] for title, trained in self.runs.items()},
            "claims": [vars(claim) for claim in self.claims],
            "seconds": round(self.seconds, 1),
            "graphs": str(self.out),
        }


def _train(chosen: argparse.Namespace, device: torch.device) -> Outcome:
    """Every task in every mode, with its table and claims printed."""
    workers = chosen.workers or _workers(device)
    print(f"torch {torch.__version__}, {_name(device)}; runs at a time: {workers}")
    start, found = time.perf_counter(), list[Claim]()
    runs: dict[str, list[Result]] = {}
    for name in chosen.tasks:
        trained, claimed = compare(name, chosen.steps, str(device), workers, chosen.out / name)
        runs[task_of(name, chosen.steps, str(device)).title] = trained
        found += claimed
    print(f"{LEGEND}\n\n{sum(claim.holds for claim in found)} of {len(found)} claims hold; ", end="")
    print(f"{time.perf_counter() - start:.0f} s in all.")
    print(f"The graphs, before and after, with the reason of every node: {chosen.out}")
    outcome = Outcome(runs, found, time.perf_counter() - start, chosen.out)
    if chosen.save:
        data = outcome.as_dict()["tasks"]
        typed = sys.argv[sys.argv.index("demo") + 1 :] if "demo" in sys.argv else []
        results.save(results.make("tools/train", typed, data, outcome.seconds, device.type), chosen.save)
    return outcome


def compare(name: str, steps: int | None, device: str, workers: int, folder: Path) -> tuple[list[Result], list[Claim]]:
    """Train one task in every mode, print its table and its claims, dump fxamp's graphs below `folder`."""
    task = task_of(name, steps, device)
    print(f"\n{task.title}", flush=True)

    def job(mode: Mode, seed: int) -> Job:
        return Job(name, steps, device, mode, seed, folder)

    with Runner(workers, task.steps * (len(SEEDS) + len(MIXED))) as runner:
        fp32 = runner.run(f"{name}, fp32", [job(FP32, seed) for seed in SEEDS])
        seed = median_of(fp32).seed
        mixed = runner.run(f"{name}, mixed precision", [job(mode, seed) for mode in MIXED])
    found = claims(fp32, mixed)
    print(f"\n{table([*fp32, *mixed])}\n")
    print(*found, sep="\n", end="\n\n", flush=True)
    return [*fp32, *mixed], found


def facts(result: Result) -> dict[str, Any]:
    """A run as JSON can hold it."""
    return {**dataclasses.asdict(result), "mode": result.mode.name}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's own options."""
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: both")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="of each run, at least 2; the claims are meant for the default"
    )
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="runs at a time; default: 2 on a CPU of two cores, else 1"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="folder of the graphs' dumps"
    )
    results.add_save(parser, "train")


def check_folder(out: Path) -> None:
    """Make it; say now, not after the training, that it cannot be written.

    Raises:
        OptionError: `--out` is no folder, or one that cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OptionError(f"--out {out}: {error.strerror or error}. Give a folder that can be written.") from error


def _device(name: str | None) -> torch.device:
    with contextlib.suppress(Exception):
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros((), device=device)
        return device
    raise FxampError(f"--device {name}: torch cannot use it here. Leave it out, or give 'cpu'.")


def _workers(device: torch.device) -> int:
    """Two where there are two cores: what runs together is then autocast and fxamp in one dtype."""
    return min(2, os.cpu_count() or 1) if device.type == "cpu" else 1


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({torch.backends.cpu.get_cpu_capability()})"
