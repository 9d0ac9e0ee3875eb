"""SSD on a VGG trunk: several maps, boxes and classes from each (Liu et al., arXiv:1512.02325)."""

import torch
from torch import nn
from torch.nn import functional as F


class L2Norm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels,), 20.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = x.pow(2).sum(dim=1, keepdim=True).sqrt() + 1e-10
        return self.weight[None, :, None, None] * (x / norm)


def conv(inside: int, outside: int, **options) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1, **options), nn.ReLU(inplace=True))


class SSD(nn.Module):
    def __init__(self, classes: int = 5, anchors: int = 3) -> None:
        super().__init__()
        self.low = nn.Sequential(conv(3, 8), conv(8, 8), nn.MaxPool2d(2, ceil_mode=True), conv(8, 16), conv(16, 16))
        self.norm = L2Norm(16)
        self.high = nn.Sequential(nn.MaxPool2d(2), conv(16, 32), conv(32, 32))
        self.extra = nn.Sequential(nn.Conv2d(32, 16, 1), nn.ReLU(inplace=True), conv(16, 32, stride=2))
        widths = (16, 32, 32)
        self.boxes = nn.ModuleList(nn.Conv2d(width, anchors * 4, 3, padding=1) for width in widths)
        self.classes = nn.ModuleList(nn.Conv2d(width, anchors * classes, 3, padding=1) for width in widths)
        self.count = classes

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low = self.low(x)
        high = self.high(low)
        maps = [self.norm(low), high, self.extra(high)]
        boxes = [head(m).permute(0, 2, 3, 1).flatten(1) for head, m in zip(self.boxes, maps, strict=True)]
        scores = [head(m).permute(0, 2, 3, 1).flatten(1) for head, m in zip(self.classes, maps, strict=True)]
        found = torch.cat(scores, 1).view(x.size(0), -1, self.count)
        return torch.cat(boxes, 1).view(x.size(0), -1, 4), F.softmax(found, -1)


def make() -> nn.Module:
    return SSD()


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 3, 24, 24),)
