"""Weights that are stored low, as an fp32 run reads them."""

from typing import Any

import torch

from fxamp.runtime.masters import MASTER, exact_values


def exact_weight(weight: torch.Tensor) -> torch.Tensor:
    """The float32 numbers that a low weight stands for; backward goes on to the weight, as to a float32 one."""
    return _Master.apply(weight) if has_master(weight) else weight.float()  # type: ignore[no-untyped-call]


def has_master(weight: torch.Tensor) -> bool:
    """Whether a low weight stands for float32 numbers that are more exact than it is."""
    return hasattr(weight, MASTER)


class _Master(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return exact_values(weight).clone()  # asking for the master again writes into it, before this one's backward

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient
