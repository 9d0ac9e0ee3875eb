"""Layers over images whose sizes the data decides, as vision-language models have them, cost what other layers do."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.capture import symbolic
from fxamp.capture.data import NOTHING_LEFT_OUT, LeftOut
from fxamp.model.engine import engine_of
from tests.work import lines

GRID = torch.tensor([[1, 4, 4], [1, 4, 8], [2, 2, 4]])
ROWS = torch.randn(64, 8)


def ends_of(grid):
    """Where each image ends: there is one for each frame."""
    sizes = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
    return F.pad(sizes.cumsum(0), (1, 0))


class Layer(nn.Module):
    def __init__(self, is_apart) -> None:
        super().__init__()
        self.qkv, self.out, self.is_apart = nn.Linear(8, 24), nn.Linear(8, 8), is_apart

    def forward(self, x, ends):
        query, key, value = self.qkv(x).view(1, -1, 3, 8).unbind(2)
        if not self.is_apart:
            return x + self.out(F.scaled_dot_product_attention(query, key, value)[0])
        lengths = ends[1:] - ends[:-1]
        parts = [torch.split(each, lengths.tolist(), dim=1) for each in (query, key, value)]
        found = [F.scaled_dot_product_attention(*part) for part in zip(*parts, strict=True)]
        return x + self.out(torch.cat(found, dim=1)[0])


class Tower(nn.Module):
    def __init__(self, depth, is_apart=True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(is_apart) for _ in range(depth))

    def forward(self, x, grid):
        ends = ends_of(grid)
        for layer in self.layers:
            x = layer(x, ends)
        return x


def converted(model):
    return fxamp.convert(model, torch.bfloat16, (ROWS, GRID), capture="symbolic")


def work(depth, is_apart=True):
    """Lines executed, and nodes of the graph."""
    model, found = Tower(depth, is_apart), []
    done = lines(lambda: found.append(converted(model)))
    return done, fxamp.report(found[0]).total_nodes


def per_node(few, many):
    return (many[0] - few[0]) / (many[1] - few[1])


def test_each_layer_costs_what_the_one_before_does_and_a_layer_without_images():
    work(1)  # what is loaded and cached once
    few, more, many = work(2), work(6), work(24)
    assert per_node(more, many) < 1.2 * per_node(few, more)
    assert per_node(few, more) < 2 * per_node(work(2, is_apart=False), work(6, is_apart=False))


def test_one_trace_tells_that_sizes_are_open_and_where_they_begin(monkeypatch):
    traced, trace_once = [], symbolic._trace_once
    monkeypatch.setattr(symbolic, "_trace_once", lambda asked: traced.append(asked.left_out) or trace_once(asked))
    model = converted(Tower(2))
    assert traced == [NOTHING_LEFT_OUT, LeftOut((ends_of,), closes=True)]
    assert engine_of(model).left_out == traced[-1]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_images_of_other_sizes_are_laid_out_anew(level):
    torch.manual_seed(0)
    model = Tower(2)
    low = fxamp.convert(copy.deepcopy(model), torch.bfloat16, (ROWS, GRID), level)
    other = torch.tensor([[1, 4, 8], [1, 4, 4], [2, 2, 4]])
    more = torch.tensor([[3, 4, 4], [1, 4, 2], [1, 2, 4]])
    for grid in (GRID, other, more, other, more, GRID):
        expected = model(ROWS, grid)
        assert (low(ROWS, grid) - expected).norm() < expected.norm() * 2**-6
    assert {variant.captured.method for variant in engine_of(low).all_variants()} == {"symbolic"}
