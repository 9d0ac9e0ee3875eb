"""SE-ResNeXt: squeeze and excitation on grouped bottlenecks (Hu et al., arXiv:1709.01507)."""

import torch
from torch import nn

from tests.zoo.resnet50 import Bottleneck, ResNet


class SqueezeBottleneck(Bottleneck):
    def __init__(self, inside: int, width: int, stride: int, groups: int = 1) -> None:
        super().__init__(inside, width, stride, groups)
        self.squeeze = nn.Linear(width * 4, width)
        self.excite = nn.Linear(width, width * 4)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3))))))
        return x * scale[:, :, None, None]


def make() -> nn.Module:
    return ResNet(SqueezeBottleneck, depths=(1, 1, 1, 1), width=8, groups=4)


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(8, 3, 64, 64),)
