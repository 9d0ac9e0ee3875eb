"""A bad gradient that an op of the model takes back is no finding where float32 has it too, and explains no other."""

import pytest
import torch
from torch import nn

import fxamp
from fxamp.numerics.run import call_of, in_float32
from fxamp.numerics.watcher import watch_flow

FP16 = torch.float16
X = torch.linspace(-1.5, 1.5, 64).reshape(4, 16)


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.function = function

    def forward(self, x):
        return self.b(self.function(self.a(x)))


TAKEN_BACK = {
    "sqrt of relu": lambda h: torch.sqrt(torch.relu(h)),
    "where": lambda h: torch.where(h > 0.0, torch.sqrt(torch.clamp(h, min=0.0) * (h > 0.0)), h),
    "acos": lambda h: torch.acos(torch.clamp(h * 4.0, -1.0, 1.0) * (h.abs() < 0.2)) + torch.sqrt(torch.relu(h)),
}


def small(output):
    return output.float().square().mean()


def too_large(output):
    """Of a gradient that float16 does not hold and float32 does."""
    return (output.float() * 100.0).square().sum() * 50.0


def made(function, **options):
    torch.manual_seed(1)
    model = Net(function)
    return fxamp.convert(model, FP16, (X,), pad_to=0, **options)


def told(model, loss):
    """(find_nan's answer, watch_nan's, whether the parameters' gradients are finite)"""
    model.zero_grad()
    with fxamp.watch_nan(model, raises=False) as watch:
        loss(model(X)).backward()
    is_finite = all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    return fxamp.find_nan(model, (X,), loss), watch.found, is_finite


@pytest.mark.parametrize("options", [{}, {"opt_level": "O2"}, {"capture": "dynamo"}], ids=str)
@pytest.mark.parametrize("function", TAKEN_BACK.values(), ids=TAKEN_BACK)
def test_what_float32_has_too_and_takes_back_is_no_finding(function, options):
    torch._dynamo.reset()
    model = made(function, **options)
    call = call_of(model, (X,))
    assert not watch_flow(call, small).is_finite, "there is something to take back"
    assert not watch_flow(call, small, in_float32(call), as_float32=True).is_finite, "in float32, and at O2, too"
    assert told(model, small) == (None, None, True)


@pytest.mark.parametrize("options", [{}, {"opt_level": "O2"}, {"capture": "dynamo"}], ids=str)
@pytest.mark.parametrize("function", TAKEN_BACK.values(), ids=TAKEN_BACK)
def test_it_explains_nothing_of_a_loss_scale_that_is_too_large(function, options):
    torch._dynamo.reset()
    found, watched, is_finite = told(made(function, **options), too_large)
    assert not is_finite and found == watched
    assert (found.phase, found.is_bad_in_float32) == ("backward", False)
    assert found.op == "to" and "linear_1's gradient" in found.value
    assert "use a smaller loss scale" in found.remedy


def test_the_float32_run_of_low_weights_has_gradients():
    for options in ({}, {"opt_level": "O2"}):
        call = call_of(made(torch.relu, **options), (X,))
        (flow,) = watch_flow(call, small, in_float32(call), as_float32=True).parts
        assert "a_weight" in {value for value, _ in flow.edges}, options


def test_a_deny_mends_what_overflows_beside_it():
    def function(h):
        large = (h * 0.01 + 1.0) * 40000.0
        return torch.sqrt(torch.relu(h)) + (large + large) * 1e-3

    model = made(function, level="aggressive")
    found = fxamp.find_nan(model, (X,), small)
    assert found.phase == "forward" and not found.is_bad_in_float32 and found.overrides
    mended = made(function, level="aggressive", overrides=found.overrides)
    assert told(mended, small) == (None, None, True)


def test_what_only_low_precision_takes_back_is_named_and_stops_no_training():
    """It overflows on its way to what relu's backward sets to zero."""

    def function(h):
        return torch.relu(h - 100.0) * 1000.0 + h

    found, watched, is_finite = told(made(function, level="aggressive"), lambda output: output.sum() * 300.0)
    assert is_finite and watched is None
    assert found.phase in ("backward", "sum of gradients") and not found.is_bad_in_float32


def test_a_slope_that_reaches_the_parameters_in_low_precision_alone_is_one_of_precision():
    """What float16 rounds to zero gets the slope of sqrt there; clamp, at its bound, hands it on."""

    def function(h):
        return torch.sqrt(torch.clamp(h * 1e-3 * 1e-3 * 1e-3, min=0.0))

    low = dict.fromkeys(("mul", "mul_1", "mul_2", "clamp"), "allow")
    found, watched, is_finite = told(made(function, overrides=low), small)
    assert not is_finite and found == watched
    assert (found.op, found.is_bad_in_float32) == ("sqrt", False)


def test_the_gradients_of_a_module_with_hooks_count():
    """Its parameters are inside; no edge of the graph shows them."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, output: None)
    whole = nn.ModuleList([model])

    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = whole

        def forward(self, x):
            return (self.parts[0](x) * 0.0).sqrt()

    found, watched, is_finite = told(fxamp.convert(Hooked(), FP16, (X,), capture="symbolic", pad_to=0), small)
    assert not is_finite and found == watched and found.is_bad_in_float32
    assert (found.op, found.phase) == ("sqrt", "backward")


@pytest.mark.parametrize("is_taken_back", [True, False])
def test_a_gradient_that_crosses_a_graph_break(is_taken_back):
    torch._dynamo.reset()

    class Broken(Net):
        def forward(self, x):
            h = torch.relu(self.a(x)) if is_taken_back else self.a(x) * 0.0
            torch._dynamo.graph_break()
            return self.b(h.sqrt())

    torch.manual_seed(1)
    found, watched, is_finite = told(fxamp.convert(Broken(None), FP16, (X,), capture="dynamo", pad_to=0), small)
    assert is_finite is is_taken_back and found == watched
    assert (found is None) is is_taken_back
    assert found is None or (found.op, found.is_bad_in_float32) == ("sqrt", True)


def test_the_parameters_of_a_module_between_two_graphs_count():
    """No graph shows them: what goes into an input of the second one, and not on into the first, is theirs."""
    torch._dynamo.reset()

    class Between(Net):
        def forward(self, x):
            h = torch.relu(self.a(x))
            return self.b((torch._dynamo.disable(self.function)(h) * 0.0).sqrt())

    torch.manual_seed(1)
    model = fxamp.convert(Between(nn.Linear(16, 16)), FP16, (X,), capture="dynamo", pad_to=0)
    model.a.requires_grad_(False)
    model.b.requires_grad_(False)
    found = fxamp.find_nan(model, (X,), small)
    assert (found.op, found.phase, found.is_bad_in_float32) == ("sqrt", "backward", True)
