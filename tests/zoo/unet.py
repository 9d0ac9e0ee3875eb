"""U-Net: a contracting and an expanding path with skips (Ronneberger et al., arXiv:1505.04597)."""

import torch
from torch import nn


def double(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = double(1, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join2, self.join1 = double(4 * width, 2 * width), double(2 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        bottom = self.bottom(self.pool(second))
        second = self.join2(torch.cat([self.up2(bottom), second], 1))
        return self.head(self.join1(torch.cat([self.up1(second), first], 1)))


def make() -> nn.Module:
    return UNet()


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 1, 16, 16),)
