"""A difference of probabilities: before a logarithm, with an unlisted function between, and by itself."""

import pytest
import torch
from torch import nn

import fxamp


class LowerBound(torch.autograd.Function):
    """As in image compression (Balle et al. 2018)."""

    @staticmethod
    def forward(ctx, x, bound):
        ctx.save_for_backward(x, bound)
        return torch.max(x, bound)

    @staticmethod
    def backward(ctx, gradient):
        x, bound = ctx.saved_tensors
        return gradient * ((x >= bound) | (gradient < 0)), None


class Likelihood(nn.Module):
    def __init__(self, has_log=True):
        super().__init__()
        self.has_log, self.layer = has_log, nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.rand(8))
        self.register_buffer("bound", torch.tensor([1e-9]))

    def forward(self, x):
        middle = self.layer(x) + self.shift
        difference = torch.sigmoid(middle + 0.5) - torch.sigmoid(middle - 0.5)
        return -LowerBound.apply(difference, self.bound).log().mean() if self.has_log else difference.square().mean()


def gradients(run, model, x):
    model.zero_grad()
    run(x).backward()
    return model.shift.grad.clone()


@pytest.mark.parametrize("has_log", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_difference_of_probabilities_is_float32(seed, has_log):
    torch.manual_seed(seed)
    model, x = Likelihood(has_log), torch.randn(64, 8)
    converted = fxamp.convert(model, dtype=torch.bfloat16, example_inputs=(x,))

    def under_autocast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    exact = gradients(model, model, x)
    ours, theirs = gradients(converted, model, x), gradients(under_autocast, model, x)
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()
    assert {row.dtype for row in fxamp.report(converted).rows if row.op in ("sigmoid", "sub")} == {"float32"}


def test_the_user_may_have_it_low():
    x = torch.randn(64, 8)
    model = fxamp.convert(Likelihood(False), dtype=torch.bfloat16, example_inputs=(x,), overrides={"sub_1": "allow"})
    assert "float32" not in {row.dtype for row in fxamp.report(model).rows if row.op in ("sigmoid", "sub")}


def test_the_other_levels_have_rules_of_their_own():
    """Grappler's: an op between two allow ops is low."""

    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            middle = self.first(x)
            return self.last(torch.tanh(middle) - torch.sigmoid(middle))

    for level, low in (("aggressive", "bfloat16"), ("balanced", "float32")):
        model = fxamp.convert(Between(), dtype=torch.bfloat16, example_inputs=(torch.randn(4, 8),), level=level)
        assert {row.dtype for row in fxamp.report(model).rows if row.op in ("tanh", "sigmoid", "sub")} == {low}
