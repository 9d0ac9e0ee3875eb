"""Gradients that the user gives masters, against a plain float32 loop that does the same to its parameters."""

import pytest
import torch

from fxamp.runtime import apex as amp
from fxamp.runtime.fixed_scalers import NoOpLossScaler
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.masters import master_of
from fxamp.runtime.scaler import LossScaler

SIZES = (3, 5, 2)
SCALE = 64.0  # float16 holds all gradients below times this


@pytest.fixture(autouse=True)
def without_session():
    amp._amp_state.session = amp.casting.low = None
    yield
    amp._amp_state.session = amp.casting.low = None


def weights(dtype=torch.float32):
    """Numbers that float16 and bfloat16 hold."""
    return [torch.nn.Parameter(torch.arange(1.0, 1 + size).to(dtype)) for size in SIZES]


def loss_of(parameters):
    """Its gradients are small integers."""
    return sum((index + 1) * parameter.float().sum() for index, parameter in enumerate(parameters))


def double(every):
    for each in every:
        each.grad = each.grad * 2


def ones(every):
    for each in every:
        each.grad = torch.ones(each.shape)


def only_the_first(every):
    for index, each in enumerate(every):
        if index:
            each.grad = None


def none_of_them(every):
    for each in every:
        each.grad = None


def ones_then_clip(every):
    every = list(every)
    ones(every)
    torch.nn.utils.clip_grad_norm_(every, 1.0)


CHANGES = [double, ones, only_the_first, none_of_them, ones_then_clip]


def plain_loop(change, *, max_norm=None):
    parameters = weights()
    optimizer = torch.optim.SGD(parameters, lr=0.25, momentum=0.5)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(parameters).backward()
        if step == 1:
            change(parameters)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
    return parameters


def assert_masters_are(optimizer, expected):
    for master, value in zip(optimizer.master_params(), expected, strict=True):
        torch.testing.assert_close(master, value.detach(), rtol=1e-6, atol=0)  # one division by the norm, in float32


def under_apex(**options):
    model = torch.nn.ParameterList(weights())
    return amp.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.25, **options),
        opt_level="O2",
        loss_scale=SCALE,
        convert=lambda model, **_: model.to(torch.float16),
    )


def handed_out_anew(optimizer):
    return optimizer.master_params


def held_from_the_start(optimizer):
    held = list(optimizer.master_params())
    return lambda: held


def looked_up(optimizer):
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return lambda: [master_of(parameter) for parameter in every]


@pytest.mark.parametrize("ways", [handed_out_anew, held_from_the_start, looked_up])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("max_norm", [None, 1.5])
def test_replaced_after_unscale(change, ways, max_norm):
    parameters = weights(torch.float16)
    optimizer = MasterWeightOptimizer(torch.optim.SGD(parameters, lr=0.25, momentum=0.5))
    scaler, masters = LossScaler(SCALE), ways(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(parameters)).backward()
        scaler.unscale_(optimizer)
        if step == 1:
            change(masters())
        scaler.step(optimizer, max_grad_norm=max_norm)
        scaler.update()
    assert_masters_are(optimizer, plain_loop(change, max_norm=max_norm))


@pytest.mark.parametrize("ways", [handed_out_anew, held_from_the_start, looked_up])
@pytest.mark.parametrize("change", [ones, ones_then_clip])
@pytest.mark.parametrize("max_norm", [None, 1.5])
def test_given_without_a_scale(change, ways, max_norm):
    parameters = weights(torch.bfloat16)
    optimizer = MasterWeightOptimizer(torch.optim.SGD(parameters, lr=0.25, momentum=0.5))
    scaler, masters = NoOpLossScaler(), ways(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(parameters).backward()
        if step == 1:
            change(masters())
        scaler.step(optimizer, max_grad_norm=max_norm)
    assert_masters_are(optimizer, plain_loop(change, max_norm=max_norm))


def clip(every):
    torch.nn.utils.clip_grad_norm_(every, 1.0)


@pytest.mark.parametrize("listed", [MasterWeightOptimizer.master_params, amp.master_params])
@pytest.mark.parametrize("change", [*CHANGES, clip])
def test_changed_without_a_scale(change, listed):
    parameters = weights(torch.bfloat16)
    optimizer = MasterWeightOptimizer(torch.optim.SGD(parameters, lr=0.25, momentum=0.5))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(parameters).backward()
        if step == 1:
            change(listed(optimizer))
        optimizer.step()
    assert_masters_are(optimizer, plain_loop(change))


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("zeroes", ["optimizer", "parameters", "parameters in place"])
def test_a_look_at_masters_changes_no_step(zeroes, micro_steps):
    parameters, reference = weights(torch.float16), weights()
    optimizer = MasterWeightOptimizer(torch.optim.SGD(parameters, lr=0.25, momentum=0.5))
    plain, scaler = torch.optim.SGD(reference, lr=0.25, momentum=0.5), LossScaler(SCALE)
    for _ in range(3):
        for _ in range(micro_steps):
            loss_of(reference).backward()
            scaler.scale(loss_of(parameters)).backward()
            for master, parameter in zip(optimizer.master_params(), reference, strict=True):
                assert torch.equal(master.grad, parameter.grad * SCALE)
        assert not scaler.step(optimizer).skipped
        scaler.update()
        plain.step()
        plain.zero_grad()
        if zeroes == "optimizer":
            optimizer.zero_grad()
        for parameter in parameters:
            if zeroes == "parameters":
                parameter.grad = None
            elif zeroes == "parameters in place":
                parameter.grad.zero_()
    assert_masters_are(optimizer, reference)


@pytest.mark.parametrize("masters", ["kahan", "stochastic"])
def test_a_look_at_parameters_without_masters_widens_no_gradient(masters):
    parameters = weights(torch.bfloat16)
    optimizer = MasterWeightOptimizer(torch.optim.SGD(parameters, lr=0.25), masters=masters)
    loss_of(parameters).backward()
    assert all(map(torch.equal, optimizer.master_params(), parameters))
    assert {parameter.grad.dtype for parameter in parameters} == {torch.bfloat16}


def test_a_backward_onto_gradients_that_were_used_is_seen_in_masters():
    parameters, reference = weights(torch.bfloat16), weights()
    optimizer = MasterWeightOptimizer(torch.optim.SGD(parameters, lr=0.25))
    for step in range(2):  # nothing is cleared between
        for each in (parameters, reference):
            loss_of(each).backward()
        if step == 0:
            optimizer.step()
    for master, parameter in zip(optimizer.master_params(), reference, strict=True):
        assert torch.equal(master.grad, parameter.grad)


@pytest.mark.parametrize("scaler_class", [LossScaler, NoOpLossScaler])
def test_after_the_step_a_look_at_masters_leaves_the_gradients_as_they_are(scaler_class):
    parameters = weights(torch.bfloat16)
    optimizer, scaler = MasterWeightOptimizer(torch.optim.SGD(parameters, lr=0.25)), scaler_class()
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(parameters)).backward()
        result = scaler.step(optimizer)
        scaler.update()
        assert len(list(optimizer.master_params())) == len(parameters)
        assert {parameter.grad.dtype for parameter in parameters} == {torch.bfloat16}
        assert result.grad_norm == pytest.approx((3 * 1 + 5 * 4 + 2 * 9) ** 0.5)


@pytest.mark.parametrize("scaler_class", [LossScaler, NoOpLossScaler])
def test_given_where_the_model_has_none(scaler_class):
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer, scaler = MasterWeightOptimizer(torch.optim.SGD([weight], lr=1.0)), scaler_class()
    scaler.scale(torch.zeros(()))
    for master in optimizer.master_params():
        master.grad = torch.full((2,), scaler.get_scale())
    scaler.step(optimizer)
    assert weight.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("ways", [handed_out_anew, held_from_the_start, looked_up])
@pytest.mark.parametrize("change", CHANGES)
def test_replaced_after_scale_loss(change, ways):
    model, optimizer = under_apex(momentum=0.5)
    masters = ways(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model), optimizer) as scaled:
            scaled.backward()
        if step == 1:
            change(masters())
        optimizer.step()
    assert_masters_are(optimizer, plain_loop(change))


@pytest.mark.parametrize("ways", [handed_out_anew, held_from_the_start, looked_up])
def test_replaced_between_two_backwards_of_a_step(ways):
    model, optimizer = under_apex()
    masters = ways(optimizer)
    for change in (ones, double):
        with amp.scale_loss(loss_of(model), optimizer) as scaled:
            scaled.backward()
        change(masters())
    optimizer.step()
    start = weights()
    expected = [value - 0.25 * 2 * (1 + index + 1) for index, value in enumerate(start)]
    assert_masters_are(optimizer, expected)


@pytest.mark.parametrize("ways", [handed_out_anew, held_from_the_start, looked_up])
def test_zeroing_by_masters_as_scripts_for_apex_do(ways):
    model, optimizer = under_apex(momentum=0.5)
    masters = ways(optimizer)
    for _ in range(3):
        with amp.scale_loss(loss_of(model), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        none_of_them(masters())
    assert_masters_are(optimizer, plain_loop(lambda _: None))


def test_zeros_that_stood_are_gradients_of_masters_too():
    model, optimizer = under_apex()
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    with amp.scale_loss(model[0].float().sum(), optimizer) as scaled:
        scaled.backward()
    assert [master.grad.tolist() for master in optimizer.master_params()] == [[1.0] * 3, [0.0] * 5, [0.0] * 2]


def test_the_models_own_replaced_wins_over_what_its_master_has():
    parameters = weights(torch.float16)
    optimizer, scaler = MasterWeightOptimizer(torch.optim.SGD(parameters, lr=0.25)), LossScaler(SCALE)
    scaler.scale(loss_of(parameters)).backward()
    scaler.unscale_(optimizer)
    ones(parameters)
    scaler.step(optimizer)
    assert_masters_are(optimizer, [value - 0.25 for value in weights()])


@pytest.mark.parametrize("ways", [handed_out_anew, held_from_the_start])
def test_a_replaced_gradient_is_gone_where_the_model_was_zeroed_instead_of_stepped(ways):
    parameters = weights(torch.float16)
    optimizer, scaler = MasterWeightOptimizer(torch.optim.SGD(parameters, lr=0.25)), LossScaler(SCALE)
    masters = ways(optimizer)
    for is_good in (False, True):
        for parameter in parameters:
            parameter.grad = None
        scaler.scale(loss_of(parameters)).backward()
        scaler.unscale_(optimizer)
        if is_good:
            scaler.step(optimizer)
        else:
            double(masters())
        scaler.update()
    assert_masters_are(optimizer, [value - 0.25 * (index + 1) for index, value in enumerate(weights())])


@pytest.mark.parametrize("zeroes", [False, True])
def test_a_replaced_gradient_is_gone_after_its_step(zeroes):
    parameters = weights(torch.float16)
    optimizer, scaler = MasterWeightOptimizer(torch.optim.SGD(parameters, lr=0.25)), LossScaler(SCALE)
    masters = list(optimizer.master_params())
    for _ in range(2):
        scaler.scale(loss_of(parameters)).backward()
        scaler.unscale_(optimizer)
        ones(masters)
        scaler.step(optimizer)
        scaler.update()
        if zeroes:
            optimizer.zero_grad()
        for parameter in parameters:
            parameter.grad = None
    loss_of(parameters).backward()
    optimizer.step()
    assert_masters_are(optimizer, [value - 0.5 - 0.25 * (index + 1) for index, value in enumerate(weights())])


def test_a_step_that_raises_leaves_masters_no_gradient_of_its_own():
    class Breaks(torch.optim.SGD):
        breaks = True

        def step(self, closure=None):
            if self.breaks:
                raise MemoryError
            return super().step(closure)

    parameters = weights(torch.bfloat16)
    optimizer = MasterWeightOptimizer(Breaks(parameters, lr=0.25))
    (loss_of(parameters) * 64).backward()
    with pytest.raises(MemoryError):
        optimizer.step()
    for parameter in parameters:
        parameter.grad = None
    loss_of(parameters).backward()
    optimizer.optimizer.breaks = False
    optimizer.step()
    assert_masters_are(optimizer, [value - 0.25 * (index + 1) for index, value in enumerate(weights())])


@pytest.mark.parametrize("scaler_class", [None, NoOpLossScaler, LossScaler])
@pytest.mark.parametrize("with_masters", [True, False])
def test_gradients_made_under_inference_mode(with_masters, scaler_class):
    """They count no writes; evolution strategies give such."""
    (weight,) = parameters = [torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    optimizer = torch.optim.SGD(parameters, lr=0.25)
    optimizer = MasterWeightOptimizer(optimizer) if with_masters else optimizer
    scaler = scaler_class() if scaler_class else None
    for _ in range(2):
        with torch.inference_mode():
            weight.grad = torch.full((4,), 0.5 * (scaler.get_scale() if scaler else 1), dtype=torch.bfloat16)
        if scaler is None:
            optimizer.step()
        else:
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
    if with_masters:
        (master,) = optimizer.master_params()
        assert torch.equal(master, torch.full((4,), 0.75))
    assert torch.equal(weight, torch.full_like(weight, 0.75))
