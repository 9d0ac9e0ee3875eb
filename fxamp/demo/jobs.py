"""Runs of the demo, side by side: on a CPU each in a process of its own, one thread each.

The models are so small that a second thread gains them little, and where another program is running it costs far
more than it gains. Two processes use two cores whatever else runs there, and give the same numbers as one.
"""

import concurrent.futures
import dataclasses
import functools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fxamp.demo.loop import Mode, Result, Run
from fxamp.demo.tasks import TASKS, Task, load
from fxamp.review.dump import dump

POLL_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Job:
    """One run: a task by its name, so that another process can build it; `folder` takes fxamp's graphs."""

    task: str
    steps: int | None
    device: str
    mode: Mode
    seed: int
    folder: Path

    def run(self, on_step: Callable[[], Any]) -> Result:
        """Train, test, dump."""
        run = Run(task_of(self.task, self.steps, self.device), self.mode, self.seed)
        result = run(on_step)
        if self.mode.engine == "fxamp":
            dump(run.model, self.folder / self.mode.name.replace(" ", "-"))
        return result


@functools.lru_cache(maxsize=1)
def task_of(name: str, steps: int | None, device: str) -> Task:
    """The task, built once in a process; `steps` None for its own number of them."""
    return TASKS[name](torch.device(device), **({} if steps is None else {"steps": steps}))


class Runner:
    """Runs jobs and shows one bar for all of them.

        with Runner(workers=2, steps=2800) as runner:
            results = runner.run("digits, fp32", jobs)

    Args:
        workers: processes; 1 for this one.
        steps: of all jobs together.
    """

    def __init__(self, workers: int, steps: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.done: Any = context.Value("q", 0)
        self.bar: Any = load("tqdm").tqdm(total=steps, unit="step", mininterval=POLL_SECONDS, leave=False)
        self.pool = None
        if workers > 1:
            self.pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start, (self.done,))

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)
        self.bar.close()

    def expect(self, steps: int) -> None:
        """So many more."""
        self.bar.total += steps

    def run(self, what: str, jobs: Sequence[Any]) -> list[Any]:
        """Their results, in their order."""
        results = dict(self.each(what, jobs))
        return [results[job] for job in jobs]

    def each(self, what: str, jobs: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Every job with its result, as they end; a job is a value with `run(on_step)`."""
        self.bar.set_description(what)
        if self.pool is None:
            return ((job, job.run(self.bar.update)) for job in jobs)
        return self._together(self.pool, jobs)

    def _together(self, pool: concurrent.futures.Executor, jobs: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        waiting = {pool.submit(_run, job): job for job in jobs}
        while waiting:
            ended, _ = concurrent.futures.wait(waiting, POLL_SECONDS, concurrent.futures.FIRST_COMPLETED)
            self.bar.update(self.done.value - self.bar.n)
            yield from ((waiting.pop(future), future.result()) for future in ended)


_steps_done: Any = None


def _start(steps_done: Any) -> None:
    """Begin a worker process."""
    global _steps_done
    _steps_done = steps_done
    torch.set_num_threads(1)


def _run(job: Any) -> Any:
    return job.run(_count)


def _count() -> None:
    with _steps_done.get_lock():
        _steps_done.value += 1
