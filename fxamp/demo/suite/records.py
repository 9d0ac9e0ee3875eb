"""What the suite keeps of a run, and the file that keeps it."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from fxamp.demo.suite.modes import MODES, TF32_NAME
from fxamp.demo.suite.task import SuiteTask
from fxamp.demo.suite.tasks import TASKS

POINTS = 20
"""Of a loss curve: each the mean over a twentieth of the steps."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One run.

    Attributes:
        loss, held_out_loss, metric: as in `fxamp.demo.loop.Result`; the metric is the task's own. None where the run
            failed.
        casts: calls in a step that convert one floating dtype to another.
        curve: the training loss, in `POINTS` means.
        error: why it failed.
    """

    task: str
    mode: str
    seed: int
    steps: int
    loss: float | None = None
    held_out_loss: float | None = None
    metric: float | None = None
    low: int | None = None
    nodes: int | None = None
    casts: float | None = None
    skipped: int | None = None
    seconds: float | None = None
    curve: tuple[float, ...] = ()
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class TaskFacts:
    """What a table says of a task besides its runs."""

    title: str
    measures: str
    higher_is_better: bool
    parameters: int
    steps: int


@functools.lru_cache(maxsize=1)
def task_of(name: str, steps: int | None, device: str) -> SuiteTask:
    """The task, built once in a process; `steps` None for its own number of them."""
    return TASKS[name](torch.device(device), **({} if steps is None else {"steps": steps}))


def facts_of(task: SuiteTask) -> TaskFacts:
    """The same for every run."""
    models = task.run(task, MODES["fp32"], 0).models
    parameters = sum(parameter.numel() for model in models for parameter in model.parameters())
    return TaskFacts(task.title, task.measures, task.higher_is_better, parameters, task.steps)


@dataclasses.dataclass(frozen=True)
class SuiteJob:
    """One run to do: values only, so that another process can do it; `steps` None for the task's own."""

    task: str
    mode: str
    seed: int
    device: str
    steps: int | None = None

    def run(self, on_step: Callable[[], Any]) -> Record:
        """Train and test; a run that fails is a record too."""
        task = task_of(self.task, self.steps, self.device)
        begun = Record(self.task, self.mode, self.seed, task.steps)
        try:
            with kernels(onednn=task.onednn, tf32=self.mode == TF32_NAME):
                run = task.run(task, MODES[self.mode], self.seed)
                run.count_every = task.steps  # once is enough for a table
                result = run(on_step)
        except Exception as error:
            return dataclasses.replace(begun, error=f"{type(error).__name__}: {error}".splitlines()[0])
        return dataclasses.replace(
            begun,
            loss=result.loss,
            held_out_loss=result.held_out_loss,
            metric=result.accuracy,
            low=result.low,
            nodes=result.nodes,
            casts=result.casts,
            skipped=result.skipped,
            seconds=round(result.seconds, 1),
            curve=thin(run.losses),
        )


@contextlib.contextmanager
def kernels(*, onednn: bool, tf32: bool) -> Iterator[None]:
    """With these kernels: fp32 on a GPU is fp32, unless TF32 is asked for."""
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = tf32
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that oneDNN's TF32 is for other GPUs
            with torch.backends.mkldnn.flags(enabled=onednn):
                yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value


def thin(losses: list[float]) -> tuple[float, ...]:
    """`POINTS` means of neighbours, or all where there are fewer."""
    count = min(POINTS, len(losses))
    ends = [len(losses) * point // count for point in range(count + 1)]
    return tuple(float(f"{fmean(losses[a:b]):.4g}") for a, b in itertools.pairwise(ends))


class Store:
    """The records of one device, in a file that is whole at every moment; a run that is there is not done again.

    store = Store(Path("docs/accuracy.json"), machine)
    store.add(record)
    """

    def __init__(self, path: Path, machine: dict[str, str]) -> None:
        self.path = path
        read = json.loads(path.read_text()) if path.exists() else {}
        self.machine: dict[str, str] = read.get("machine", machine)
        self.tasks = {name: TaskFacts(**facts) for name, facts in read.get("tasks", {}).items()}
        self.records = [Record(**{**one, "curve": tuple(one["curve"])}) for one in read.get("runs", [])]

    def has(self, job: SuiteJob, steps: int) -> bool:
        """Whether this run is done, with as many steps; one that failed is not."""
        done = (one for one in self.records if _key(one) == (job.task, job.mode, job.seed) and one.error is None)
        return any(one.steps == steps for one in done)

    def add(self, record: Record) -> None:
        """Keep it, in place of one of the same task, mode and seed."""
        self.records = [one for one in self.records if _key(one) != _key(record)] + [record]
        self.write()

    def facts(self) -> list[tuple[str, TaskFacts]]:
        """The tasks with runs, in the order of `TASKS`."""
        return [(name, self.tasks[name]) for name in TASKS if name in self.tasks]

    def write(self) -> None:
        """Replace the file at once; one line a run, in the order of the tables."""
        tasks, modes = list(TASKS), list(MODES)
        self.records.sort(key=lambda one: (tasks.index(one.task), modes.index(one.mode), one.seed))
        facts = {name: dataclasses.asdict(facts) for name, facts in self.facts()}
        head = json.dumps({"machine": self.machine, "tasks": facts}, indent=1)[:-2]
        runs = ",\n".join(f"  {json.dumps(dataclasses.asdict(one))}" for one in self.records)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".tmp")
        draft.write_text(f'{head},\n "runs": [\n{runs}\n ]\n}}\n')
        os.replace(draft, self.path)


def _key(record: Record) -> tuple[str, str, int]:
    return record.task, record.mode, record.seed
