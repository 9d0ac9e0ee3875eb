"""A whole training step under torch.compile does what it does without: overflows, scales and weights."""

import pytest
import torch
from torch import nn

import fxamp
from fxamp.runtime import apex

BAD = (1, 4)  # steps whose batch has an infinity

KINDS = {
    "float32": lambda model: (model, torch.optim.AdamW(model.parameters(), lr=0.01)),
    "fused": lambda model: (model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)),
    "half": lambda model: (model.half(), masters_of(model)),
    "O2": lambda model: (lowered := convert_o2(model), masters_of(lowered)),
}


def convert_o2(model):
    return fxamp.convert(model, torch.float16, opt_level="O2", example_inputs=(torch.randn(8, 4),))


def masters_of(model):
    return fxamp.MasterWeightOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


def plain(scaler, optimizer):
    scaler.step(optimizer)


def clipped(scaler, optimizer):
    scaler.step(optimizer, max_grad_norm=0.1)


def unscaled_first(scaler, optimizer):
    scaler.unscale_(optimizer)
    every = optimizer.master_params() if hasattr(optimizer, "master_params") else optimizer.param_groups[0]["params"]
    nn.utils.clip_grad_norm_(every, 0.1)
    scaler.step(optimizer)


def scales_and_weights(train, model, scale, dtype):
    scales = []
    for step in range(6):
        torch.manual_seed(step)
        x = torch.randn(8, 4)
        x[0, 0] = torch.inf if step in BAD else x[0, 0]
        train(x.to(dtype))
        scales.append(scale())
    return scales, [weight.detach().clone() for weight in model.parameters()]


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def run(kind, take_step, scaler, *, compiled):
    model, optimizer = KINDS[kind](mlp())

    def train(x):
        scaler.scale(model(x).float().pow(2).mean()).backward()
        take_step(scaler, optimizer)
        scaler.update()
        optimizer.zero_grad()

    dtype = torch.float16 if kind == "half" else torch.float32
    train = torch.compile(train, backend="eager") if compiled else train
    return scales_and_weights(train, model, scaler.get_scale, dtype)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("take_step", [plain, clipped, unscaled_first])
def test_a_compiled_step_skips_and_grows_as_an_eager_one(kind, take_step):
    eager, compiled = (
        run(kind, take_step, fxamp.LossScaler(1024.0, growth_interval=2), compiled=compiled)
        for compiled in (False, True)
    )
    assert eager[0] == [1024.0, 512.0, 512.0, 1024.0, 512.0, 512.0]
    assert compiled[0] == eager[0]
    assert all(map(torch.equal, compiled[1], eager[1])) and all(weight.isfinite().all() for weight in eager[1])


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_static_scale_skips_in_a_compiled_step():
    eager, compiled = (run("half", plain, fxamp.StaticLossScaler(64.0), compiled=each) for each in (False, True))
    assert all(map(torch.equal, compiled[1], eager[1])) and all(weight.isfinite().all() for weight in eager[1])


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_apexs_step_inside_of_a_compiled_function(opt_level):
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = mlp()
        model, optimizer = apex.initialize(
            model, torch.optim.AdamW(model.parameters(), lr=0.01), opt_level=opt_level, verbosity=0
        )

        def train(x, model=model, optimizer=optimizer):
            with apex.scale_loss(model(x).float().pow(2).mean(), optimizer) as scaled:
                scaled.backward()
            nn.utils.clip_grad_norm_(apex.master_params(optimizer), 0.1)
            optimizer.step()
            optimizer.zero_grad()

        train = torch.compile(train, backend="eager") if compiled else train
        found.append(
            scales_and_weights(train, model, lambda: apex.state_dict()["loss_scaler0"]["loss_scale"], torch.float32)
        )
    eager, compiled = found
    assert eager[0][-1] == eager[0][0] / 4 and compiled[0] == eager[0]
    assert all(map(torch.equal, compiled[1], eager[1]))
