"""The accuracy suite: twelve small tasks, each trained in fp32, with torch.autocast and with fxamp, five seeds each.

    tools/accuracy                               # all of it; what is in docs/accuracy.json is not run again
    tools/accuracy --only detection flow         # some tasks
    tools/accuracy --modes fp32 "O1 strict fp16" --seeds 1 2
    tools/accuracy --steps 20 --out FOLDER       # shorter runs, beside the committed ones
    tools/accuracy --device cuda                 # the same, with TF32; docs/accuracy-cuda.json
    tools/accuracy --tables                      # run nothing, write the tables and the plot again

The claim of each row of fxamp: the mean of its metric over the seeds lies between the worst and the best of fp32's
seeds, of which there must be two at least. The exit code is 1 where one does not hold or cannot be told, or a run
failed.
"""

import argparse
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from fxamp.demo import check_folder
from fxamp.demo.jobs import Runner
from fxamp.demo.loop import FEWEST
from fxamp.demo.suite.modes import MODES, modes_of
from fxamp.demo.suite.plot import plot
from fxamp.demo.suite.records import Store, SuiteJob, facts_of, task_of
from fxamp.demo.suite.table import page, verdicts
from fxamp.demo.suite.tasks import TASKS
from fxamp.errors import OptionError

SEEDS = (1, 2, 3, 4, 5)
DOCS = Path("docs")
"""Where the runs are that the docs are made from."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, write the page and the plot; returns 0 where every claim holds and no run failed, else 1."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        device = torch.device(chosen.device)
        if not chosen.tables:
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch's own for a device that is not there
        parser.error(f"--device {chosen.device}: {str(error).splitlines()[0]}")
    base = chosen.out / ("accuracy" if device.type == "cpu" else f"accuracy-{device.type}")
    try:
        store = store_of(base.with_suffix(".json"), chosen, device)
    except OptionError as error:
        parser.error(str(error))
    if device.type == "cpu":
        torch.set_num_threads(1)
    if not chosen.tables:
        train(store, chosen, device)
    base.with_suffix(".md").write_text(page(store, base.name))
    plot(store, base.with_suffix(".png"))
    print(page(store, base.name))
    is_whole = all(one.error is None for one in store.records)
    return 0 if is_whole and all(one.holds for one in verdicts(store) if one.is_claim) else 1


def store_of(file: Path, chosen: argparse.Namespace, device: torch.device) -> Store:
    """The records so far, in a file that may get those of this call.

    Raises:
        OptionError: they would not be comparable, or could not be written.
    """
    if chosen.tables:  # of another machine's runs, it is not asked for
        if not file.exists():
            raise OptionError(f"--tables: there is no {file}. Give the folder of the runs with --out.")
        check_folder(chosen.out)
        return Store(file, {})
    if chosen.steps is not None and chosen.steps < FEWEST:
        raise OptionError(f"--steps {chosen.steps}: one step is counted and another is timed, give at least {FEWEST}.")
    if chosen.steps is not None and chosen.out.resolve() == DOCS.resolve():
        raise OptionError(
            f"--steps {chosen.steps}: the runs in {file} have their task's own number of steps, and would be replaced. "
            "Give another folder with --out."
        )
    check_folder(chosen.out)
    here = machine(device)
    store = Store(file, here)
    if store.machine != here:
        there = ", ".join(f"{name} {value}" for name, value in store.machine.items())
        raise OptionError(
            f"{file} has runs of {there}; here it is {', '.join(f'{name} {value}' for name, value in here.items())}. "
            "Give another folder with --out, or redraw what it has with --tables."
        )
    return store


def train(store: Store, chosen: argparse.Namespace, device: torch.device) -> None:
    """Every run that the store does not have, one task after the other."""
    with Runner(chosen.jobs, steps=0) as runner:
        for name in chosen.only:
            task = task_of(name, chosen.steps, str(device))
            store.tasks[name] = facts_of(task)
            modes = [mode for mode in chosen.modes or modes_of(device)]
            jobs = [SuiteJob(name, mode, seed, str(device), chosen.steps) for mode in modes for seed in chosen.seeds]
            missing = [job for job in jobs if not store.has(job, task.steps)]
            runner.expect(task.steps * len(missing))
            for _, record in runner.each(name, missing):
                store.add(record)


def machine(device: torch.device) -> dict[str, str]:
    """What the numbers depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "python": platform.python_version(), "device": f"{device.type} ({name})"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--modes", nargs="+", choices=MODES, metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="default: 1 2 3 4 5")
    parser.add_argument("--steps", type=int, help="of each run; default: the task's own")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in a process of its own; default: 1")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of json, md and png; default: docs")
    parser.add_argument("--tables", action="store_true", help="run nothing, write md and png from the json")
    return parser
