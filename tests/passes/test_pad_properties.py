"""Random chains of GEMMs of any size: padded or not, a step is the same."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import fxamp
from fxamp import ir
from tests.passes.pad_models import (
    Attention,
    Head,
    Unet,
    assert_equal_in_float64,
    check,
    numbers,
    smoothed,
    whole_numbers,
    words,
)

SIZES = st.integers(1, 130)
# Exact on whole numbers; `None` stands for an op that reads the slice.
EXACT = {
    "relu": torch.relu,
    "abs": torch.abs,
    "neg": torch.neg,
    "double": lambda y: y * 2,
    "clamp": lambda y: y.clamp(-3, 5),
    "in place": lambda y: functional.hardtanh(y, -2, 2, inplace=True),
    "residual": lambda y: y + torch.relu(y),
    "flip": lambda y: y.flip(-1),
    "shift": lambda y: y + 1,
}
SMOOTH = {
    "gelu": functional.gelu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
    "gate": lambda y: y * torch.sigmoid(y),
    "softmax": lambda y: y.softmax(-1),
}


class Chain(nn.Module):
    """GEMMs with ops between: linear layers, or convolutions of one pixel."""

    def __init__(self, widths, bias, ops, conv=False):
        super().__init__()
        pairs = itertools.pairwise(widths)
        make = (lambda i, o: nn.Conv1d(i, o, 1, bias=bias)) if conv else (lambda i, o: nn.Linear(i, o, bias=bias))
        self.layers, self.ops = nn.ModuleList(make(*pair) for pair in pairs), ops

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x = self.ops[number](x) if number < len(self.ops) else x
        return x


chains = st.tuples(
    st.lists(SIZES, min_size=2, max_size=4), st.booleans(), st.lists(st.sampled_from(sorted(EXACT)), max_size=3)
)


@settings(deadline=None, max_examples=60)
@given(chain=chains, rows=st.integers(1, 9), dtype=st.sampled_from([torch.bfloat16, torch.float16]), conv=st.booleans())
def test_a_chain_is_exact_and_pays_one_pad_and_one_slice(chain, rows, dtype, conv):
    widths, bias, names = chain
    if conv:
        names = [name for name in names if name != "flip"]
    model = whole_numbers(Chain(widths, bias, [EXACT[name] for name in names], conv))
    x = numbers(rows, widths[0], 2) if conv else numbers(rows, widths[0])
    run = check(model, x, dtype=dtype)
    breaks = sum(name == "flip" for name in names[: len(widths) - 2])
    assert len(run.activation_pads()) <= 1 + breaks
    assert len(run.parts()) <= 1 + breaks
    if not widths[-1] % 8 and not breaks:
        assert not run.parts()
    for node in run.graph.nodes:
        note = ir.mark(node).pad
        assert note is None or note.state in ("padded", "aligned")
        assert note is None or all(padded % 8 == 0 for _, _, padded in note.dims)
    assert fxamp.convert(run.model) is run.model


@settings(deadline=None, max_examples=20)
@given(
    widths=st.lists(st.integers(1, 130).filter(lambda size: size % 8), min_size=2, max_size=4),
    names=st.lists(st.sampled_from(sorted(SMOOTH)), max_size=3),
)
def test_a_smooth_chain_is_equal_in_float64(widths, names):
    model = Chain(widths, True, [SMOOTH[name] for name in names])
    assert_equal_in_float64(model, torch.randn(3, widths[0], generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Attention(), (numbers(2, 9, 30),)),
        (Unet(), (numbers(2, 3, 8, 8),)),
        (Head(), (words(1009, 2, 9), words(1009, 2, 9))),
        (Head(loss=smoothed), (words(1009, 2, 9), words(1009, 2, 9))),
    ],
    ids=["attention", "unet", "head", "smoothed"],
)
def test_a_model_is_equal_in_float64(model, inputs):
    assert_equal_in_float64(model, *inputs)
