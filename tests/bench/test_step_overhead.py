"""Host time of one training step on tiny tensors, every way interleaved in one run; and of a conversion.

    pytest tests/bench --benchmark-only -s

`tools/host` prints the table of ratios.
"""

import pytest
import torch

import fxamp
from fxamp.counting import host
from fxamp.counting.zoo.language import GPT2

pytest.importorskip("pytest_benchmark")

ROUNDS = 30


@pytest.mark.parametrize("name", host.MODELS)
def test_step(benchmark, name):
    timed = host.steps(name)
    times: dict[str, list[float]] = {way: [] for way in timed}
    benchmark.pedantic(host.one_round, args=(timed, times), rounds=ROUNDS, warmup_rounds=host.WARM_UP)
    middle = host.middles(times)
    benchmark.extra_info.update({way: round(value / middle["autocast"], 3) for way, value in middle.items()})


@pytest.mark.parametrize("depth", [6, 24, 96])
def test_conversion(benchmark, depth):
    model, tokens = GPT2(16, 8, depth, 2, 4), torch.randint(0, 16, (1, 4))
    converted = benchmark.pedantic(
        fxamp.convert, args=(model, host.LOW), kwargs={"example_inputs": (tokens,)}, rounds=2, warmup_rounds=1
    )
    benchmark.extra_info["nodes"] = fxamp.report(converted).total_nodes
