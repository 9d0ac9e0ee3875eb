"""Training on one device while another is the default one: `torch.set_default_device` is the user's.

What a scaler, masters or a checkpoint make for the host would be on `meta` here, where nothing can be read.
"""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from tests.devices import default_device

HOST = {"device": "cpu"}
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0), **HOST)
Y = torch.arange(16, **HOST) % 4


def model_of(opt_level, dtype):
    torch.manual_seed(1)
    layers = nn.Linear(8, 16, **HOST), nn.ReLU(), nn.BatchNorm1d(16, **HOST), nn.Linear(16, 4, **HOST)
    return fxamp.convert(nn.Sequential(*layers), dtype=dtype, opt_level=opt_level)


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1),
}


def trained(opt_level, dtype, optimizer, scaler, way, path):
    """Everything that eight steps say and leave, one of which overflows."""
    model = model_of(opt_level, dtype)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    if opt_level == "O2":
        optimizer = fxamp.MasterWeightOptimizer(optimizer)
    told = []

    def loss_of(x):
        loss = F.cross_entropy(model(x), Y)
        scaler.scale(loss).backward()
        return loss

    for step in range(8):
        x = X * torch.inf if step == 3 and way != "closure" else X
        optimizer.zero_grad()
        if way == "closure":
            result = scaler.step(optimizer, lambda: (optimizer.zero_grad(), loss_of(X))[1])
        else:
            told.append(loss_of(x).item())
            if way == "clipped by hand":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            result = scaler.step(optimizer, **({"max_grad_norm": 1.0} if way == "clipped" else {}))
        scaler.update()
        told.append((bool(result.skipped), result.nonfinite, float(result.grad_norm) if way == "clipped" else None))
        if way == "checkpoint" and step == 5:
            fxamp.save_checkpoint(path, model=model, optimizer=optimizer, scaler=scaler)
            fxamp.load_checkpoint(path, model=model, optimizer=optimizer, scaler=scaler)
    return told, scaler.state_dict(), list(model.state_dict().values())


@functools.cache
def why_not(optimizer):
    """What torch's own optimizer says where it makes its count of steps on the default device, as before torch 2.13."""
    weight = nn.Parameter(torch.ones(2, **HOST))
    weight.grad = torch.ones(2, **HOST)
    with default_device("meta"):
        try:
            OPTIMIZERS[optimizer]([weight]).step(lambda: (weight * 2).sum())
        except RuntimeError as error:
            return f"torch's own optimizer does not run under another default device: {error}"
    return ""


SCALERS = {
    "dynamic": fxamp.LossScaler,
    "static": lambda: fxamp.StaticLossScaler(128.0),
    "none": fxamp.NoOpLossScaler,
    "disabled": lambda: fxamp.LossScaler(enabled=False),
}


WAYS = ["plain", "clipped", "clipped by hand", "checkpoint"]
STEPS = [(optimizer, way) for optimizer in ("adamw", "fused", "sgd") for way in WAYS] + [("lbfgs", "closure")]


@pytest.mark.parametrize(("optimizer", "way"), STEPS)
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_steps_are_the_same_whatever_the_default_device_is(opt_level, dtype, optimizer, scaler, way, tmp_path):
    if reason := why_not(optimizer):
        pytest.skip(reason)
    setting = opt_level, dtype, optimizer
    told, state, weights = trained(*setting, SCALERS[scaler](), way, tmp_path / "one.pt")
    with default_device("meta"):
        found = trained(*setting, SCALERS[scaler](), way, tmp_path / "other.pt")
    assert repr(found[:2]) == repr((told, state))
    for one, other in zip(found[2], weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
