"""ResNet-50: bottleneck blocks (He et al., arXiv:1512.03385)."""

import torch
from torch import nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int, groups: int = 1, expansion: int = 4) -> None:
        super().__init__()
        outside = width * expansion
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or inside != outside:
            self.down = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.relu(self.bn1(self.conv1(x)))
        h = self.relu(self.bn2(self.conv2(h)))
        h = self.gate(self.bn3(self.conv3(h)))
        h += x if self.down is None else self.down(x)
        return self.relu(h)


class ResNet(nn.Module):
    def __init__(self, block=Bottleneck, depths=(1, 2, 2, 1), width: int = 8, groups: int = 1) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
        )
        inside, blocks = width, []
        for stage, depth in enumerate(depths):
            for position in range(depth):
                stride = 2 if stage and not position else 1
                blocks.append(block(inside, width * 2**stage, stride, groups))
                inside = width * 2**stage * 4
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inside, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks(self.stem(x))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(h, 1), 1))


def make() -> nn.Module:
    return ResNet()


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(8, 3, 64, 64),)
