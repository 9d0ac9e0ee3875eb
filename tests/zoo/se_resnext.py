"""SE-ResNeXt in small: squeeze and excitation on grouped bottlenecks (Hu et al., arXiv:1709.01507)."""

import torch
from torch import nn

from fxamp.counting.zoo.vision import ResNet, SqueezeBottleneck


def make() -> nn.Module:
    return ResNet((1, 1, 1, 1), 8, classes=10, groups=4, group_width=2, block=SqueezeBottleneck)


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(8, 3, 64, 64),)
