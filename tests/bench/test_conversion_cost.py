"""Conversion grows with the graph and no faster."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import fxamp
from fxamp.counting.zoo.language import GPT2
from tests.work import lines

TOKENS = torch.zeros(1, 4, dtype=torch.long)


def model(depth: int) -> GPT2:
    return GPT2(16, 8, depth, 2, 4)


def convert(depth: int) -> tuple[int, int]:
    """Lines executed, and nodes."""
    built, converted = model(depth), []
    work = lines(lambda: converted.append(fxamp.convert(built, torch.bfloat16, example_inputs=(TOKENS,))))
    return work, fxamp.report(converted[0]).total_nodes


def trace_and_propagate(depth: int) -> int:
    """Lines of torch.fx's own symbolic tracing and fake tensor propagation of the same model."""
    built = model(depth)

    def run() -> None:
        traced = fx.symbolic_trace(built)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            FakeTensorProp(traced, mode).propagate(TOKENS)

    return lines(run)


def test_96_blocks_cost_per_node_what_6_do_and_little_more_than_tracing():
    convert(2)  # what is loaded and cached once
    small, large = convert(6), convert(96)
    assert large[0] / large[1] <= 1.5 * small[0] / small[1], f"lines executed and nodes: {small}, {large}"
    assert large[0] <= 4 * trace_and_propagate(96)


@pytest.mark.parametrize("depth", [6, 24, 96])
def test_conversion_time(benchmark, depth):
    benchmark.pedantic(convert_once, setup=lambda: ((model(depth),), {}), rounds=3)


def convert_once(built: GPT2) -> None:
    fxamp.convert(built, torch.bfloat16, example_inputs=(TOKENS,))
