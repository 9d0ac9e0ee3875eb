"""GNMT in small: a packed bidirectional encoder, residual LSTMs, additive attention (Wu et al., arXiv:1609.08144)."""

import torch
from torch import nn

from fxamp.counting.zoo.gnmt import GNMT


def make() -> nn.Module:
    return GNMT(32, 16, 3)


def inputs() -> tuple[torch.Tensor, ...]:
    tokens, lengths = torch.randint(1, 32, (3, 7)), torch.tensor([4, 7, 5])
    return tokens * (torch.arange(7) < lengths[:, None]), torch.randint(1, 32, (3, 6)), lengths
