"""Jasper in small: one-dimensional convolutions with residuals for speech (Li et al., arXiv:1904.03288)."""

import torch
from torch import nn

from fxamp.counting.zoo.speech import Jasper


def make() -> nn.Module:
    return Jasper(12, 16, ((16, 5), (32, 7)), 2, (32, 32), 10)


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 12, 24),)
