"""The work of every kind of matrix product is what torch itself counts, and nothing low or high is left out."""

import pytest
import torch
from review_cases import FP16, Two
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import fxamp
from fxamp.review.report import report

X = torch.linspace(-1, 1, 96).reshape(3, 4, 8)


class Net(nn.Module):
    """One layer, given, and a forward as a function of (layer, x)."""

    def __init__(self, layer, function=lambda layer, x: layer(x)):
        super().__init__()
        self.layer = layer
        self.function = function

    def forward(self, x):
        return self.function(self.layer, x)


def counted(model, x=X):
    """What torch's counter sees of a float32 run, with the parts of an RNN one by one."""
    with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        model(x)
    return counter.get_total_flops()


def ours(model, x=X, **more):
    built = report(fxamp.convert(model, FP16, (x,), pad_to=0, **more))
    return sum(gemm.flops for gemm in built.gemms)


LAYERS = {
    "lstm": (nn.LSTM(8, 16), lambda layer, x: layer(x)[0]),
    "lstm, two layers, both ways": (nn.LSTM(8, 16, 2, bidirectional=True, batch_first=True), lambda m, x: m(x)[0]),
    "lstm, projected": (nn.LSTM(8, 16, proj_size=4), lambda layer, x: layer(x)[0]),
    "gru": (nn.GRU(8, 5, 2), lambda layer, x: layer(x)[0]),
    "rnn": (nn.RNN(8, 5, nonlinearity="relu"), lambda layer, x: layer(x)[0]),
    "lstm cell": (nn.LSTMCell(8, 16), lambda layer, x: layer(x[0])[0]),
    "gru cell": (nn.GRUCell(8, 16), lambda layer, x: layer(x[0])),
    "attention": (nn.MultiheadAttention(8, 2), lambda layer, x: layer(x, x, x)[0]),
    "attention over something else": (nn.MultiheadAttention(8, 2, kdim=8, vdim=8), lambda m, x: m(x, x[:2], x[:2])[0]),
    "encoder layer": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), lambda layer, x: layer(x)),
    "einsum of scores": (nn.Linear(8, 8), lambda m, x: torch.einsum("bij,bkj->bik", m(x), m(x))),
    "einsum with a matrix": (nn.Linear(8, 8), lambda m, x: torch.einsum("bij,kj->bik", m(x), m.weight)),
    "einsum with dots": (nn.Linear(8, 8), lambda m, x: torch.einsum("...ij,kj->...ik", m(x), m.weight)),
    "einsum, implicit": (nn.Linear(8, 8), lambda m, x: torch.einsum("bij,jk", m(x), m.weight)),
    "einsum of a list": (nn.Linear(8, 8), lambda m, x: torch.einsum("bij,kj->bik", [m(x), m.weight])),
    "einsum, outer": (nn.Linear(8, 8), lambda m, x: torch.einsum("i,j->ij", m(x)[0, 0], m(x)[0, 1])),
    "tensordot": (nn.Linear(8, 8), lambda m, x: torch.tensordot(m(x), m.weight, dims=([2], [1]))),
    "tensordot of two": (nn.Linear(8, 8), lambda m, x: torch.tensordot(m(x), m(x)[0], dims=2)),
    "multi_dot": (nn.Linear(8, 8), lambda m, x: torch.linalg.multi_dot([m(x)[0], m.weight, m.weight])),
    "mv": (nn.Linear(8, 8), lambda m, x: torch.mv(m.weight, m(x)[0, 0])),
    "addbmm": (nn.Linear(8, 8), lambda m, x: torch.addbmm(m(x)[0, :, :4], m(x), m(x).transpose(1, 2))),
    "inner": (nn.Linear(8, 8), lambda m, x: torch.inner(m(x), m.weight)),
}
UNCOUNTED = {"mv": 2 * 8 * 8, "addbmm": 2 * 3 * 4 * 4 * 8, "encoder layer": 2 * (2 * 4 * 2) * 3 * 3 * 4}
"""What torch's counter leaves out, and is added here."""


@pytest.mark.parametrize("name", LAYERS)
def test_work_is_what_torch_counts(name):
    layer, function = LAYERS[name]
    model = Net(layer, function)
    assert ours(model) == counted(model) + UNCOUNTED.get(name, 0) > 0


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_a_product_over_a_dimension_that_a_call_chooses(capture):
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, dim):
            return torch.tensordot(x, self.layer.weight, dims=([dim], [1]))

    converted = fxamp.convert(Chosen(), FP16, capture=capture)
    converted(X, 2), converted(X, -1)
    assert {gemm.flops for gemm in report(converted).gemms} == {2 * 12 * 8 * 8}


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_a_product_of_nothing_is_no_work(shape):
    model = Net(
        nn.Linear(8, shape[1], bias=False), lambda layer, x: torch.tensordot(x.new_ones(shape), layer.weight, 1)
    )
    assert ours(model) == 0


def test_bilinear_is_its_sum():
    model = Net(nn.Bilinear(8, 8, 5), lambda layer, x: layer(x, x))
    assert ours(model) == 2 * 12 * 5 * 8 * 8


def test_a_high_lstm_lowers_the_coverage():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(8, 8)
            self.head = nn.Linear(8, 8)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    built = report(fxamp.convert(Both(), FP16, (X,), overrides={"rnn": "deny"}))
    assert built.coverage == pytest.approx(1 / 9)  # eight products of 8 x 8 in the LSTM, one in the head
    assert any("89% of GEMM work" in text for text in built.advice)


@pytest.mark.parametrize(
    "layer", [nn.Linear(8, 8), nn.LSTM(8, 8), nn.Conv1d(4, 8, 3, padding=1)], ids=lambda m: type(m).__name__
)
def test_the_work_inside_a_module_that_stays_whole_counts_as_high(layer):
    function = (lambda m, x: m(x)[0]) if isinstance(layer, nn.LSTM) else (lambda m, x: m(x))
    model = Net(layer, function)
    expected = counted(model)
    layer.register_forward_hook(lambda module, args, output: None)
    built = report(fxamp.convert(model, FP16, (X,), capture="symbolic"))
    assert sum(gemm.flops for gemm in built.gemms) == expected
    assert built.coverage == 0.0 and {gemm.precision for gemm in built.gemms} == {"high"}


def test_unaligned_gates_are_named():
    built = report(fxamp.convert(Net(nn.LSTM(8, 5), lambda m, x: m(x)[0]), FP16, (X,), pad_to=0))
    assert any("n = 20 (gates times hidden_size)" in text for gemm in built.gemms for text in gemm.unaligned)


def test_parameters_that_no_graph_reads_are_outside():
    model = Two(lambda m, x: m.a(x))
    built = report(fxamp.convert(model, FP16, (X,)))
    assert [text for text in built.outside if "no graph reads" in text] == [
        "2 parameters (288 B) that no graph reads: b.weight, b.bias. No call has used them so far, or what "
        "uses them runs as it is written"
    ]


def test_parameters_read_inside_whole_modules_or_shared_are_not_outside():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
            self.two.weight = self.one.weight
            self.whole = nn.LSTM(8, 8)
            self.whole.register_forward_hook(lambda module, args, output: None)

        def forward(self, x):
            return F.linear(self.one(self.whole(x)[0]), self.one.weight, self.two.bias)

    built = report(fxamp.convert(Tied(), FP16, (X,)))
    assert not any("no graph reads" in text for text in built.outside)


def test_graphs_of_dynamo_say_what_they_read():
    class Broken(Two):
        def forward(self, x):
            y = self.a(x)
            torch._dynamo.graph_break()
            return self.b(y)

    torch._dynamo.reset()
    converted = fxamp.convert(Broken(None), FP16, capture="dynamo")
    converted(X)
    assert report(converted).outside == ()
    torch._dynamo.reset()
