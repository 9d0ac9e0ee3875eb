"""Derivatives that forward takes itself, in a region with gradients of its own: energies, forces, flows."""

import copy

import pytest
import torch
from torch import nn

import fxamp
from fxamp.errors import CaptureError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
LOW = torch.bfloat16
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Energy(nn.Module):
    """The gradient of an energy with respect to the input, which reaches the energy along two ways."""

    def __init__(self, region=torch.enable_grad) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.region = nn.Linear(4, 8), nn.Linear(8, 1), region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.region():
            x = x.detach().requires_grad_(True)
            energy = self.outer(self.inner(x).tanh()).sum() + 0.05 * x.square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return force


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).detach().norm() / exact.detach().norm())


def switched_on():
    return torch.set_grad_enabled(True)


@pytest.mark.parametrize("region", [torch.enable_grad, switched_on])
@pytest.mark.parametrize("how", ["auto", "dynamo", "compile"])
@pytest.mark.parametrize("order", [(False,), (True, False), (False, True), (True, False, True)])
def test_a_derivative_in_forward_is_right_with_and_without_gradients_outside(how, region, order):
    model = Energy(region)
    if how == "compile":
        converted = torch.compile(model, backend="fxamp", options={"dtype": LOW, "inner": "eager"})
    else:
        converted = fxamp.convert(copy.deepcopy(model), dtype=LOW, capture=how)
    for is_on in order:
        with torch.set_grad_enabled(is_on):
            exact = model(X)
            with torch.autocast("cpu", LOW):
                theirs = model(X)
            assert error(converted(X), exact) <= 1.5 * error(theirs, exact), is_on


def test_symbolic_capture_names_what_it_cannot_hold():
    converted = fxamp.convert(Energy(), dtype=LOW, capture="symbolic")
    exact = Energy()(X)
    assert error(converted(X), exact) < 1e-2
    with torch.no_grad(), pytest.raises(CaptureError, match=r"test_enable_grad.py:\d+: forward switches gradients on"):
        converted(X)
    assert error(converted(X), exact) < 1e-2


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_result_with_gradients_of_a_call_without_them_keeps_its_graph(opt_level):
    class Region(Energy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                return self.inner(x)

    model = Region()
    converted = fxamp.convert(copy.deepcopy(model), dtype=LOW, opt_level=opt_level)
    for _ in range(2):
        for each in (model, converted):
            each.zero_grad()
            with torch.no_grad():
                result = each(X)
            assert result.dtype == torch.float32 and result.requires_grad
            result.square().sum().backward()
        assert error(converted.inner.weight.grad.float(), model.inner.weight.grad) < 2e-2


def test_a_way_out_of_no_grad_is_no_way_in():
    """A model with no_grad regions has one graph for both modes of its caller."""

    class Region(Energy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale = x.abs().mean()
            return self.outer(self.inner(x / scale).tanh())

    converted = fxamp.convert(Region(), dtype=LOW, capture="symbolic")
    converted(X).sum().backward()
    with torch.no_grad():
        converted(X)
    assert len(converted._fxamp_engine.all_variants()) == 1


def test_a_cast_is_shared_across_a_region_without_gradients():
    """Only where gradients come on is an earlier cast of no use."""

    class Statistics(Energy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            h = self.inner(x)
            with torch.no_grad():
                scale = self.inner(x).abs().mean()
            return self.outer(h.tanh()) / scale + self.outer(self.inner(x).tanh())

    for capture in ("symbolic", "dynamo"):
        converted = fxamp.convert(Statistics(), dtype=LOW, capture=capture)
        converted(X.requires_grad_())
        assert fxamp.report(converted).casts_to_low == 1


@pytest.mark.parametrize("settings", [{}, {"opt_level": "O2"}, {"capture": "symbolic"}], ids=["O1", "O2", "symbolic"])
def test_what_asks_for_gradients_where_there_are_none_fails_in_torch_s_words(settings, caplog):
    class Penalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return torch.autograd.grad(self.fc(x.requires_grad_()).sum(), x)[0]

    converted = fxamp.convert(Penalised(), dtype=torch.bfloat16, **settings)
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad") as error:
        converted(torch.randn(2, 8))
    assert type(error.value) is RuntimeError and "please report it" not in caplog.text
    assert converted(torch.randn(2, 8)).shape == (2, 8)
