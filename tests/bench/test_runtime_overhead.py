"""Host time of scaler and wrapper per step, side by side with torch's.

    python -m pytest tests/bench/test_runtime_overhead.py --benchmark-only --benchmark-group-by=param:kind

Small parameters, so that the time is the host's: 100 tensors of 64 numbers, float32 (bfloat16 under masters).
"""

import pytest
import torch

from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.scaler import LossScaler

pytest.importorskip("pytest_benchmark")

COUNT, SIZE = 100, 64
KINDS = {
    "fused_adamw": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "foreach_adamw": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
    "plain_adamw": lambda p: torch.optim.AdamW(p, 1e-3, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9),
}


def one_step(scaler, optimizer, parameters, gradients):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    scaler.step(optimizer)
    scaler.update()


def setting(make_scaler, kind, dtype=torch.float32, wrap=lambda optimizer: optimizer):
    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.randn(SIZE).to(dtype)) for _ in range(COUNT)]
    gradients = [torch.randn(SIZE).to(dtype) for _ in range(COUNT)]
    scaler, optimizer = make_scaler(), wrap(KINDS[kind](parameters))
    scaler.scale(torch.zeros(()))
    return scaler, optimizer, parameters, gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scaler", ["torch", "fxamp"])
def test_step_of_a_plain_optimizer(benchmark, kind, scaler):
    make = LossScaler if scaler == "fxamp" else lambda: torch.amp.GradScaler("cpu")
    benchmark(one_step, *setting(make, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_step_with_masters(benchmark, kind):
    benchmark(one_step, *setting(LossScaler, kind, torch.bfloat16, MasterWeightOptimizer))


def step_clipped_by_hand(scaler, optimizer, parameters, gradients):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scaler", ["torch", "fxamp"])
def test_step_that_is_clipped_between_unscale_and_step(benchmark, kind, scaler):
    """fxamp's looks at the gradients once more there, for whatever else may have been written."""
    make = LossScaler if scaler == "fxamp" else lambda: torch.amp.GradScaler("cpu")
    benchmark(step_clipped_by_hand, *setting(make, kind))
