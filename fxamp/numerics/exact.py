"""Weights that are stored low, as an fp32 run reads them."""

from typing import Any

import torch

from fxamp.runtime.masters import MASTER, exact_values


def exact_weight(weight: torch.Tensor) -> torch.Tensor:
    """The float32 numbers that a low weight stands for; backward goes on to the weight, as to a float32 one."""
    return _Master.apply(weight) if hasattr(weight, MASTER) else weight.float()  # type: ignore[no-untyped-call]


class _Master(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return exact_values(weight).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient
