"""Conversion time grows with the model, not with its square."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxamp.model.codegen import compile_graph
from fxamp.passes.base import run_passes
from fxamp.passes.verify import ALWAYS
from tests.language import CAST, COLOUR, INFER_TYPES, NORMALISE, SETTLE_WRITES, captured
from tests.passes.test_verify import TransformerBlock
from tests.work import lines


class Writer(nn.Module):
    """Forty-odd nodes that write into one storage, which is read low after every write."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        for _ in range(10):
            x = x.add_(F.relu(self.fc(x)))
        return x


def lines_per_node(block, count):
    """Of rules, cut, casts and code; capture and types are not counted."""
    module = nn.Sequential(*(block() for _ in range(count)))
    setting = captured(lambda m, x: m(x), torch.rand(2, 4, 16), module=module, preview=True)
    nodes = len(setting.graph.nodes)
    run_passes(setting.graph, (INFER_TYPES(setting),))

    def passes():
        run_passes(setting.graph, [s(setting) for s in (NORMALISE, SETTLE_WRITES, COLOUR, CAST)], ALWAYS)
        compile_graph(setting.graph, setting.captured.root, {})

    return lines(passes) / nodes


@pytest.mark.parametrize("block", [TransformerBlock, Writer])
def test_work_per_node_does_not_grow(block):
    lines_per_node(block, 2)  # what is loaded and cached once
    few, many = lines_per_node(block, 6), lines_per_node(block, 96)
    assert many <= 1.5 * few, f"{few:,.0f} lines executed a node in 6 blocks, {many:,.0f} in 96"
