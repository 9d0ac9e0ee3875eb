"""MasterWeightOptimizer against the plain optimizer on a float32 copy of the model."""

import copy
import io
import math
import pickle
import subprocess
import sys

import pytest
import torch
from runtime_instruments import PeakBytes, ThirdParty
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxamp.errors import OptionError
from fxamp.runtime import device_skip, layouts
from fxamp.runtime.device_skip import takes_found_inf
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.masters import is_low, loosen, master_of, set_master
from fxamp.runtime.rounding import stochastic_round
from fxamp.runtime.scaler import LossScaler

KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "fused_sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "foreach_adamw": lambda p: torch.optim.AdamW(p, 0.01, foreach=True, amsgrad=True),
    "fused_adamw": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "third_party": lambda p: ThirdParty(p, 0.01),
}


def low_model(dtype=torch.bfloat16, *, seed=0):
    """A small model whose norm stays float32, as O2 leaves it."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    model[0].to(dtype)
    model[2].to(dtype)
    return model


def give_gradients(model, seed, scale=1.0):
    """Random gradients in each parameter's dtype; returns their exact float32 values times 1/scale."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator) * scale
        parameter.grad = values.to(parameter.dtype)
    return [parameter.grad.float() / scale for parameter in model.parameters()]


def reference_of(model):
    """Float32 parameters with the masters' values, for the plain optimizer."""
    values = [master_of(p) if master_of(p) is not None else p for p in model.parameters()]
    return [torch.nn.Parameter(value.detach().float().clone()) for value in values]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_masters_follow_the_plain_float32_optimizer_bit_for_bit(kind, dtype, bucket_bytes):
    model = low_model(dtype)
    optimizer = MasterWeightOptimizer(KINDS[kind](model.parameters()), bucket_bytes=bucket_bytes)
    reference = reference_of(model)
    plain = KINDS[kind](reference)
    for step in range(4):
        for parameter, gradient in zip(reference, give_gradients(model, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        plain.step()
        for mine, theirs in zip(optimizer.master_params(), reference, strict=True):
            assert torch.equal(mine, theirs)
        for parameter, theirs in zip(model.parameters(), reference, strict=True):
            assert torch.equal(parameter, theirs.to(parameter.dtype))


FUSED = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01, fused=True),
}


@pytest.mark.parametrize("scale", [2.0**14, 3000.0])
@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_optimizer_divides_by_the_scale_in_its_own_kernels(kind, scale, monkeypatch):
    multiplied, multiply_ = [], torch._foreach_mul_
    monkeypatch.setattr(torch, "_foreach_mul_", lambda *given: (multiplied.append(given), multiply_(*given)))
    model = low_model()
    optimizer, scaler = MasterWeightOptimizer(FUSED[kind](model.parameters())), LossScaler(scale)
    reference = reference_of(model)
    plain = FUSED[kind](reference)
    scaler.scale(torch.zeros(()))
    for step in range(4):
        for parameter, gradient in zip(reference, give_gradients(model, step, scale), strict=True):
            parameter.grad = gradient
        norm = torch.linalg.vector_norm(torch.cat([each.grad.flatten() for each in reference]))
        result = scaler.step(optimizer, **({"max_grad_norm": norm.item() / 2} if step == 3 else {}))
        if step == 3:
            torch._foreach_div_([each.grad for each in reference], 2.0)
        scaler.update()
        plain.step()
        assert math.isclose(result.grad_norm, norm, rel_tol=1e-5)
        for mine, theirs in zip(optimizer.master_params(), reference, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
        for mine, theirs in zip(model[1].parameters(), reference[2:4], strict=True):  # float32 themselves
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    assert not multiplied or not takes_found_inf(plain)  # torch 2.11 has no such Adagrad


@pytest.fixture(params=[False, True], ids=["as_on_a_gpu", "host_flag"])
def way_to_skip(request, monkeypatch):
    monkeypatch.setattr(device_skip, "LOOKS_AT_HOST_FLAGS", request.param)


@pytest.mark.usefixtures("way_to_skip")
@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_step_changes_nothing(kind):
    model = low_model()
    optimizer, scaler = MasterWeightOptimizer(KINDS[kind](model.parameters())), LossScaler()
    scaler.scale(torch.zeros(()))
    for step in range(3):
        give_gradients(model, step, scale=2.0**16)
        scaler.step(optimizer)
        scaler.update()
    before = copy.deepcopy(optimizer.state_dict()), [p.clone() for p in model.parameters()]
    give_gradients(model, 9)
    model[0].bias.grad[1] = math.nan
    result = scaler.step(optimizer)
    assert result.skipped
    torch.testing.assert_close(optimizer.state_dict(), before[0], rtol=0, atol=0)
    for parameter, old in zip(model.parameters(), before[1], strict=True):
        assert torch.equal(parameter, old)


@pytest.mark.usefixtures("way_to_skip")
def test_non_finite_step_takes_away_only_the_state_that_it_has_made():
    trained, new = (torch.nn.Parameter(torch.ones(2).bfloat16()) for _ in range(2))
    optimizer, scaler = MasterWeightOptimizer(ThirdParty([trained, new], 0.01)), LossScaler()
    scaler.scale(torch.zeros(()))
    trained.grad = torch.ones_like(trained)
    scaler.step(optimizer)
    scaler.update()
    before = copy.deepcopy(optimizer.state_dict())
    new.grad = torch.full_like(new, math.nan)
    assert scaler.step(optimizer).skipped
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.usefixtures("way_to_skip")
def test_skipped_step_under_kahan_does_not_move_a_sum_half_way_between_two_numbers():
    odd = 1.0 + 2.0**-7  # its sum with half a step lies half way, and rounds to the even neighbour
    weight = torch.nn.Parameter(torch.tensor([odd], dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer(torch.optim.SGD([weight], 0.1), masters="kahan")
    optimizer.load_state_dict({**optimizer.state_dict(), "masters": {0: torch.tensor([2.0**-8]).bfloat16()}})
    scaler = LossScaler(device="cpu")
    weight.grad = torch.full_like(weight, math.nan)
    assert scaler.step(optimizer).skipped
    assert weight.tolist() == [odd]
    assert optimizer.state_dict()["masters"][0].tolist() == [2.0**-8]


@pytest.mark.parametrize("scaler_class", [LossScaler, lambda: torch.amp.GradScaler("cpu")])
def test_gradients_too_small_for_fp16_reach_the_masters(scaler_class):
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    optimizer, scaler = MasterWeightOptimizer(torch.optim.SGD([weight], lr=1.0)), scaler_class()
    scaler.scale((weight.float() * 2.0**-30).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(master_of(weight), torch.full((4,), -(2.0**-30)))


def test_explicit_unscale_gives_true_values_in_float32():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer, scaler = MasterWeightOptimizer(torch.optim.SGD([weight], lr=1.0)), LossScaler()
    scaler.scale((weight.float() * 2.0**-30).sum()).backward()
    scaler.unscale_(optimizer)
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, torch.full((4,), 2.0**-30))
    torch.nn.utils.clip_grad_norm_([weight], 2.0**-31, foreach=False)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    (weight * 2).sum().backward()
    assert weight.grad.dtype == torch.float16


def test_clipping_in_the_step_equals_clipping_float32_gradients():
    model = low_model(torch.float16)
    optimizer, scaler = MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.1)), LossScaler(2.0**3)
    reference = reference_of(model)
    for parameter, gradient in zip(reference, give_gradients(model, 1, scale=2.0**3), strict=True):
        parameter.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(reference, 0.5)
    torch.optim.SGD(reference, 0.1).step()
    scaler.scale(torch.zeros(()))
    result = scaler.step(optimizer, max_grad_norm=0.5)
    # One division more or less: two roundings of float32 apart.
    assert result.grad_norm == pytest.approx(float(norm), rel=2**-22)
    for mine, theirs in zip(optimizer.master_params(), reference, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-21, atol=1e-7)


def test_exact_master_left_by_the_converter_is_taken():
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    exact = torch.tensor([1.0 + 2.0**-12, 2.0])
    weight._fxamp_master = exact.clone()
    MasterWeightOptimizer(torch.optim.SGD([weight], 0.1))
    assert torch.equal(master_of(weight), exact)


def test_frozen_and_float32_parameters_have_no_master():
    model = low_model()
    model[0].weight.requires_grad_(False)
    MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    assert [master_of(p) is not None for p in model.parameters()] == [False, True, False, False, True, True]


def test_set_master_gives_parameter_the_rounding():
    model = low_model()
    MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    value = torch.randn(8, 6)
    set_master(model[0].weight, value)
    assert torch.equal(master_of(model[0].weight), value)
    assert torch.equal(model[0].weight, value.bfloat16())
    with pytest.raises(OptionError, match=r"\(3,\)"):
        set_master(model[0].weight, torch.zeros(3))


def test_parameter_written_directly_wins_and_the_rest_keeps_its_low_bits():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    MasterWeightOptimizer(torch.optim.SGD([weight], 0.1))
    set_master(weight, torch.tensor([1.0 + 2.0**-12, 1.0 + 2.0**-12]))
    with torch.no_grad():
        weight[1] = 5.0
    assert master_of(weight).tolist() == [1.0 + 2.0**-12, 5.0]


def test_write_past_the_version_counter_needs_resync():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer(torch.optim.SGD([weight], 0.1))
    weight.data.fill_(3.0)
    optimizer.resync_masters()
    assert master_of(weight).tolist() == [3.0, 3.0]


def test_a_new_wrapper_sees_what_a_fused_step_wrote_past_the_version_counter():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    MasterWeightOptimizer(torch.optim.SGD([weight], 0.1))
    set_master(weight, torch.tensor([1.0 + 2.0**-12, 1.0]))
    weight.grad = torch.tensor([0.0, -4.0], dtype=torch.bfloat16)
    torch.optim.SGD([weight], 1.0, fused=True).step()
    MasterWeightOptimizer(torch.optim.SGD([weight], 0.0)).step()
    assert master_of(weight).tolist() == [1.0 + 2.0**-12, 5.0]
    assert weight.tolist() == [1.0, 5.0]


def test_parameters_that_were_float32_meanwhile_begin_with_new_masters():
    model = low_model()
    optimizer = MasterWeightOptimizer(KINDS["fused_sgd"](model.parameters()))
    give_gradients(model, 0)
    optimizer.step()
    model.float()
    assert all(mine is theirs for mine, theirs in zip(optimizer.master_params(), model.parameters(), strict=True))
    give_gradients(model, 1)
    optimizer.step()
    assert "masters" not in optimizer.state_dict()
    model.bfloat16()
    before = [parameter.clone() for parameter in model.parameters()]
    assert all(map(torch.equal, optimizer.master_params(), [each.float() for each in before]))


def test_parameters_that_took_steps_as_float32_begin_with_new_masters():
    model = low_model()
    optimizer = MasterWeightOptimizer(KINDS["fused_sgd"](model.parameters()))
    model.float()
    give_gradients(model, 0)
    optimizer.step()
    model.bfloat16()
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.0
    give_gradients(model, 1)
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_is_the_plain_optimizers_both_ways(kind):
    model = low_model()
    optimizer = MasterWeightOptimizer(KINDS[kind](model.parameters()))
    reference = reference_of(model)
    plain = KINDS[kind](reference)
    for step in range(2):
        for parameter, gradient in zip(reference, give_gradients(model, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        plain.step()
    saved = optimizer.state_dict()
    masters = saved.pop("masters")
    assert all(value.dtype == torch.float32 for value in masters.values())
    torch.testing.assert_close(saved, plain.state_dict(), rtol=0, atol=0)

    other = KINDS[kind](reference_of(model))
    other.load_state_dict(optimizer.state_dict())
    fresh = MasterWeightOptimizer(KINDS[kind](low_model(seed=1).parameters()))
    fresh.load_state_dict(plain.state_dict())
    loaded = fresh.state_dict()
    loaded.pop("masters")
    torch.testing.assert_close(loaded, plain.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("masters", ["fp32", "kahan"])
@pytest.mark.parametrize("kind", ["sgd", "adam", "fused_adamw"])
def test_resume_from_16_bit_model_is_bit_exact(kind, masters):
    def start(seed):
        model = low_model(seed=seed)
        return model, MasterWeightOptimizer(KINDS[kind](model.parameters()), masters=masters)

    def train(model, optimizer, steps):
        for step in steps:
            give_gradients(model, step)
            optimizer.step()

    whole, whole_optimizer = start(0)
    train(whole, whole_optimizer, range(6))
    first, first_optimizer = start(0)
    train(first, first_optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": first_optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    second, second_optimizer = start(7)
    second.load_state_dict(saved["model"])
    second_optimizer.load_state_dict(saved["optimizer"])
    train(second, second_optimizer, range(3, 6))
    for mine, theirs in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    torch.testing.assert_close(second_optimizer.state_dict(), whole_optimizer.state_dict(), rtol=0, atol=0)


def test_wrapping_a_trained_low_precision_optimizer_widens_its_state():
    model = low_model()
    inner = torch.optim.Adam(model.parameters())
    give_gradients(model, 0)
    inner.step()
    MasterWeightOptimizer(inner)
    assert {value["exp_avg"].dtype for value in inner.state.values()} == {torch.float32}


def test_a_state_that_is_float32_is_kept_without_a_word(caplog):
    model = torch.nn.Linear(4, 8)
    inner = torch.optim.Adam(model.parameters())
    give_gradients(model, 0)
    inner.step()
    before = copy.deepcopy([dict(state) for state in inner.state.values()])
    MasterWeightOptimizer(torch.optim.Adam(low_model().parameters()))
    model.bfloat16()
    MasterWeightOptimizer(inner)
    assert not caplog.records
    for state, kept in zip(inner.state.values(), before, strict=True):
        assert all(torch.equal(state[name], kept[name]) for name in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("wraps_first", [True, False])
def test_learning_rate_scheduler(wraps_first, recwarn):
    model = low_model()
    inner = torch.optim.SGD(model.parameters(), 1.0)
    if wraps_first:
        optimizer = MasterWeightOptimizer(inner)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    else:
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
        optimizer = MasterWeightOptimizer(inner)
    before = master_of(model[0].bias).clone()
    for rate in (1.0, 0.5):
        give_gradients(model, 0)
        model[0].bias.grad = torch.ones(8, dtype=torch.bfloat16)
        optimizer.step()
        scheduler.step()
        before -= rate
        assert torch.equal(master_of(model[0].bias), before)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


class KeepsItsStateLow(torch.optim.Optimizer):
    """As Adafactor of big_vision, and others that keep their momentum in 16 bits."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter, dtype=torch.bfloat16))
            momentum.lerp_(parameter.grad.bfloat16(), 0.1)
            parameter.sub_(momentum.float() * 0.1)


@pytest.mark.parametrize("masters", ["fp32", "kahan", "stochastic"])
def test_a_group_that_is_added_leaves_the_others_state_as_it_is(masters):
    first, second = (torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = MasterWeightOptimizer(KeepsItsStateLow([first]), masters=masters)

    def step():
        for parameter in (first, second):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    step()
    optimizer.add_param_group({"params": [second]})
    assert optimizer.state[first]["momentum"].dtype == torch.bfloat16
    step()
    assert (first < 1).all() and (second < 1).all() and (master_of(second) is not None) == (masters == "fp32")


def test_add_param_group_and_zero_grad():
    model = low_model()
    optimizer = MasterWeightOptimizer(torch.optim.SGD(model[0].parameters(), 0.1))
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 1.0})
    assert master_of(model[2].weight) is not None
    give_gradients(model, 0)
    before, gradient = master_of(model[2].bias).clone(), model[2].bias.grad.float()
    optimizer.step()
    assert torch.equal(master_of(model[2].bias), before - gradient)
    optimizer.zero_grad()
    assert [p.grad is None for p in model.parameters()] == [True, True, False, False, True, True]


@pytest.mark.parametrize("lists_masters_first", [False, True])
@pytest.mark.parametrize("zeroes", ["model", "model in place", "optimizer"])
def test_masters_have_the_gradients_of_this_backward_only(zeroes, lists_masters_first):
    model = low_model(torch.float16)
    optimizer, scaler = MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.1)), LossScaler()
    listed = list(optimizer.master_params())
    scaler.scale(torch.zeros(()))
    give_gradients(model, 0)
    model[0].weight.grad[0, 0] = math.nan
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer).skipped
    scaler.update()
    if zeroes == "optimizer":
        optimizer.zero_grad()
    else:
        model.zero_grad(set_to_none=zeroes == "model")
    model[0].weight.grad = None  # not used in this forward
    model[2].weight.grad = torch.ones_like(model[2].weight)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    masters = listed if lists_masters_first else list(optimizer.master_params())
    assert float(torch.nn.utils.clip_grad_norm_(masters, 0.5)) == pytest.approx(math.sqrt(24) / scaler.get_scale())
    assert not scaler.step(optimizer).skipped
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_a_step_never_called_leaves_masters_no_gradient():
    model = low_model()
    optimizer = MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    give_gradients(model, 0)
    optimizer.widen_gradients_()
    assert all(master.grad is p.grad for master, p in zip(optimizer.master_params(), model.parameters(), strict=True))
    model.zero_grad()
    assert [master.grad for master in optimizer.master_params()] == [None] * 6
    give_gradients(model, 0)
    optimizer.widen_gradients_()
    model.zero_grad()
    optimizer.zero_grad()
    assert [master_of(parameter).grad for parameter in model[0].parameters()] == [None, None]


def test_hooks_run_once_a_step_on_wrapper_and_wrapped():
    model, calls = low_model(), []
    inner = torch.optim.Adam(model.parameters())
    inner.register_step_pre_hook(lambda *_: calls.append("inner pre"))
    inner.register_step_post_hook(lambda *_: calls.append("inner post"))
    optimizer = MasterWeightOptimizer(inner, bucket_bytes=1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    give_gradients(model, 0)
    optimizer.step()
    assert calls == ["pre", "inner pre", "inner post", "post"]


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("masters", ["fp32", "kahan"])
def test_copies_are_independent_and_continue_alike(copier, masters):
    model = low_model()
    optimizer = MasterWeightOptimizer(torch.optim.Adam(model.parameters(), 0.1), masters=masters)
    give_gradients(model, 0)
    optimizer.step()
    twin, twin_optimizer = copier((model, optimizer))
    for step in (1, 2):
        give_gradients(twin, step)
        twin_optimizer.step()
    assert not torch.equal(twin[0].weight, model[0].weight)
    for step in (1, 2):
        give_gradients(model, step)
        optimizer.step()
    assert torch.equal(twin[0].weight, model[0].weight)
    torch.testing.assert_close(twin_optimizer.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


def test_what_was_written_before_a_model_was_pickled_is_there_after_it():
    weight = torch.nn.Linear(2, 1, bias=False).bfloat16().weight  # of the version that unpickled parameters have
    optimizer = MasterWeightOptimizer(torch.optim.SGD([weight], 1.0))
    with torch.no_grad():
        weight.fill_(5.0)
    weight, optimizer = pickle.loads(pickle.dumps((weight, optimizer)))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.tolist() == [[4.0, 4.0]]


def test_a_compensation_of_another_value_is_not_pickled():
    weight = torch.nn.Parameter(torch.full((2,), 100.0, dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer(torch.optim.SGD([weight], 0.125), masters="kahan")
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with torch.no_grad():
        weight.zero_()
    for parameter, (_, memory) in list(optimizer._rounding._made.items()):
        optimizer._rounding._made[parameter] = 1, memory  # the version that unpickled parameters have
    weight, optimizer = pickle.loads(pickle.dumps((weight, optimizer)))
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert weight.tolist() == [0.0, 0.0]


def test_lbfgs_with_closure_follows_float32():
    target = torch.tensor([0.3, -1.7, 2.2])
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer(torch.optim.LBFGS([weight], lr=0.5, max_iter=8))
    scaler = LossScaler()

    def closure():
        optimizer.zero_grad()
        loss = ((weight.float() - target) ** 2).sum()
        scaler.scale(loss).backward()
        return loss

    for _ in range(3):
        scaler.step(optimizer, closure)
        scaler.update()
    # The gradient is taken at the rounded weight: L-BFGS stops within two bfloat16 steps (2^-6 at 2.2).
    torch.testing.assert_close(master_of(weight), target, rtol=0, atol=2**-5)
    assert list(optimizer.param_groups[0]["params"]) == [weight]


@pytest.mark.parametrize("first", [0, 1])
def test_lbfgs_goes_on_where_a_parameter_is_frozen_and_trained_again(first):
    values = [torch.tensor([0.5, -1.0]), torch.tensor([2.0])]

    def train(parameters, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = sum(((parameter.bfloat16().float() - 3.0) ** 2).sum() for parameter in parameters)
            loss.backward()
            return loss

        for trains in (True, False, False, True):
            parameters[first].requires_grad_(trains)
            optimizer.step(closure)
        return parameters

    low = [torch.nn.Parameter(value.bfloat16()) for value in values]
    masters = train(low, MasterWeightOptimizer(torch.optim.LBFGS(low, lr=0.25, max_iter=1)))
    plain = [torch.nn.Parameter(value.clone()) for value in values]
    train(plain, torch.optim.LBFGS(plain, lr=0.25, max_iter=1))
    for mine, theirs in zip(masters, plain, strict=True):
        assert torch.equal(master_of(mine), theirs)


@pytest.mark.parametrize(("masters", "expected"), [("fp32", 1.1), ("kahan", 1.1), ("stochastic", 1.1), (None, 1.0)])
def test_small_updates_of_bfloat16_are_not_lost(masters, expected):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    if masters:
        optimizer = MasterWeightOptimizer(optimizer, masters=masters)
    for _ in range(100):
        weight.grad = -torch.ones(1000, dtype=torch.bfloat16)
        optimizer.step()
    # bfloat16 near 1.1 has steps of 2^-7; the stochastic mean of 1000 walks has a deviation of about 1e-3.
    tolerance = 5e-3 if masters == "stochastic" else 2**-8
    assert float(weight.detach().float().mean()) == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stochastic_rounding_is_unbiased_and_keeps_what_is_representable(dtype):
    torch.manual_seed(0)
    step = torch.finfo(dtype).eps
    values = torch.full((200_000,), 1.0 + 0.25 * step)
    rounded = stochastic_round(values, dtype).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + step}
    # 5 standard deviations of a mean of 200,000 draws with p = 1/4.
    assert float((rounded - 1.0).mean()) / step == pytest.approx(0.25, abs=5 * math.sqrt(0.1875 / 200_000))
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    kept = stochastic_round(every.float(), dtype)
    torch.testing.assert_close(kept, every, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("fused", "allowed"), [(True, 1.0), (False, 5.0)])
def test_peak_memory_of_a_step_is_what_the_docstring_says(fused, allowed, monkeypatch):
    monkeypatch.setattr(device_skip, "LOOKS_AT_HOST_FLAGS", False)
    count, size = 16, 10_000
    weights = [torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for _ in range(count)]
    bucket = 2 * 4 * size
    monkeypatch.setattr(layouts, "CHUNK_BYTES", bucket)
    optimizer = MasterWeightOptimizer(torch.optim.Adam(weights, fused=fused), bucket_bytes=bucket)
    scaler = LossScaler()
    scaler.scale(torch.zeros(()))

    def step():
        for weight in weights:
            weight.grad = torch.ones(size, dtype=torch.bfloat16)
        scaler.step(optimizer)
        scaler.update()

    step()
    kept = sum(m.nbytes for m in optimizer.master_params())
    kept += sum(v.nbytes for state in optimizer.state.values() for v in state.values() if v.dim())
    assert kept == (4 + 8) * count * size
    with PeakBytes(lambda: optimizer._layouts.held_bytes) as memory:
        step()
        step()  # in memory whose layout the step before has made
    # Beyond what was there: the 16-bit gradients, and one bucket; plain Adam has three temporaries alive.
    gradients, slack = 2 * count * size, 0 if fused else 3 * 4 * size
    assert memory.peak <= gradients + allowed * bucket + slack + 4096
    assert memory.peak >= gradients + bucket


@pytest.mark.parametrize(("fused", "found"), [(True, 16.25), (False, 17.75)])
def test_peak_memory_of_the_model_that_is_measured_on_a_gpu(fused, found, monkeypatch):
    """Bytes a parameter: docs/speed.md has them beside those of a GPU, and tools/gpu_runtime the model."""
    monkeypatch.setattr(device_skip, "LOOKS_AT_HOST_FLAGS", False)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(16)]).half()
    weights = list(model.parameters())
    inner = torch.optim.AdamW(weights, 1e-3, fused=fused, foreach=not fused)
    optimizer, scaler = MasterWeightOptimizer(inner, bucket_bytes=8 * 2**20), LossScaler(device="cpu")
    scaler.scale(torch.zeros(()))

    def step():
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        scaler.step(optimizer)
        scaler.update()

    step()
    kept = [*weights, *optimizer.master_params(), *(v for s in optimizer.state.values() for v in s.values() if v.dim())]
    optimizer.zero_grad()
    with PeakBytes(lambda: optimizer._layouts.held_bytes) as memory:
        step()
    peak = sum(tensor.nbytes for tensor in kept) + memory.peak
    assert peak / sum(weight.numel() for weight in weights) == pytest.approx(found, abs=0.01)


def test_options_are_checked():
    weight = torch.nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([weight], 0.1)
    with pytest.raises(OptionError, match=r"'kahn'.*Did you mean 'kahan'"):
        MasterWeightOptimizer(inner, masters="kahn")
    with pytest.raises(OptionError, match="got a list"):
        MasterWeightOptimizer([weight])
    with pytest.raises(OptionError, match="MasterWeightOptimizer already"):
        MasterWeightOptimizer(MasterWeightOptimizer(inner))


# ---------------------------------------------------------------------------------- methods of other optimizers' own


class ScheduleFree(torch.optim.SGD):
    """Steps at an average of where it is and where it goes; `eval()` exchanges one for the other."""

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if "ahead" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["ahead"], 0.3)

    def step(self, closure=None):
        returned = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("ahead", parameter.detach().clone()).sub_(0.01)
        return returned


class SAM(torch.optim.SGD):
    """Climbs to where the loss is higher, and steps with the gradient from there."""

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["origin"] = parameter.detach().clone()
                    parameter.add_(parameter.grad, alpha=0.001)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.copy_(self.state[parameter]["origin"])
        self.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def scale_gradients(self, factor):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad * factor

    def with_closure(self, scale, closure=None):
        loss = closure()
        self.step()
        return loss * scale


def follow(model, optimizer, reference, plain, use):
    for seed in range(4):
        use(model, optimizer, lambda model, seed=seed: give_gradients(model, seed))
        use(reference, plain, lambda _, seed=seed: _give(reference, give_gradients(copy.deepcopy(model), seed)))
    assert all(
        torch.equal(master_of(p) if is_low(p) else p, r) for p, r in zip(model.parameters(), reference, strict=True)
    )


def _give(parameters, values):
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value


def sam(model, optimizer, give):
    give(model)
    optimizer.first_step(zero_grad=True)
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else model
    assert all(parameter.grad is None for parameter in parameters)
    give(model)
    optimizer.second_step()
    optimizer.zero_grad()


def schedule_free(model, optimizer, give):
    give(model)
    optimizer.step()
    optimizer.eval()


@pytest.mark.parametrize(("kind", "use"), [(SAM, sam), (ScheduleFree, schedule_free)])
def test_methods_of_an_optimizers_own_update_masters(kind, use):
    model = low_model()
    optimizer = MasterWeightOptimizer(kind(model.parameters(), 0.05, momentum=0.9))
    reference = reference_of(model)
    follow(model, optimizer, reference, kind(reference, 0.05, momentum=0.9), use)
    assert torch.equal(model[0].weight, master_of(model[0].weight).to(torch.bfloat16))
    assert set(optimizer.state) <= set(model.parameters())


def test_such_a_method_changes_the_models_gradients():
    model = low_model()
    optimizer = MasterWeightOptimizer(SAM(model.parameters(), 0.05))
    before = give_gradients(model, 1)
    optimizer.scale_gradients(0.5)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert parameter.grad.dtype == parameter.dtype and torch.equal(parameter.grad.float(), gradient / 2)


@pytest.mark.parametrize("masters", ["fp32", "kahan"])
def test_such_a_method_gives_frozen_parameters_no_masters_until_they_are_trained(masters):
    model = low_model()
    frozen = next(model.parameters()).requires_grad_(False)
    optimizer = MasterWeightOptimizer(ScheduleFree(model.parameters(), 0.05), masters=masters)
    schedule_free(model, optimizer, lambda model: give_gradients(model[1:], 1))
    assert master_of(frozen) is None and 0 not in optimizer.state_dict()["masters"]
    frozen.requires_grad_(True)
    schedule_free(model, optimizer, lambda model: give_gradients(model, 2))
    assert 0 in optimizer.state_dict()["masters"]
    assert (master_of(frozen) is not None) == (masters == "fp32")
    frozen.requires_grad_(False)
    before = optimizer.state_dict()["masters"][0].clone()
    optimizer.eval()
    assert not torch.equal(optimizer.state_dict()["masters"][0], before), "trained before, so it is still averaged"


def test_such_a_method_is_handed_modules_and_classes_as_they_are():
    class Looks(torch.optim.SGD):
        def look(self, *args, **kwargs):
            return args, kwargs

    model = low_model()
    optimizer = MasterWeightOptimizer(Looks(model.parameters(), 0.05))
    (module, kind), kwargs = optimizer.look(model, torch.nn.Linear, other=model[0], closure=lambda: 7)
    assert module is model and kind is torch.nn.Linear and kwargs["other"] is model[0]
    assert kwargs["closure"]() == 7


def test_a_closure_of_such_a_method_sees_the_models_parameters():
    model = low_model()
    optimizer = MasterWeightOptimizer(SAM(model.parameters(), 0.05))
    before, seen = model[0].weight.detach().clone(), []

    def closure():
        give_gradients(model, 1)
        seen.extend(parameter.dtype for parameter in optimizer.param_groups[0]["params"])
        return torch.tensor(2.0)

    assert optimizer.with_closure(3.0, closure=closure) == 6.0
    assert torch.bfloat16 in seen and not torch.equal(model[0].weight, before)


def test_what_the_wrapped_optimizer_lacks_is_no_attribute():
    model = low_model()
    optimizer = MasterWeightOptimizer(SAM(model.parameters(), 0.05))
    assert hasattr(optimizer, "first_step") and not hasattr(optimizer, "train") and not hasattr(optimizer, "_private")
    assert not hasattr(object.__new__(MasterWeightOptimizer), "first_step")
    assert copy.deepcopy(optimizer).first_step.func.__self__ is not optimizer


@pytest.mark.parametrize("gradient", [-3e38, 3e38])
def test_compensated_sums_past_the_largest_bfloat16_are_infinite_and_not_nan(gradient):
    weight = torch.nn.Parameter(torch.tensor([3.0e38, 1.0], dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer(torch.optim.SGD([weight], 1.0), masters="kahan")
    if gradient > 0:
        weight.data.neg_()
    for value in (gradient / 7.5, 0.0):  # 3.4e38: finite in float32, infinite in bfloat16
        weight.grad = torch.tensor([value, 0.0], dtype=torch.bfloat16)
        optimizer.step()
        assert weight[0].item() == (math.inf if gradient < 0 else -math.inf)
        assert abs(weight[1].item()) == 1.0


def test_multi_tensor_copies_hold_one_dtype(monkeypatch):
    """A CUDA kernel of torch's took the dtype of the first destination for all."""
    seen, copy_ = [], torch._foreach_copy_

    def looking(targets, sources):
        seen.append(({each.dtype for each in targets}, {each.dtype for each in sources}))
        copy_(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", looking)
    parameters = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16) * 2]
    optimizer = MasterWeightOptimizer(torch.optim.SGD(parameters, 0.25))
    sum(parameter.float().sum() for parameter in parameters).backward()
    optimizer.step()
    assert all(len(targets) == len(sources) == 1 for targets, sources in seen) and len(seen) == 4
    assert all(torch.equal(parameter.detach().float(), torch.full((3,), 0.75)) for parameter in parameters)


class Sharpness(torch.optim.SGD):
    """SAM in one step: up by the gradients that stand, and down by those that the closure leaves there."""

    @torch.no_grad()
    def step(self, closure):
        every = [p for group in self.param_groups for p in group["params"]]
        self.stood = [None if p.grad is None else p.grad.clone() for p in every]
        climbed = [0.0 if gradient is None else 0.125 * gradient for gradient in self.stood]
        for p, way in zip(every, climbed, strict=True):
            p.add_(way)
        self.zero_grad()
        loss = torch.enable_grad()(closure)()
        for p, way in zip(every, climbed, strict=True):
            p.sub_(way)
        super().step()
        return loss


def two_halves(dtype, masters, scaler):
    """Four such steps of two weights; one is in the first half of every other step only."""
    weights = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2)]
    optimizer = plain = Sharpness(weights, 0.25, momentum=0.5)
    if masters is not None:
        optimizer = MasterWeightOptimizer(plain, masters=masters)
    stood = []
    for number in range(4):
        scaler.scale(sum((p.float() * 2).sum() for p in weights[: 1 + number % 2])).backward()

        def closure():
            loss = sum((p.float() * 3).sum() for p in weights)
            scaler.scale(loss).backward()
            return loss

        scaler.step(optimizer, closure=closure)
        scaler.update()
        stood.append([None if gradient is None else gradient.tolist() for gradient in plain.stood])
        for p in weights:  # as model.zero_grad(), of which the optimizer hears nothing
            p.grad = None
    return stood, [p.detach().float() for p in weights]


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("masters", ["fp32", "kahan"])
def test_a_step_with_a_closure_sees_the_gradients_that_stand_before_it(masters, scales):
    expected = two_halves(torch.float32, None, LossScaler(8.0, enabled=scales))
    assert expected[0][:2] == [[[2.0, 2.0], None], [[2.0, 2.0]] * 2]
    found = two_halves(torch.bfloat16, masters, LossScaler(8.0, enabled=scales))
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        assert torch.equal(one, other.bfloat16().float())


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_zeros_that_zero_grad_leaves_are_stepped_as_in_float32(dtype, unscales):
    ends = []
    for low in (torch.float32, dtype):
        weights = [torch.nn.Parameter(torch.ones(2, dtype=low)) for _ in range(2)]
        optimizer = torch.optim.SGD(weights, 0.25, momentum=0.5)
        optimizer = optimizer if low == torch.float32 else MasterWeightOptimizer(optimizer)
        scaler = LossScaler(4.0)
        for number in range(3):
            optimizer.zero_grad(set_to_none=False)
            assert number == 0 or [p.grad.tolist() for p in weights] == [[0.0, 0.0]] * 2
            scaler.scale(sum(p.float().sum() for p in weights[: 2 if number == 0 else 1])).backward()
            assert {p.grad.dtype for p in weights if p.grad is not None} == {low}
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        ends.append([p.tolist() for p in weights])
    assert ends[0] == ends[1]
    optimizer.zero_grad()
    assert [p.grad for p in weights] == [None, None]


def test_random_rounding_on_several_ranks_is_warned_about_once(monkeypatch, caplog):
    from fxamp.runtime import rounding

    monkeypatch.setattr(rounding, "several_ranks", lambda: True)
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer(torch.optim.SGD([parameter], 0.1), masters="stochastic")
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert [record.message for record in caplog.records if "replicas drift apart" in record.message]
    assert len(caplog.records) == 1


MOVED = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fxamp
from fxamp.counting import fake_cuda
from fxamp.runtime.masters import attach_master, is_master_written, master_of, stored_master

fake_cuda.install()
for use in (
    lambda optimizer, parameter: optimizer.step(),
    lambda optimizer, parameter: optimizer.step(lambda: 1.0),
    lambda optimizer, parameter: (parameter.mul_(2), optimizer.step()),
    lambda optimizer, parameter: list(optimizer.master_params()),
    lambda optimizer, parameter: optimizer.widen_gradients_(),
    lambda optimizer, parameter: optimizer.state_dict(),
    lambda optimizer, parameter: optimizer.resync_masters(),
):
    with FakeTensorMode(), torch.no_grad():
        parameter = torch.nn.Parameter(torch.ones(3, device="cuda", dtype=torch.half))
        optimizer = fxamp.MasterWeightOptimizer(torch.optim.AdamW([parameter]))
        attach_master(parameter, torch.ones(3))  # from before model.cuda()
        parameter.grad = torch.ones_like(parameter)
        use(optimizer, parameter)
        print(master_of(parameter).device.type)
        attach_master(parameter, torch.ones(3))
        parameter._fxamp_master.add_(1)
        print(stored_master(parameter).device.type, is_master_written(parameter))
"""


def test_a_master_follows_its_parameter_to_another_device():
    """Fake CUDA tensors, in a process of their own: what lets them be opens torch for good."""
    done = subprocess.run([sys.executable, "-c", MOVED], capture_output=True, text=True)
    assert done.stdout.split() == ["cuda", "cuda", "True"] * 7, done.stderr


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_cleared_inside_of_a_compiled_function(set_to_none):
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4).half()
        optimizer, scaler = MasterWeightOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)), LossScaler(8.0)

        def train(model=model, optimizer=optimizer, scaler=scaler):
            optimizer.zero_grad(set_to_none)
            scaler.scale(model(torch.ones(2, 4, dtype=torch.float16)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        run = torch.compile(train, backend="eager") if compiled else train
        for _ in range(3):
            run()
        found.append(master_of(model.weight))
    assert torch.equal(*found)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("scaler", [None, LossScaler(8.0)], ids=["plain", "scaler"])
def test_a_step_inside_of_a_compiled_function_is_as_ever(scaler):
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4).half()
        optimizer = MasterWeightOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for parameter in model.parameters():
            loosen(parameter)  # as convert() leaves it

        def step(optimizer=optimizer):
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()

        run = torch.compile(step, backend="eager") if compiled else step
        for _ in range(2):
            loss = model(torch.ones(2, 4, dtype=torch.float16)).sum()
            (loss if scaler is None else scaler.scale(loss)).backward()
            run()
            optimizer.zero_grad()
        found.append(master_of(model.weight))
    assert torch.equal(*found)


class ByPlace(torch.optim.Optimizer):
    """Keeps its momentum by the places of parameters in their group, and decays those without a gradient too."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.momenta = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                parameter.mul_(0.5)
                if parameter.grad is not None:
                    momentum = self.momenta.setdefault(place, torch.zeros_like(parameter))
                    parameter.sub_(momentum.mul_(0.5).add_(parameter.grad), alpha=group["lr"])


@pytest.mark.parametrize("masters", ["fp32", "kahan"])
def test_an_optimizer_that_knows_parameters_by_their_places_sees_all_of_them(masters):
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        parameters = [torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size in (2, 3, 4)]
        parameters[2].requires_grad_(False)
        optimizer = ByPlace(parameters, 0.25)
        if dtype is torch.bfloat16:
            optimizer = MasterWeightOptimizer(optimizer, masters=masters)
        for iteration in range(4):
            optimizer.zero_grad()
            parameters[1].grad = torch.full_like(parameters[1], -1.0)
            if iteration % 2 == 0:
                parameters[0].grad = torch.full_like(parameters[0], 2.0)
            optimizer.step()
        found.append([parameter.detach().float() for parameter in parameters])
    assert not hasattr(parameters[2], "_fxamp_master") and parameters[2].eq(1.0).all(), "frozen"
    for ours, theirs in zip(found[1][:2], found[0][:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0)


def test_a_parameter_without_a_gradient_is_not_written_where_the_optimizer_leaves_it_alone():
    weight, unused = (torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = MasterWeightOptimizer(ThirdParty([weight, unused], 0.1))
    loss = (weight * unused).sum()
    weight.grad = torch.ones_like(weight)
    version = unused._version
    optimizer.step()
    assert unused._version == version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # weight was stepped


@pytest.mark.parametrize("make", [KINDS["fused_sgd"], KINDS["fused_adamw"], KINDS["adam"]])
def test_a_model_that_becomes_channels_last_after_its_masters_were_made(make):
    weights = []
    for becomes_early in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(8, 8, 3).bfloat16()
        inputs = torch.randn(2, 8, 6, 6).bfloat16().to(memory_format=torch.channels_last)
        if becomes_early:
            model.to(memory_format=torch.channels_last)
        optimizer = MasterWeightOptimizer(make(model.parameters()))
        if not becomes_early:
            model.to(memory_format=torch.channels_last)
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).float().square().mean().backward()
            optimizer.step()
        weights.append(model.weight.detach().contiguous())
    assert torch.equal(*weights)


def test_a_model_that_becomes_double_has_no_masters_any_more():
    model = torch.nn.Linear(2, 2).bfloat16()
    optimizer = MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.5))
    model.double()
    before = model.weight.detach().clone()
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.5)


def test_parameters_that_share_memory_are_refused():
    weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    part, rest = torch.nn.Parameter(weight.detach()[:2]), torch.nn.Parameter(weight.detach()[2:])
    with pytest.raises(OptionError, match="share memory"):
        MasterWeightOptimizer(torch.optim.SGD([weight, part], 0.1))
    optimizer = MasterWeightOptimizer(torch.optim.SGD([part, rest], 0.1))
    with pytest.raises(OptionError, match="share memory"):
        optimizer.add_param_group({"params": [weight]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("where", ["wrapper", "inside", "everywhere"])
def test_hooks_before_a_step_see_true_gradients(where):
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = MasterWeightOptimizer(torch.optim.SGD([weight], 0.5))
    scaler, seen = LossScaler(1024.0), []

    def clip(*_):
        seen.append(torch.nn.utils.clip_grad_norm_([weight], 1.0).item())

    register = {
        "wrapper": optimizer.register_step_pre_hook,
        "inside": optimizer.optimizer.register_step_pre_hook,
        "everywhere": register_optimizer_step_pre_hook,
    }[where]
    handle = register(clip)
    try:
        scaler.scale(weight.float().sum()).backward()
        scaler.step(optimizer)
    finally:
        handle.remove()
    assert seen[0] == 2.0
    torch.testing.assert_close(weight.detach(), torch.full((4,), 0.75, dtype=torch.float16))


class HandsOn:
    """Around an optimizer, as training loops have them: what it lacks itself it asks of that."""

    def __init__(self, optimizer):
        self._inner = optimizer

    def __getattr__(self, name):
        return getattr(self.__dict__["_inner"], name)

    def step(self, *args, **kwargs):
        return self._inner.step(*args, **kwargs)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["masters", "fused_masters", "fused"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_wrapper_that_hands_on(kind, depth, on_gpu, monkeypatch):
    monkeypatch.setattr(device_skip, "LOOKS_AT_HOST_FLAGS", not on_gpu)
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float32 if kind == "fused" else torch.float16))
    optimizer = torch.optim.SGD([weight], 0.5, fused="fused" in kind)
    if "masters" in kind:
        optimizer = MasterWeightOptimizer(optimizer)
    for _ in range(depth):
        optimizer = HandsOn(optimizer)
    scaler = LossScaler(1024.0)
    for factor in (math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight.float() * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(weight.detach().float(), torch.full((4,), 0.5))


def test_a_parameter_without_a_gradient_takes_what_is_written_past_autograds_count():
    class Decays(ThirdParty):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(0.5)
            return super().step(closure)

    weight, unused = (torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = MasterWeightOptimizer(Decays([weight, unused], 0.1))
    for left in (0.5, 0.25):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert unused.eq(left).all() and master_of(unused).eq(left).all()
