"""compare: the gradients of the parameters, in fp32 against mixed."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import fxamp
from fxamp.numerics.distance import error_of

FP16, BF16 = torch.float16, torch.bfloat16
X = torch.linspace(-1, 1, 32).reshape(4, 8)


def squares(output):
    return output.float().pow(2).mean()


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 4))


def errors_of_training(model, converted, x, loss_fn=squares):
    """What one backward of each of the two leaves in `.grad`."""
    for each in (model, converted):
        loss_fn(each(x)).backward()
    pairs = zip(model.named_parameters(), converted.parameters(), strict=True)
    return {name: error_of(one.grad, other.grad) for (name, one), other in pairs if one.grad is not None}


@pytest.mark.parametrize("options", [{}, {"level": "strict"}, {"opt_level": "O2"}, {"capture": "dynamo"}], ids=str)
def test_they_are_those_that_a_training_step_sees(options):
    model = small_model()
    converted = fxamp.convert(copy.deepcopy(model), BF16, (X,), **options)
    result = fxamp.compare(model, converted, (X,), squares)
    assert all(parameter.grad is None for parameter in (*model.parameters(), *converted.parameters()))
    expected = errors_of_training(model, converted, X)
    assert {row.name: row.error for row in result.weights} == pytest.approx(expected, rel=1e-6)
    assert max(expected.values()) > 0
    errors = [row.error for row in result.weights]
    assert errors == sorted(errors, reverse=True)


def test_without_a_loss_there_are_none():
    model = small_model()
    result = fxamp.compare(model, fxamp.convert(model, BF16, (X,)), (X,))
    assert result.weights == () and "gradient of" not in str(result)


class HalvesItsWeights(torch.autograd.Function):
    """x * w, whose backward gives the weight half its gradient where that is low."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        total = (gradient * x).sum(0)
        return gradient * w, total if gradient.dtype == torch.float32 else total * 0.5


class Planted(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x):
        return self.last(HalvesItsWeights.apply(self.first(x), self.scale))


def test_a_wrong_sum_for_a_weight_is_named_though_every_value_and_its_gradient_are_right():
    model = Planted()
    converted = fxamp.convert(copy.deepcopy(model), BF16, (X,), overrides={"halves_its_weights": "allow"})
    result = fxamp.compare(model, converted, (X,), squares)
    assert all(row.error < 0.02 and row.gradient < 0.02 for row in result.rows)
    worst, *others = result.weights
    assert worst.name == "scale" and worst.error == pytest.approx(0.5, abs=0.02)
    assert worst.introduced == pytest.approx(0.5, abs=0.03)
    assert all(row.error < 0.02 for row in others)
    assert len(worst.readers) == 1 and worst.readers[0] in {row.name for row in result.rows}
    table = str(result).split("gradient of", 1)[1].splitlines()
    assert table[2].startswith("scale") and worst.readers[0] in table[2]


def test_a_gradient_that_is_flushed_is_lost_and_the_scale_brings_it_back():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    converted = fxamp.convert(copy.deepcopy(model), FP16, (X,))
    tiny = lambda output: output.float().mean() * 1e-8  # noqa: E731
    lost = {row.name: row for row in fxamp.compare(model, converted, (X,), tiny).weights}
    assert lost["0.weight"].error == lost["0.weight"].flushed == 1.0 and lost["0.weight"].norm > 0
    kept = fxamp.compare(model, converted, (X,), tiny, scale=2.0**24).weights
    assert all(row.error < 0.01 and row.flushed == 0 for row in kept)


def test_an_overflown_gradient_is_infinitely_wrong_and_still_json():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    converted = fxamp.convert(copy.deepcopy(model), FP16, (X,))
    result = fxamp.compare(model, converted, (X,), squares, scale=2.0**40)
    assert math.isinf(result.weights[0].error)
    assert json.loads(json.dumps(result.as_dict()))["weights"][0]["error"] == "inf"


class Odd(nn.Module):
    """A frozen weight, an unused one, a tied one, a sparse gradient and a module that is called whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 8, sparse=True)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.one, self.same = nn.Linear(8, 8), nn.Linear(8, 8)
        self.same.weight = self.one.weight

    def forward(self, tokens):
        hidden, _ = self.lstm(self.frozen(self.table(tokens)))
        return self.same(self.one(hidden).relu())


def test_every_kind_of_weight_has_its_row_or_none():
    model, tokens = Odd(), torch.arange(8).reshape(2, 4)
    converted = fxamp.convert(copy.deepcopy(model), BF16, (tokens,))
    rows = {row.name: row for row in fxamp.compare(model, converted, (tokens,), squares).weights}
    assert set(rows) == {
        "table.weight",
        *(f"lstm.{name}_{kind}_l0" for name in ("weight", "bias") for kind in ("ih", "hh")),
        *("one.weight", "one.bias", "same.bias"),
    }
    assert all(row.norm > 0 and row.error < 0.05 and row.readers for row in rows.values())
    assert len(rows["one.weight"].readers) == 2 and len(rows["lstm.weight_ih_l0"].readers) == 1


def test_a_weight_whose_gradient_one_run_alone_has_counts_as_lost():
    class Cut(nn.Module):
        """Detaches its second branch where it is low."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.one(x).float() + CutsLow.apply(self.two(x))

    class CutsLow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient if gradient.dtype == torch.float32 else None

    model = Cut()
    converted = fxamp.convert(copy.deepcopy(model), BF16, (X,), overrides={"cuts_low": "allow"})
    rows = {row.name: row for row in fxamp.compare(model, converted, (X,), squares).weights}
    assert rows["two.weight"].error == rows["two.weight"].flushed == 1.0
    assert rows["one.weight"].error < 0.02


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_a_sparse_gradient_is_watched_like_any_other(loss_scale):
    model = nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Linear(8, 8))
    tokens = torch.tensor([[1, 1, 3, 5]])
    converted = fxamp.convert(copy.deepcopy(model), BF16, (tokens,))
    assert fxamp.find_nan(converted, (tokens,), squares) is None
    rows = fxamp.compare(model, converted, (tokens,), squares, loss_scale).weights
    (table,) = (row for row in rows if row.name == "0.weight")
    assert table.error < 0.02 and table.flushed == 0
    bad = fxamp.find_nan(converted, (tokens,), lambda output: output[0, 0, 0].float().sqrt() * math.nan)
    assert bad is not None


class Attention(nn.Module):
    """The bias of its keys moves every score of a row alike, which a softmax does not see."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.queries, self.keys, self.values = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(self.queries(x), self.keys(x), self.values(x))


def test_gradients_that_are_rounding_alone_come_last_and_are_called_so():
    model, x = Attention(), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    converted = fxamp.convert(copy.deepcopy(model), BF16, (x,))
    result = fxamp.compare(model, converted, (x,), squares)
    *rows, last = result.weights
    assert last.name == "keys.bias" and last.cancels and last.error > 1 and last.share < 1e-3
    assert not any(row.cancels for row in rows) and max(row.error for row in rows) < 0.05
    assert str(result).splitlines()[-1].split()[:2] == ["keys.bias", "cancels"]


def test_a_large_error_in_what_matters_does_not_cancel():
    model = Planted()
    converted = fxamp.convert(copy.deepcopy(model), BF16, (X,), overrides={"halves_its_weights": "allow"})
    with torch.no_grad():
        converted.scale.copy_(-model.scale)  # its weights' gradients are another model's
    worst = fxamp.compare(model, converted, (X,), squares).weights[0]
    assert not worst.cancels and worst.share > 0.01


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.large, self.small = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.large(x), self.small(x)


def test_a_wrong_gradient_of_a_part_that_hardly_counts_does_not_cancel():
    model = TwoParts()
    converted = fxamp.convert(copy.deepcopy(model), BF16, (X,))
    with torch.no_grad():
        for parameter in converted.small.parameters():
            parameter.mul_(-3)
    loss_fn = lambda outputs: squares(outputs[0]) + 1e-4 * squares(outputs[1])  # noqa: E731
    rows = fxamp.compare(model, converted, (X,), loss_fn).weights
    assert {row.name for row in rows[:2]} == {"small.weight", "small.bias"}
    assert not any(row.cancels for row in rows) and min(row.error for row in rows[:2]) > 1
    assert max(row.share for row in rows[:2]) < 1e-3
