"""Models whose weights are 16-bit by themselves: the float32 run of the tools is one of float32 numbers."""

import copy

import pytest
import torch
from torch import nn

import fxamp
from fxamp.numerics.compare import compare
from fxamp.numerics.distance import error_of
from fxamp.numerics.find import find_nan

FP16, BF16 = torch.float16, torch.bfloat16
LOW = pytest.mark.parametrize("dtype", [FP16, BF16])
CAPTURES = pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
TOKENS = torch.arange(24).reshape(4, 6) % 20
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Table(nn.Module):
    """Takes integers, so that nothing but the weights says in which dtype it runs."""

    def __init__(self, factor=3.0):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.a, self.b, self.factor = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 16), factor

    def forward(self, tokens):
        return self.b((self.a(self.table(tokens)) * self.factor) / self.factor)


class Layers(nn.Module):
    """Layers that are functions in a graph and layers that are called whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(self.norm(self.a(x)).tanh()) + torch.ones(4, dtype=x.dtype)


class Recurrent(Layers):
    """Dynamo makes no graph of it."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(8, 8)

    def forward(self, x):
        return self.b(self.recurrent(self.norm(self.a(x)))[0])


def true_error(model, x):
    with torch.no_grad():
        wide = x.float() if x.is_floating_point() else x
        return error_of(copy.deepcopy(model).float()(wide), model(x))


@LOW
@CAPTURES
def test_compare_with_integer_inputs(dtype, capture, fresh_dynamo):
    model = Table().to(dtype)
    converted = fxamp.convert(copy.deepcopy(model), dtype, capture=capture)
    assert compare(model, converted, (TOKENS,)).output == pytest.approx(true_error(model, TOKENS), rel=1e-3)


@CAPTURES
def test_an_overflow_is_one_of_precision(capture, fresh_dynamo):
    converted = fxamp.convert(Table(1e6).half(), FP16, capture=capture)
    assert not find_nan(converted, (TOKENS,)).is_bad_in_float32
    ranges = fxamp.profile(converted, [TOKENS], lambda output: output.float().pow(2).mean(), progress=False)
    assert ranges.nodes["mul"].values.overflows(FP16)


@LOW
@pytest.mark.parametrize("make, capture", [(Layers, "symbolic"), (Layers, "dynamo"), (Recurrent, "symbolic")])
@pytest.mark.parametrize("train", [True, False])
def test_inputs_of_the_weights_dtype(dtype, make, capture, train, fresh_dynamo):
    model, x = make().to(dtype).train(train), X.to(dtype)
    converted = fxamp.convert(copy.deepcopy(model), dtype, capture=capture)
    before = {name: value.clone() for name, value in converted.state_dict().items()}
    with torch.no_grad():
        exact = copy.deepcopy(model).float()(x.float())
    found = compare(model, converted, (x,), lambda output: output.float().pow(2).mean())
    assert 0 < found.output < 0.1
    assert found.loss[0] == pytest.approx(float(exact.pow(2).mean()), rel=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in converted.state_dict().items())
    ranges = fxamp.profile(converted, [x], lambda output: output.float().pow(2).mean(), progress=False)
    assert ranges.weight_gradients.total
    told = fxamp.find_deny(model, converted, (x,), 1e-9, progress=False)
    assert not told.nodes and "there is nothing to deny, and the error is" in str(told)


@LOW
def test_profile_and_audit_of_a_plain_model(dtype):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to(dtype), X.to(dtype)
    ranges = fxamp.profile(model, [x], progress=False)
    with torch.no_grad():
        largest = float(copy.deepcopy(model)[0].float()(x.float()).abs().max())
    assert ranges.nodes["linear"].values.largest == pytest.approx(largest, rel=1e-6)
    assert str(fxamp.audit(model, (x,)))


@LOW
def test_low_inputs_of_a_float32_model_are_what_the_model_makes_of_them(dtype):
    class Thrice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a = nn.Linear(8, 8)

        def forward(self, x):
            return self.a((x * 3).float())  # rounded to 16 bits, in an fp32 run too

    model, x = Thrice(), X.to(dtype)
    converted = fxamp.convert(copy.deepcopy(model), dtype, (x,))
    with torch.no_grad():
        assert compare(model, converted, (x,)).output == error_of(model(x), converted(x))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_low_inputs_of_a_model_that_is_stored_low(level):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    converted = fxamp.convert(copy.deepcopy(model), FP16, (X,), opt_level=level)
    for x in (X, X.half()):
        assert 0 < compare(model, converted, (x,)).output < 0.01
