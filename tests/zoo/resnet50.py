"""ResNet-50 in small: bottleneck blocks (He et al., arXiv:1512.03385)."""

import torch
from torch import nn

from fxamp.counting.zoo.vision import ResNet


def make() -> nn.Module:
    return ResNet((1, 2, 2, 1), 8, classes=10)


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(8, 3, 64, 64),)
