"""Small models that are stored low, and steps of them."""

import torch
from torch import nn

import fxamp

X = torch.ones(2, 8)


def converted(opt_level: str) -> nn.Module:
    return fxamp.convert(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.bfloat16, (X,), opt_level)


def steps(model: nn.Module, *optimizers: torch.optim.Optimizer, count: int = 3) -> None:
    for _ in range(count):
        model(X).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def exact_state(model, offset=2.0**-12):
    """The model's numbers with digits that bfloat16 does not have."""
    return {name: value.clone() + offset for name, value in model.state_dict().items()}
