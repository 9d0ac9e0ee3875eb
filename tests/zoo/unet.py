"""U-Net in small: a contracting and an expanding path with skips (Ronneberger et al., arXiv:1505.04597)."""

import torch
from torch import nn

from fxamp.counting.zoo.vision import UNet


def make() -> nn.Module:
    return UNet(8, 3, channels=1)


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 1, 16, 16),)
