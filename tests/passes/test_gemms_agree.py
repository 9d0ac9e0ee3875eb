"""Two readings of the same products agree: what padding weighs them by, and what a report says of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp import ir
from fxamp.model.engine import engine_of
from fxamp.passes.gemm_types import Gemm
from fxamp.passes.gemms import _TABLE, describe
from fxamp.passes.recurrent_gemms import OPS as RECURRENT
from fxamp.review.gemms import gemms_of

X, Y = torch.randn(2, 6, 8), torch.randn(2, 7, 8)
ROWS, WIDE = torch.randn(4, 8), torch.randn(2, 7, 24)
UNUSED = nn.Linear(8, 8)  # a model has weights, also where its products have none


class Net(nn.Module):
    """A layer, given, and a forward as a function of (layer, *inputs)."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, *inputs):
        return self.function(self.layer, *inputs)


def call(layer, *inputs):
    return layer(*inputs)


def image(dims):
    return torch.randn(2, 8, *range(7, 7 + dims))


PRODUCTS = {
    "addbmm": (UNUSED, lambda _, m, x, y: torch.addbmm(m, x, y.transpose(1, 2)), torch.randn(6, 7), X, Y),
    "addmm": (UNUSED, lambda _, m, a, b: torch.addmm(m, a, b), torch.randn(4, 24), ROWS, torch.randn(8, 24)),
    "baddbmm": (UNUSED, lambda _, m, x, y: torch.baddbmm(m, x, y.transpose(1, 2)), torch.randn(2, 6, 7), X, Y),
    "bilinear": (nn.Bilinear(8, 24, 5), lambda layer, a, b: layer(a, b), ROWS, torch.randn(4, 24)),
    "bmm": (UNUSED, lambda _, x, y: torch.bmm(x, y.transpose(1, 2)), X, Y),
    "conv1d": (nn.Conv1d(8, 16, 3), call, image(1)),
    "conv2d": (nn.Conv2d(8, 16, (3, 2), stride=2, padding=1), call, image(2)),
    "conv3d": (nn.Conv3d(8, 16, 3, dilation=2), call, image(3)),
    "conv_transpose1d": (nn.ConvTranspose1d(8, 16, 3), call, image(1)),
    "conv_transpose2d": (nn.ConvTranspose2d(8, 16, (3, 2), stride=2, padding=1), call, image(2)),
    "conv_transpose3d": (nn.ConvTranspose3d(8, 16, 3), call, image(3)),
    "einsum": (UNUSED, lambda _, x, y: torch.einsum("bij,bkj->bik", x, y), X, Y),
    "gru": (nn.GRU(8, 16, 2, bidirectional=True), lambda layer, x: layer(x)[0], X),
    "gru_cell": (nn.GRUCell(8, 16), call, ROWS),
    "linear": (nn.Linear(8, 24), call, X),
    "lstm": (nn.LSTM(8, 16, 2, proj_size=5), lambda layer, x: layer(x)[0], X),
    "lstm_cell": (nn.LSTMCell(8, 16), lambda layer, x: layer(x)[0], ROWS),
    "matmul": (UNUSED, lambda _, x, y: x @ y.transpose(1, 2), X, Y),
    "mm": (UNUSED, lambda _, a, b: torch.mm(a, b), ROWS, torch.randn(8, 24)),
    "rnn_relu": (nn.RNN(8, 5, nonlinearity="relu"), lambda layer, x: layer(x)[0], X),
    "rnn_relu_cell": (nn.RNNCell(8, 5, nonlinearity="relu"), call, ROWS),
    "rnn_tanh": (nn.RNN(8, 5), lambda layer, x: layer(x)[0], X),
    "rnn_tanh_cell": (nn.RNNCell(8, 5), call, ROWS),
    "scaled_dot_product_attention": (UNUSED, lambda _, q, k, v: F.scaled_dot_product_attention(q, k, v), X, Y, Y),
}
OTHER_SIZES = {
    "attention whose values are wider": (
        UNUSED,
        lambda _, q, k, v: F.scaled_dot_product_attention(q, k, v),
        X,
        Y,
        WIDE,
    ),
    "a stack of matrices times one": (nn.Linear(8, 8), lambda layer, x: x @ layer.weight, X),
    "an einsum with one matrix": (nn.Linear(8, 8), lambda layer, x: torch.einsum("bij,kj->bik", x, layer.weight), X),
    "a sequence, batch first": (nn.LSTM(8, 16, batch_first=True), lambda layer, x: layer(x)[0], X),
}


def test_every_op_with_sizes_is_here():
    assert PRODUCTS.keys() == {*_TABLE, *RECURRENT, "einsum"}


@pytest.mark.parametrize("name", [*PRODUCTS, *OTHER_SIZES])
def test_the_work_that_padding_weighs_is_what_a_report_says(name):
    layer, function, *inputs = {**PRODUCTS, **OTHER_SIZES}[name]
    converted = fxamp.convert(Net(layer, function), torch.bfloat16, tuple(inputs), pad_to=0)
    (variant,) = engine_of(converted).all_variants()
    weighed = {node.name: describe(node) for node in variant.graph.nodes if ir.mark(node).op in {*PRODUCTS}}
    said = dict.fromkeys(weighed, 0)
    for gemm in gemms_of(variant.graph, root=variant.captured.root):
        said[gemm.node] += gemm.flops
    assert {name: 2 * gemm.macs if isinstance(gemm, Gemm) else gemm for name, gemm in weighed.items()} == said
    assert len(said) == 1 and all(said.values())
    assert name in OTHER_SIZES or [ir.mark(node).op for node in variant.graph.nodes if node.name in said] == [name]
