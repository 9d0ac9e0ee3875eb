"""What an unlisted function stands between: a difference of probabilities, and a logarithm."""

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
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.rand(8))
        self.register_buffer("bound", torch.tensor([1e-9]))

    def forward(self, x):
        middle = self.layer(x) + self.shift
        difference = torch.sigmoid(middle + 0.5) - torch.sigmoid(middle - 0.5)
        return -LowerBound.apply(difference, self.bound).log().mean()


def gradients(run, model, x):
    model.zero_grad()
    run(x).backward()
    return model.shift.grad.clone()


@pytest.mark.parametrize("seed", range(3))
def test_what_leads_to_a_logarithm_through_a_function_of_one_s_own_is_float32(seed):
    torch.manual_seed(seed)
    model, x = Likelihood(), torch.randn(64, 8)
    converted = fxamp.convert(model, dtype=torch.bfloat16, example_inputs=(x,))

    def under_autocast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    exact = gradients(model, model, x)
    ours, theirs = gradients(converted, model, x), gradients(under_autocast, model, x)
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()
    assert {row.dtype for row in fxamp.report(converted).rows if row.op in ("sigmoid", "sub")} == {"float32"}
