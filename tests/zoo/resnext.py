"""ResNeXt: grouped bottlenecks (Xie et al., arXiv:1611.05431)."""

import torch
from torch import nn

from tests.zoo.resnet50 import ResNet


def make() -> nn.Module:
    return ResNet(depths=(1, 1, 1, 1), width=8, groups=4)


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(8, 3, 64, 64),)
