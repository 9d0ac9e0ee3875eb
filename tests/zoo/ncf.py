"""Neural collaborative filtering in small: NeuMF (He et al., arXiv:1708.05031)."""

import torch
from torch import nn

from fxamp.counting.zoo.language import NCF


def make() -> nn.Module:
    return NCF(30, 20, 8, (32, 16, 8))


def inputs() -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 30, (64,)), torch.randint(0, 20, (64,))
