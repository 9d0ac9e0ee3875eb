"""Models that differentiate or vmap in forward (forces from an energy, a penalty): every instrument works on them."""

import pytest
import torch
from torch import nn

import fxamp

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Forces(nn.Module):
    """The gradient of an energy with respect to the input."""

    ops = "linear", "softplus"

    def __init__(self, factor=1.0):
        super().__init__()
        self.energy, self.factor = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1)), factor

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.energy(x) * self.factor
        (force,) = torch.autograd.grad(energy.sum() / self.factor, x, create_graph=True)
        return force


class Transformed(nn.Module):
    ops = "linear", "add"

    def __init__(self, shift=0.0):
        super().__init__()
        self.first, self.last, self.shift = nn.Linear(8, 8), nn.Linear(8, 8), shift

    def forward(self, x):
        x = torch.vmap(lambda row: torch.tanh(self.first(row)))(x) + self.first(x)
        return self.last(x + torch.func.grad(lambda v: torch.sqrt(v + 10 - self.shift).sum())(x))


def loss_of(force):
    return force.float().square().mean()


@pytest.fixture(params=[Forces, Transformed])
def pair(request):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = request.param()
    return model, fxamp.convert(model, torch.float16, (X,))


@pytest.mark.parametrize("loss_fn", [None, loss_of])
def test_a_healthy_model_has_no_finding(pair, loss_fn):
    model, converted = pair
    assert fxamp.find_nan(converted, (X,), loss_fn) is None
    found = fxamp.compare(model, converted, (X,), loss_fn)
    assert found.output < 1e-2 and {*model.ops} <= {row.op for row in found.rows}
    assert (found.loss is None) is (loss_fn is None)
    assert fxamp.profile(model, [(X,)], loss_fn, progress=False).nodes
    assert fxamp.find_deny(model, converted, (X,), 1e-6, progress=False).is_met


def test_audit_reads_it(pair):
    assert {finding.pattern for finding in fxamp.audit(pair[0], (X,)).findings} <= {"gemm"}


def test_a_watched_step_trains(pair):
    _, converted = pair
    with fxamp.watch_nan(converted):
        loss_of(converted(X)).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in converted.parameters())
    assert next(converted.parameters()).grad.any()


def test_an_overflow_of_the_energy_is_named():
    torch.manual_seed(0)
    model = Forces(6e4)
    with torch.no_grad():
        model.energy[2].bias.fill_(8.0)
    converted = fxamp.convert(model, torch.float16, (X,), level="aggressive", overrides={"mul": "allow"})
    found = fxamp.find_nan(converted, (X,))
    assert found is not None and found.name == "mul", str(found)


def test_what_a_transform_makes_of_its_input_is_named_by_its_result():
    torch._dynamo.reset()
    torch.manual_seed(0)
    found = fxamp.find_nan(fxamp.convert(Transformed(100.0), torch.float16), (X,))
    assert found is not None and "test_derivatives.py" in str(found) and "float32 run is not finite" in str(found)
