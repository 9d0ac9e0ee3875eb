"""ResNeXt in small: grouped bottlenecks (Xie et al., arXiv:1611.05431)."""

import torch
from torch import nn

from fxamp.counting.zoo.vision import ResNet


def make() -> nn.Module:
    return ResNet((1, 1, 1, 1), 8, classes=10, groups=4, group_width=2)


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(8, 3, 64, 64),)
