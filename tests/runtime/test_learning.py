"""Runs that fail without loss scaling, and match float32 with it."""

import math

import pytest
import torch

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


class TinyLanguageModel(torch.nn.Module):
    """Embedding, LSTM cell by hand, head: what the guide's Figure 1 shows at large."""

    def __init__(self, vocabulary=16, width=24):
        super().__init__()
        self.table = torch.nn.Embedding(vocabulary, width)
        self.gates = torch.nn.Linear(2 * width, 4 * width)
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, tokens):
        state = memory = torch.zeros(len(tokens), self.head.in_features, dtype=self.head.weight.dtype)
        outputs = []
        for column in self.table(tokens).unbind(1):
            i, f, g, o = self.gates(torch.cat([column, state], 1)).chunk(4, 1)
            memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
            state = o.sigmoid() * memory.tanh()
            outputs.append(self.head(state))
        return torch.stack(outputs, 1)


def language_model(dtype, scaler, steps=40):
    """Losses on sequences that count up by a fixed stride; the mean over 65,536 makes gradients small."""
    torch.manual_seed(0)
    model = TinyLanguageModel().to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), 0.02, eps=1e-15)
    optimizer = MasterWeightOptimizer(optimizer) if dtype != torch.float32 else optimizer
    losses = []
    for _ in range(steps):
        first, stride = torch.randint(16, (16, 1)), torch.randint(1, 3, (16, 1))
        tokens = (first + stride * torch.arange(9)) % 16
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss / 65536).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return losses


def test_figure_1_fp16_stalls_without_scaling_and_matches_float32_with_it():
    single = language_model(torch.float32, NoOpLossScaler())
    scaled = language_model(torch.float16, LossScaler(2.0**20))
    unscaled = language_model(torch.float16, NoOpLossScaler())
    tail = [sum(losses[-5:]) / 5 for losses in (single, scaled, unscaled)]
    assert single[0] == pytest.approx(math.log(16), abs=0.3)
    assert tail[0] < 0.5 * single[0]
    assert tail[1] == pytest.approx(tail[0], rel=0.05)
    assert tail[2] > 1.2 * tail[0], tail
