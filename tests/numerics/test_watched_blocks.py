"""Blocks that are converted by themselves, around which no graph holds the forward: they are watched all the same."""

import pytest
import torch
from torch import nn

import fxamp

X = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale = 1.0

    def forward(self, x):
        h = self.a(x) * self.scale
        return x + self.b(torch.softmax((h @ h.t()) * 1e-6, -1))


class Net(nn.Module):
    """Dynamo gives up this frame."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if float(x.detach().abs().sum()) > 1e9:
                x = x * 2
        return x


@pytest.mark.parametrize("is_called_before", [True, False])
@pytest.mark.parametrize("place", [0, 2])
def test_an_overflow_in_a_block_is_named(place, is_called_before):
    model = Net()
    converted = fxamp.convert(model, torch.float16, boundaries="blocks")
    if is_called_before:
        converted(X).sum().backward()
    converted.blocks[place].scale = 300.0
    message = rf"(?s)matmul.*in module blocks\.{place}\n.*makes this forward finite"
    with pytest.raises(FloatingPointError, match=message), fxamp.watch_nan(converted):
        converted(X).sum().backward()


def test_a_step_that_is_finite_is_as_it_is_without_a_watch():
    converted = fxamp.convert(Net(), torch.float16, boundaries="blocks")
    expected = converted(X)
    with fxamp.watch_nan(converted) as watch:
        assert torch.equal(converted(X), expected)
    assert watch.found is None and torch.equal(converted(X), expected)


def test_what_looks_at_graphs_alone_says_what_to_ask():
    converted = fxamp.convert(Net(), torch.float16, boundaries="blocks", example_inputs=(X,))
    with pytest.raises(fxamp.OptionError, match=r"Its blocks have graphs: ask one of them, or have fxamp\.watch_nan"):
        fxamp.find_nan(converted, (X,))
    converted.blocks[1].scale = 300.0
    assert fxamp.find_nan(converted.blocks[1], (X,)).op == "matmul"
