"""Hooks of an optimizer's step, and steps put on one optimizer, see what they see without a scaler and masters."""

import types

import pytest
import torch
from runtime_instruments import NoSync
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fxamp
from fxamp.errors import OptionError
from fxamp.runtime import device_skip


class Plain(torch.optim.Optimizer):
    """An optimizer of another package."""

    def __init__(self, parameters, lr=1.0):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad.sign())
        return loss


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "of another package": lambda parameters: Plain(parameters, lr=0.125),
}


@pytest.fixture
def on_device(monkeypatch):
    monkeypatch.setattr(device_skip, "LOOKS_AT_HOST_FLAGS", False)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("has_masters", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_after_a_skipped_step_a_post_hook_finds_the_old_weights(make, has_masters, is_global):
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16 if has_masters else torch.float32))
    inner = make([weight])
    optimizer = fxamp.MasterWeightOptimizer(inner) if has_masters else inner
    scaler, seen = fxamp.LossScaler(8.0), []

    def note(*_):
        seen.append(weight.detach().clone())

    handle = register_optimizer_step_post_hook(note) if is_global else inner.register_step_post_hook(note)
    try:
        for gradient in (1.0, torch.inf, 1.0):
            before = weight.detach().clone()
            scaler.scale((weight.float() * gradient).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert torch.equal(seen[-1], weight)
            assert torch.equal(before, weight) == (gradient == torch.inf)
    finally:
        handle.remove()
    assert len(seen) == 3


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("has_masters", [False, True])
@pytest.mark.parametrize("make", [OPTIMIZERS["fused"], Plain, lambda p: put_on(torch.optim.SGD(p, lr=0.1))])
def test_hooks_and_steps_put_on_an_optimizer_wait_for_no_device(make, has_masters):
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16 if has_masters else torch.float32))
    inner = make([weight])
    inner.register_step_post_hook(floor)
    optimizer = fxamp.MasterWeightOptimizer(inner) if has_masters else inner
    scaler = fxamp.LossScaler(8.0, device="cpu")
    with NoSync():
        for gradient in (1.0, torch.inf, 1.0):
            scaler.scale((weight.float() * gradient).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert weight.isfinite().all() and scaler.get_scale() == 4.0


def put_on(optimizer):
    """An optimizer with a step of its own."""
    optimizer.step = types.MethodType(lambda self, closure=None: type(self).step(self, closure), optimizer)
    return optimizer


def clip(optimizer, args, kwargs):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.clamp_(min=0)


def floor(optimizer, args, kwargs):
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.clamp_(min=-0.5)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("make", [Plain, lambda p: torch.optim.SGD(p, lr=1.0)], ids=["another", "torch"])
@pytest.mark.parametrize("scaler", [None, "scaler"])
def test_hooks_of_the_wrapped_optimizer_act_on_the_parameters(make, closure, scaler):
    found = []
    for dtype in (torch.float32, torch.float16):
        weight = torch.nn.Parameter(torch.tensor([0.5, 0.25, -0.25], dtype=dtype))
        inner = make([weight])
        inner.register_step_pre_hook(clip)
        inner.register_step_post_hook(floor)
        optimizer = fxamp.MasterWeightOptimizer(inner) if dtype == torch.float16 else inner
        scaling = fxamp.LossScaler(8.0) if scaler else fxamp.NoOpLossScaler()
        for _ in range(2):
            factors = torch.tensor([1.0, -1.0, 1.0])

            def evaluate(weight=weight, optimizer=optimizer, scaling=scaling, factors=factors):
                optimizer.zero_grad()
                loss = (weight.float() * factors).sum()
                scaling.scale(loss).backward()
                return loss

            evaluate()
            scaling.step(optimizer, *([evaluate] if closure else []))
            scaling.update()
        found.append(weight.detach().float())
    assert torch.equal(*found)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_hooks_on_all_optimizers_are_called_once_for_a_step(make):
    weight, called = torch.nn.Parameter(torch.ones(3, dtype=torch.float16)), []
    optimizer = fxamp.MasterWeightOptimizer(make([weight]))
    handles = [
        register_optimizer_step_pre_hook(lambda each, *_: called.append(("pre", each))),
        register_optimizer_step_post_hook(lambda each, *_: called.append(("post", each))),
    ]
    try:
        weight.grad = torch.ones(3, dtype=torch.float16)
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert called == [("pre", optimizer), ("post", optimizer)]


def test_a_pre_hook_may_exchange_the_closure():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    inner, called = Plain([weight]), []
    inner.register_step_pre_hook(lambda optimizer, args, kwargs: ((optimizer, lambda: called.append(1)), kwargs))
    fxamp.MasterWeightOptimizer(inner).step(lambda: called.append(0))
    assert called == [1]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_step_that_was_put_on_the_optimizer_is_taken(when, is_scheduled):
    """As hand-written clipping does; what learning rate schedulers put there is no other step."""
    weight = torch.nn.Parameter(torch.full((3,), 2.0, dtype=torch.bfloat16))
    inner = torch.optim.SGD([weight], lr=1.0)

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.clamp_(max=0.25)
        return type(self).step(self, closure)

    if when == "before":
        inner.step = types.MethodType(step, inner)
    optimizer = fxamp.MasterWeightOptimizer(inner)
    if is_scheduled:
        torch.optim.lr_scheduler.StepLR(inner, 5)
    if when == "after":
        inner.step = types.MethodType(step, inner)
    weight.grad = torch.ones(3, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(weight, torch.full((3,), 1.75, dtype=torch.bfloat16))


def test_schedulers_leave_an_optimizer_its_buckets(monkeypatch):
    from fxamp.runtime.stand_ins import step_of_each

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 5)
    assert step_of_each(optimizer) is not None
    optimizer.step = lambda: None
    assert step_of_each(optimizer) is None


def test_a_gradient_dtype_of_the_users_outlives_zero_grad():
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD([weight], lr=1.0))
    for set_to_none in (True, False, True):
        for _ in range(1024):
            (weight * 1.0).sum().backward()
        assert weight.grad.dtype == torch.float32 and weight.grad[0] == 1024
        optimizer.zero_grad(set_to_none)


def test_a_differentiable_optimizer_is_refused():
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(OptionError, match="differentiable"):
        fxamp.MasterWeightOptimizer(torch.optim.SGD([weight], lr=1.0, differentiable=True))


@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_hook_sees_gradients_without_the_scale(when, is_global):
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    inner = torch.optim.SGD([weight], lr=0.125)
    optimizer, scaler, seen = fxamp.MasterWeightOptimizer(inner), fxamp.LossScaler(8.0), []
    on_all = {"pre": register_optimizer_step_pre_hook, "post": register_optimizer_step_post_hook}[when]
    on_one = {"pre": optimizer.register_step_pre_hook, "post": optimizer.register_step_post_hook}[when]
    handle = (on_all if is_global else on_one)(lambda *_: seen.append(weight.grad.tolist()))
    try:
        scaler.scale((weight * 2).sum()).backward()
        scaler.step(optimizer)
    finally:
        handle.remove()
    assert seen and all(each == [2.0] * 3 for each in seen)
    assert weight.tolist() == [0.75] * 3
