"""Runs that fail without loss scaling, and match float32 with it."""

from statistics import mean

import pytest
import torch
from torch.nn import functional as F

import fxamp
from fxamp.demo.suite.recurrent_lm import RecurrentModel, recurrent_lm
from fxamp.runtime.fixed_scalers import NoOpLossScaler
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.scaler import LossScaler


def regression(dtype, scaler, factor, steps=60):
    """Least squares whose loss is multiplied by `factor`, so that its gradients have that magnitude."""
    torch.manual_seed(0)
    inputs, true = torch.randn(32, 4), torch.tensor([1.0, -2.0, 0.5, 3.0])
    weight = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    optimizer = torch.optim.SGD([weight], 0.1 / factor)
    optimizer = MasterWeightOptimizer(optimizer) if dtype != torch.float32 else optimizer
    for _ in range(steps):
        optimizer.zero_grad()
        # The residual passes through fp16, as an activation's gradient does on its way back.
        residual = (inputs.to(dtype) @ weight).float() - inputs @ true
        scaler.scale(residual.square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    return float((inputs @ weight.detach().float() - inputs @ true).square().mean())


@pytest.mark.parametrize("exponent", [-20, -25, -30])
def test_tiny_gradients_learn_in_fp16_with_the_scaler_only(exponent):
    factor = 2.0**exponent
    start = regression(torch.float32, NoOpLossScaler(), factor, steps=0)
    single = regression(torch.float32, NoOpLossScaler(), factor)
    scaled = regression(torch.float16, LossScaler(2.0 ** min(24, -exponent)), factor)
    unscaled = regression(torch.float16, NoOpLossScaler(), factor)
    assert single < 1e-3 * start
    # fp16 weights of size 3 have steps of 2^-9: the rest of the loss is their rounding, about 4 * (2^-10)^2.
    assert scaled < single + 4 * 2.0**-18
    if exponent <= -25:
        assert unscaled == start, "every gradient is below fp16's smallest number"
    else:
        assert unscaled > 3 * scaled


def language_model(dtype, scaler, steps=140):
    """Losses of the suite's LSTM on the source of the standard library; a mean over 2^22 characters.

    So a gradient of a logit is p / 2^22 but for the character that comes, where it is (p - 1) / 2^22: float16 keeps the
    second, and flushes the first to zero where p is below 1/8.
    """
    torch.manual_seed(0)
    model = RecurrentModel(width=32)
    model = model if dtype == torch.float32 else fxamp.convert(model, dtype)
    optimizer = torch.optim.Adam(model.parameters(), 0.02, eps=1e-15)
    losses = []
    for text, following in recurrent_lm(torch.device("cpu"), steps).batches(1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text).flatten(0, 1), following.flatten())
        scaler.scale(loss * (following.numel() / 2**22)).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return losses


def test_figure_1_float16_diverges_without_scaling_and_matches_float32_with_it():
    single = language_model(torch.float32, NoOpLossScaler())
    scaled = language_model(torch.float16, LossScaler(2.0**16))
    unscaled = language_model(torch.float16, NoOpLossScaler())
    assert scaled == pytest.approx(single, rel=0.05)
    assert mean(scaled[-20:]) == pytest.approx(mean(single[-20:]), rel=0.005)
    assert mean(single[-20:]) < 0.6 * single[0]
    assert min(unscaled) < 0.8 * unscaled[0], "it learns at first"
    assert mean(unscaled[-20:]) > 1.2 * unscaled[0], "and then diverges"
