"""watch_nan: a step that goes wrong is run again as it was, and says what find_nan says."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn

import fxamp
from fxamp.numerics import watch as watch_module

FP16 = torch.float16
X = torch.linspace(0.5, 1.5, 32).reshape(4, 8)


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.function = function
        with torch.no_grad():
            self.a.weight.copy_(torch.eye(8))

    def forward(self, x):
        return self.function(self, x)


def low_only(m, x):
    """Past fp16's range, within float32's."""
    y = m.a(x * 30000.0)
    return y + y + y


def everywhere(m, x):
    """Its slope at 0 is infinite in any dtype."""
    return (m.a(x) * 0.0).sqrt()


def told(function, loss=torch.Tensor.mean, x=X, **more):
    """(watch_nan's answer to one step, find_nan's)"""
    torch.manual_seed(0)
    model = fxamp.convert(Net(function), FP16, (x,), pad_to=0, **more)
    torch.manual_seed(1)
    with fxamp.watch_nan(model, raises=False) as watch:
        output = model(x)
        if loss is not None:
            loss(output).backward()
    torch.manual_seed(1)
    return watch.found, fxamp.find_nan(model, (x,), loss)


CASES = {
    "overflow": (low_only, torch.Tensor.mean, False),
    "overflow, a loss that spoils the gradients": (low_only, lambda y: y.square().mean() * 1e-12, False),
    "overflow, no backward": (low_only, None, False),
    "slope": (everywhere, torch.Tensor.mean, True),
    "log": (lambda m, x: (m.a(x) * 0.0).log(), torch.Tensor.mean, True),
    "loss scale": (lambda m, x: m.a(m.norm(m.a(x)).relu()), lambda output: output.sum() * 2.0**30, False),
    "dropout": (lambda m, x: (m.drop(m.a(x * 20000.0)) + 45000.0).abs() + 0.0, torch.Tensor.mean, False),
}


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("function, loss, is_bad", CASES.values(), ids=CASES)
def test_it_says_what_find_nan_says(function, loss, is_bad, capture):
    found, expected = told(function, loss, capture=capture)
    assert found is not None and found == expected, f"{found}\n{expected}"
    assert found.is_bad_in_float32 is is_bad and not found.unknown
    assert ("not a matter of precision" in str(found)) is is_bad
    assert bool(found.overrides) is (found.phase == "forward" and not is_bad)
    torch._dynamo.reset()


def test_the_deny_was_tried():
    found, _ = told(low_only)
    mended = fxamp.convert(Net(low_only), FP16, (X,), pad_to=0, overrides=found.overrides)
    assert bool(mended(X).isfinite().all())


def converted(function, **more):
    torch.manual_seed(0)
    return fxamp.convert(Net(function), FP16, (X,), pad_to=0, **more)


def step_of(model, optimizer, x=X):
    output = model(x)
    output.mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_that_spoils_the_weights_is_told_of_before_it_does():
    model = converted(low_only)
    with fxamp.watch_nan(model, raises=False) as watch:
        step_of(model, torch.optim.SGD(model.parameters(), lr=float("inf")))
        assert not bool(model.a.weight.isfinite().all())
    assert watch.found.is_bad_in_float32 is False and watch.found.overrides and not watch.found.unknown


def test_the_call_and_the_step_are_told():
    model = converted(low_only)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with (
        pytest.raises(FloatingPointError, match="in call 5 of the block, after 3 optimizer steps"),
        fxamp.watch_nan(model),
    ):
        model(X * 1e-3)  # a call without a step
        for number in range(5):
            step_of(model, optimizer, X if number == 3 else X * 1e-3)


def test_of_the_first_call_no_step_is_told():
    model = converted(low_only)
    with fxamp.watch_nan(model, raises=False) as watch:
        model(X)
    assert (watch.found.call, watch.found.steps) == (1, 0)
    assert "in call 1 of the block, before any optimizer step" in str(watch.found)


def test_with_masters_too():
    model = converted(low_only, opt_level="O2")
    with fxamp.watch_nan(model, raises=False) as watch:
        step_of(model, fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), lr=1e3)))
    assert watch.found.is_bad_in_float32 is False and watch.found.overrides and not watch.found.unknown


@pytest.mark.parametrize(
    "spoil, why",
    [
        (lambda model, x: model.a.weight.mul_(2.0), "the weights have been written since"),
        (lambda model, x: x.mul_(2.0), "its inputs have been written since"),
    ],
)
def test_what_cannot_be_tried_any_more_is_said(spoil, why):
    model, x = converted(low_only), X.clone()
    with fxamp.watch_nan(model, raises=False) as watch:
        model(x).mean().backward()
        with torch.no_grad():
            spoil(model, x)
    assert watch.found.name.startswith("add") and watch.found.unknown.startswith(why)
    said = rf"may mend it; another run was not tried: {why}; find_nan with the same weights and inputs tries it"
    with pytest.raises(FloatingPointError, match=said):
        raise FloatingPointError(str(watch.found))
    assert "makes the run finite" not in str(watch.found)


def noisy(m, x):
    return m.drop(m.norm(m.a(x) * 30000.0 + m.a(x) * 30000.0 + m.a(x) * 30000.0))


def test_running_it_again_draws_nothing_and_touches_nothing():
    """Random numbers, buffers, flags and gradients are those of a run that nobody watched."""
    states = []
    for is_watched in (False, True):
        model = converted(noisy)
        torch.manual_seed(7)
        if is_watched:
            with fxamp.watch_nan(model, raises=False) as watch:
                output = model(X)
                assert watch.found is not None, "told between forward and backward, whose graph still stands"
                output.nan_to_num().mean().backward()
        else:
            model(X).nan_to_num().mean().backward()
        state = [*model.state_dict().values(), torch.get_rng_state(), *(p.grad for p in model.parameters())]
        states.append(state)
        assert model.training and model.norm.training
    for plain, watched in zip(*states, strict=True):
        assert plain is watched is None or torch.equal(plain.nan_to_num(), watched.nan_to_num())


def test_buffers_of_the_call_and_not_of_now_are_read():
    class Counting(Net):
        def __init__(self):
            super().__init__(None)
            self.register_buffer("size", torch.tensor(1.0))

        def forward(self, x):
            self.size.mul_(1e30)
            return low_only(self, x) + self.size * 0.0

    model = fxamp.convert(Counting(), FP16, (X,), pad_to=0)
    with fxamp.watch_nan(model, raises=False) as watch:
        model(X).mean().backward()
    assert watch.found.is_bad_in_float32 is False and not watch.found.unknown, "1e60 would be infinite"
    assert float(model.size) == float(torch.tensor(1e30))


def test_a_step_that_is_over_is_let_go():
    """Inputs, and what made them, live no longer than without the watch."""
    model = converted(lambda m, x: m.a(m.norm(x)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with fxamp.watch_nan(model) as watch:
        for _ in range(3):
            source = torch.nn.Parameter(X.clone())
            made = source * 2.0
            seen += [weakref.ref(source), weakref.ref(made)]
            step_of(model, optimizer, made)
            del made, source
            gc.collect()
            assert watch.calls == [] and [ref() for ref in seen] == [None] * len(seen)
        source = torch.nn.Parameter(X.clone())
        model(source * 2.0)
        seen.append(weakref.ref(source))
        del source
        gc.collect()
        assert len(watch.calls) == 1 and seen[-1]() is None, "what made the inputs is not held even now"
        with torch.no_grad():
            for _ in range(5):
                model(X)
        assert len(watch.calls) == 2, "a call without gradients is over when the next begins"


def test_of_micro_batches_the_bad_one_is_run_again():
    model = converted(low_only)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with fxamp.watch_nan(model, raises=False) as watch:
        for size in (0.1, 0.2, 1.0, 0.3):
            model(X * size).mean().backward()
        assert watch.found is not None
        optimizer.step()
    assert watch.found.value.startswith("add") and watch.found.overrides and not watch.found.is_bad_in_float32


def test_calls_that_lead_to_no_step_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(watch_module, "KEPT", 3)
    model = converted(everywhere)
    outputs = []
    with fxamp.watch_nan(model, raises=False) as watch:
        for _ in range(5):
            outputs.append(model(X))
        assert [call.is_kept for call in watch.calls] == [False, False, True, True, True]
        assert all(call.buffers == [] for call in watch.calls[:2])
        outputs[0].mean().backward()
    assert watch.found.op == "sqrt" and watch.found.unknown.startswith("many calls have gone by since")
    assert "it runs in float32; another run was not tried" in str(watch.found)


def test_what_does_not_happen_again_is_not_judged():
    """A second derivative is infinite; the first, which is what is run again, is not."""
    model = converted(lambda m, x: m.a(x) * (m.a(x) * 0.0).abs().pow(1.5))
    x = X.clone().requires_grad_()
    with fxamp.watch_nan(model, raises=False) as watch:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.mean().backward()
    assert watch.found.op == "pow" and "run again, the call is finite" in str(watch.found)


class Bucketed(Net):
    def __init__(self):
        super().__init__(None)
        self.table = nn.Embedding(4, 8)

    def forward(self, x):
        y = self.a(x * 30000.0)
        return self.table(((y + y + y) / 90000.0).long())


def test_an_error_that_a_bad_value_leads_to_is_explained():
    model = fxamp.convert(Bucketed(), FP16, (X,), pad_to=0)
    said = r"add\w* \(`add`.*then the run stops: IndexError.*makes this forward finite"
    with pytest.raises(FloatingPointError, match=f"(?s){said}") as caught, fxamp.watch_nan(model):
        model(X)
    assert isinstance(caught.value.__cause__, IndexError)


def test_a_deny_that_was_tried_on_the_forward_alone_promises_no_more():
    function = lambda m, x: m.a(x * 300.0) @ m.a(x * 300.0).T  # noqa: E731  # its gradients overflow too
    watched, found = told(function, lambda y: y.sum() * 100)
    assert watched.remedy.endswith("makes this forward finite")
    assert found.remedy.endswith("makes the run finite") and len(found.overrides) > len(watched.overrides)


def test_an_error_of_the_users_own_passes():
    model = converted(everywhere)
    with pytest.raises(KeyError, match="mine"), fxamp.watch_nan(model):
        model(X).mean().backward()
        raise KeyError("mine")


def test_several_outputs_get_back_what_they_got():
    def both(m, x):
        y = m.a(x)
        return {"one": y * 1.0, "same": [y, y], "slope": (m.a(x) * 0.0 + 1e-7).log()}

    found, expected = told(both, lambda output: output["slope"].sum() * 2.0**120)
    assert found == expected and found.phase == "backward"
    assert told(both, lambda output: output["one"].sum() + output["same"][1].sum()) == (None, None)


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_an_output_that_comes_twice_gets_its_gradient_once(capture):
    """2e38 is within float32's range, twice that is not."""
    torch._dynamo.reset()
    function, loss = lambda m, x: [m.a(x)] * 2, lambda output: output[0][0, 0] * 2e38
    found, _ = told(function, loss, capture=capture)
    assert found.phase == "backward" and found.is_bad_in_float32 is False


def test_a_bad_gradient_of_a_frozen_models_input_is_told_too():
    """An adversarial step: the gradient goes to the input alone."""
    model = converted(everywhere)
    model.requires_grad_(False)
    x = X.clone().requires_grad_()
    with fxamp.watch_nan(model, raises=False) as watch:
        model(x).mean().backward()
    assert (watch.found.op, watch.found.phase) == ("sqrt", "backward") and watch.found.is_bad_in_float32
    assert fxamp.find_nan(model, (x,), torch.Tensor.mean) == watch.found


def test_another_models_optimizer_ends_no_step():
    model, other = converted(everywhere), nn.Linear(2, 2)
    with fxamp.watch_nan(model, raises=False) as watch:
        output = model(X)
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        output.mean().backward()
    assert watch.found.is_bad_in_float32 and not watch.found.unknown


def dropping(m, x):
    """Past fp16's range only where dropout doubles it, in training."""
    return m.drop(m.a(x * 20000.0)) + 30000.0


def test_the_flags_of_the_call_and_not_of_now_are_used():
    model = converted(dropping)
    torch.manual_seed(1)
    with fxamp.watch_nan(model, raises=False) as watch:
        model(X).mean().backward()
        model.eval()
    assert watch.found is not None and not watch.found.unknown and not model.drop.training


def test_the_random_numbers_of_the_call_and_not_of_now_are_drawn():
    """One element overflows if it is not dropped: with other numbers every second run would be finite."""
    model, x = converted(dropping), torch.zeros(4, 8)
    x[1, 3] = 1.5
    told = []
    for seed in range(12):
        torch.manual_seed(seed)
        with fxamp.watch_nan(model, raises=False) as watch:
            model(x).mean().backward()
        told.append(watch.found)
    assert 2 < told.count(None) < 10
    assert all(found is None or (found.overrides and not found.unknown) for found in told)


def test_inside_autocast_it_is_run_again_without():
    model = converted(low_only)
    with fxamp.watch_nan(model, raises=False) as watch, torch.autocast("cpu", torch.bfloat16):
        model(X).mean().backward()
        assert watch.found.is_bad_in_float32 is False and watch.found.overrides and not watch.found.unknown


RETURNED = {
    "value": lambda m, x: m.a(x),
    "float32 value": lambda m, x: m.a(x).sin(),
    "view": lambda m, x: m.a(x).sin()[1:].transpose(0, 1).unsqueeze(0),
    "reshape": lambda m, x: m.a(x).sin().reshape(2, -1),
    "value that is read inside too": lambda m, x: (h := m.a(x).sin(), m.a(h + 1)),
    "view of such a value": lambda m, x: ((h := m.a(x).sin())[1:], m.a(h + 1)),
    "several": lambda m, x: {"first": m.a(x), "second": m.a(x).sin()},
    "input": lambda m, x: (x.view(-1), m.a(x)),
}


def step_on(function, loss, watched):
    torch.manual_seed(0)
    model = fxamp.convert(Net(function), FP16, (X,), pad_to=0)
    x = X.clone().requires_grad_()
    inputs = x * 1.0
    with fxamp.watch_nan(model, raises=False) if watched else contextlib.nullcontext() as watch:
        loss(first(model(inputs))).backward()
    return x.grad, model.a.weight.grad, watch and watch.found


def first(output):
    return (
        output
        if isinstance(output, torch.Tensor)
        else next(iter(output.values() if isinstance(output, dict) else output))
    )


@pytest.mark.parametrize("function", RETURNED.values(), ids=RETURNED)
def test_training_code_may_write_into_what_it_is_given(function):
    def loss(output):
        return output.sub_(0.25).mul_(2.0).square().sum()

    plain, watched = step_on(function, loss, False), step_on(function, loss, True)
    assert watched[2] is None
    for expected, found in zip(plain[:2], watched[:2], strict=True):
        assert (found is None) is (expected is None) and (expected is None or torch.equal(found, expected))


@pytest.mark.parametrize("function", RETURNED.values(), ids=RETURNED)
def test_a_loss_that_spoils_the_gradients_in_place_is_told_as_one_that_does_not(function):
    in_place = step_on(function, lambda output: output.mul_(0.0).sqrt().sum(), True)[2]
    aside = step_on(function, lambda output: output.mul(0.0).sqrt().sum(), True)[2]
    assert in_place is not None and (in_place.name, in_place.phase) == (aside.name, aside.phase), (in_place, aside)


@pytest.mark.parametrize("raises", [True, False])
def test_a_scale_that_collapses_comes_with_the_op_that_overflows(raises):
    torch.manual_seed(0)
    model = fxamp.convert(Net(lambda m, x: m.a(m.a(x) * 1e6)), FP16, (X,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = fxamp.LossScaler(init_scale=2.0, min_scale=1.0, max_skips=3)
    with pytest.raises(fxamp.ScaleCollapseError) as caught, fxamp.watch_nan(model, raises=raises) as watch:
        for _ in range(20):
            scaler.scale(model(X).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    (note,) = caught.value.__notes__
    assert watch.found.op == "linear" and str(watch.found) in note


def test_an_error_while_all_is_finite_has_no_note():
    model = fxamp.convert(Net(lambda m, x: m.a(x)), FP16, (X,))
    with pytest.raises(KeyError) as caught, fxamp.watch_nan(model):
        model(X)
        raise KeyError("another")
    assert not hasattr(caught.value, "__notes__")


def test_what_the_loss_makes_is_said_to_be_the_losss():
    model = fxamp.convert(Net(lambda m, x: m.a(x)), FP16, (X,))
    with fxamp.watch_nan(model, raises=False) as watch:
        (model(X) * 0.0).sqrt().sum().backward()
    assert (watch.found.op, watch.found.phase) == ("output", "backward")
    assert "what the model gives is finite; the loss, or what else is computed of it outside" in watch.found.remedy
