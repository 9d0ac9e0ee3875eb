"""Host time of one training step on tiny tensors, every way interleaved in one run; and of a conversion.

    pytest tests/bench --benchmark-only -s

Run `python tests/bench/test_step_overhead.py` for the table alone.
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.counting.zoo.language import GPT2
from fxamp.counting.zoo.vision import ResNet
from fxamp.passes.pack import PackWeights

LOW = torch.bfloat16
WAYS = ("fp32", "autocast", "plain casts", "O1", "O2", "half")
ROUNDS = 30


class MLP(nn.Module):
    """Forty layers."""

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
        return self.head(h)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "mlp": lambda: (MLP(), (torch.randn(2, 8),)),
    "resnet": lambda: (ResNet((2, 2, 2), 4, 8), (torch.randn(2, 3, 16, 16),)),
    "transformer": lambda: (GPT2(16, 8, 8, 2, 4), (torch.randint(0, 16, (1, 4)),)),
    "lstm cells": lambda: (Cells(), (torch.randn(20, 1, 8),)),
}


def steps(name: str) -> dict[str, Callable[[], None]]:
    """One training step (forward, loss, backward) of a model in each way."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()

    def converted(**options) -> nn.Module:
        return fxamp.convert(copy.deepcopy(model), LOW, example_inputs=inputs, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackWeights, "apply", lambda self, graph: False)
        plain = converted()
    o1, o2 = converted(), converted(opt_level="O2")
    half = copy.deepcopy(model).to(LOW)
    halved = tuple(given.to(LOW) if given.is_floating_point() else given for given in inputs)
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "fp32": lambda: model(*inputs),
        "autocast": lambda: _under_autocast(model, inputs),
        "plain casts": lambda: plain(*inputs),
        "O1": lambda: o1(*inputs),
        "O2": lambda: o2(*inputs),
        "half": lambda: half(*halved),
    }
    return {way: lambda run=run: run().float().sum().backward() for way, run in runs.items()}


def _under_autocast(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with torch.autocast("cpu", LOW):
        return model(*inputs)


def one_round(timed: dict[str, Callable[[], None]], times: dict[str, list[float]]) -> None:
    for way, step in timed.items():
        start = time.thread_time()
        step()
        times[way].append(time.thread_time() - start)


def medians(name: str, rounds: int = ROUNDS) -> dict[str, float]:
    """Median seconds of the CPU in a step, in each way, taken in turns; other processes do not count."""
    timed = steps(name)
    times: dict[str, list[float]] = {way: [] for way in timed}
    for _ in range(rounds + 5):
        one_round(timed, times)
    return {way: statistics.median(found[5:]) for way, found in times.items()}


@pytest.mark.parametrize("name", MODELS)
def test_step(benchmark, name):
    timed = steps(name)
    times: dict[str, list[float]] = {way: [] for way in timed}
    benchmark.pedantic(one_round, args=(timed, times), rounds=ROUNDS, warmup_rounds=5)
    middle = {way: statistics.median(found[5:]) for way, found in times.items()}
    benchmark.extra_info.update({way: round(value / middle["autocast"], 3) for way, value in middle.items()})


@pytest.mark.parametrize("depth", [6, 24, 96])
def test_conversion(benchmark, depth):
    model, tokens = GPT2(16, 8, depth, 2, 4), torch.randint(0, 16, (1, 4))
    converted = benchmark.pedantic(
        fxamp.convert, args=(model, LOW), kwargs={"example_inputs": (tokens,)}, rounds=2, warmup_rounds=1
    )
    benchmark.extra_info["nodes"] = fxamp.report(converted).total_nodes


def main() -> None:
    """Print the table of ratios to autocast, with geometric means."""
    torch.set_num_threads(1)
    rows = {name: medians(name, 60) for name in MODELS}
    print(f"{'step / autocast':16}" + "".join(f"{way:>13}" for way in WAYS) + "   autocast, us")
    for name, row in rows.items():
        shares = "".join(f"{row[way] / row['autocast']:13.3f}" for way in WAYS)
        print(f"{name:16}{shares}{row['autocast'] * 1e6:12.0f}")
    means = (statistics.geometric_mean([row[way] / row["autocast"] for row in rows.values()]) for way in WAYS)
    print(f"{'geometric mean':16}" + "".join(f"{mean:13.3f}" for mean in means))


if __name__ == "__main__":
    main()
    sys.exit()
