"""The host's part of a training step: tiny tensors, every way in turns in one process: `tools/host`.

Seconds are those of the thread, so that other programs do not count. On a CPU kernels are part of them, on the smallest
of tensors; what asks before each call whether a graph still holds is in them, too.
"""

import argparse
import concurrent.futures
import contextlib
import copy
import multiprocessing
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxamp.convert import convert
from fxamp.counting import results
from fxamp.counting.zoo.language import GPT2
from fxamp.counting.zoo.vision import ResNet

LOW = torch.bfloat16  # a CPU's layer norms of float16 keep to Python, for their gradients' sake
ROUNDS = 60
WARM_UP = 5

Medians = dict[str, dict[str, float]]
"""Model -> way -> seconds of a step."""
GOALS = {"O1": 0.85, "O2": 0.75}
"""The most that a way's time should be of autocast's, in the geometric mean over the models."""


class Layers(nn.Module):
    """Forty layers with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class Cells(nn.Module):
    """An LSTM cell over twenty steps: its weights are used again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[1], 8)
        for step in x.unbind(0):
            h, c = self.cell(step, (h, c))
        return self.head(h)  # type: ignore[no-any-return]


Made = tuple[nn.Module, tuple[torch.Tensor, ...]]
MODELS: dict[str, Callable[[], Made]] = {
    "mlp": lambda: (Layers(), (torch.randn(2, 8),)),
    "resnet": lambda: (ResNet((2, 2, 2), 4, 8), (torch.randn(2, 3, 16, 16),)),
    "transformer": lambda: (GPT2(16, 8, 8, 2, 4), (torch.randint(0, 16, (1, 4)),)),
    "lstm cells": lambda: (Cells(), (torch.randn(20, 1, 8),)),
}
WAYS = ("fp32", "autocast", "O1", "O2", "half")


def steps(name: str) -> dict[str, Callable[[], None]]:
    """One training step of a model (forward, loss, backward; gradients are made anew) in each of `WAYS`."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    models = {way: copy.deepcopy(model) for way in WAYS}
    for opt_level in ("O1", "O2"):
        models[opt_level] = convert(models[opt_level], LOW, example_inputs=inputs, opt_level=opt_level)
    models["half"] = models["half"].to(LOW)
    halved = tuple(given.to(LOW) if given.is_floating_point() else given for given in inputs)
    return {way: _step(models[way], halved if way == "half" else inputs, way == "autocast") for way in WAYS}


def _step(model: nn.Module, inputs: tuple[torch.Tensor, ...], is_autocast: bool) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast("cpu", LOW) if is_autocast else contextlib.nullcontext():
            result = model(*inputs)
        result.float().sum().backward()
        for parameter in parameters:
            parameter.grad = None

    parameters = list(model.parameters())
    return step


def one_round(timed: Mapping[str, Callable[[], None]], times: Mapping[str, list[float]]) -> None:
    """Run each step once, and note how long it took."""
    for way, step in timed.items():
        start = time.thread_time()
        step()
        times[way].append(time.thread_time() - start)


def middles(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each way's times, without those of the first rounds."""
    return {way: statistics.median(found[WARM_UP:]) for way, found in times.items()}


def medians(name: str, rounds: int = ROUNDS) -> dict[str, float]:
    """Median seconds of a step of a model, by way."""
    timed = steps(name)
    times: dict[str, list[float]] = {way: [] for way in timed}
    for _ in range(WARM_UP + rounds):
        one_round(timed, times)
    return middles(times)


def one_run(rounds: int = ROUNDS) -> Medians:
    """Every model, on one thread; called in a fresh process."""
    torch.set_num_threads(1)
    return {name: medians(name, rounds) for name in MODELS}


# -------------------------------------------------------------------------------------------------------- tables


def share(run: Medians, name: str, way: str) -> float:
    """A way's time, of autocast's."""
    return run[name][way] / run[name]["autocast"]


def mean_share(run: Medians, way: str) -> float:
    """Geometric mean of a way's shares over the models of a run."""
    return statistics.geometric_mean(share(run, name, way) for name in run)


def text(run: Medians) -> str:
    """One run: a line for each model, and the mean."""
    rows = [[name, *(f"{share(run, name, way):.3f}" for way in WAYS)] for name in run]
    rows.append(["geometric mean", *(f"{mean_share(run, way):.3f}" for way in WAYS)])
    times = [f"{row['autocast'] * 1e6:.0f}" for row in run.values()] + [""]
    rows = [[*row, taken] for row, taken in zip(rows, times, strict=True)]
    return results.as_table(rows, ("step / autocast's", *WAYS, "autocast, us"))


def table(data: Mapping[str, Sequence[Medians]]) -> str:
    """Every machine: the least and the most that its runs gave; where a goal is missed, by which models."""
    rows, missed = [], []
    for machine, runs in data.items():
        heading = f"{machine}, {len(runs)} {'run' if len(runs) == 1 else 'runs'}"
        rows.append([heading, *(_span([mean_share(run, way) for run in runs]) for way in WAYS if way != "autocast")])
        for name in runs[0]:
            rows.append([name, *(_span([share(run, name, way) for run in runs]) for way in WAYS if way != "autocast")])
        missed += [line for way in GOALS if (line := _missed(machine, runs, way))]
    goals = ["goal", *(f"{GOALS[way]:.2f}" if way in GOALS else "" for way in WAYS if way != "autocast")]
    headers = ("step / autocast's", *(way for way in WAYS if way != "autocast"))
    verdict = f"Missed: {'; '.join(missed)}." if missed else "Every goal is met."
    wrapped = textwrap.fill(verdict, 120, break_long_words=False, break_on_hyphens=False)
    return f"{results.as_table([*rows, goals], headers)}\n\n{wrapped}"


def _missed(machine: str, runs: Sequence[Medians], way: str) -> str:
    """ "" where the middle of the runs meets the goal."""
    middle = statistics.median(mean_share(run, way) for run in runs)
    if middle <= GOALS[way]:
        return ""
    above = [name for name in runs[0] if statistics.median(share(run, name, way) for run in runs) > GOALS[way]]
    return f"{way} on a {machine}: {middle:.2f}, goal {GOALS[way]}; above it {', '.join(above)}"


def _span(values: Sequence[float]) -> str:
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="host", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1, help="each in a process of its own; default: 1")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"steps of each way in a run; default: {ROUNDS}")
    results.add_save(parser, "host")
    typed = list(sys.argv[1:] if arguments is None else arguments)
    given = parser.parse_args(typed)
    if min(given.runs, given.rounds) < 1:
        parser.error("--runs and --rounds are counts: 1 or more")
    start = time.perf_counter()
    found: list[Medians] = []
    context = multiprocessing.get_context("spawn")
    for _ in range(given.runs):
        with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
            found.append(pool.submit(one_run, given.rounds).result())
        print(f"{text(found[-1])}\n", flush=True)
    if given.save:
        data = _with_other_machines(given.save, found)
        results.save(results.make("tools/host", typed, data, time.perf_counter() - start), given.save)


def _with_other_machines(path: Any, found: list[Medians]) -> dict[str, list[Medians]]:
    """What a file says of other machines stays; of this one it is replaced."""
    before = results.load(path)
    return {**(before["data"] if before else {}), results.machine(): found}
