"""Jasper: one-dimensional convolutions with dense residuals for speech (Li et al., arXiv:1904.03288)."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, kernel: int, repeat: int = 2) -> None:
        super().__init__()
        widths = [inside] + [outside] * repeat
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, kernel, padding=kernel // 2, bias=False), nn.BatchNorm1d(b, eps=1e-3))
            for a, b in itertools.pairwise(widths)
        )
        self.residual = nn.Sequential(nn.Conv1d(inside, outside, 1, bias=False), nn.BatchNorm1d(outside, eps=1e-3))
        self.act = nn.Sequential(nn.ReLU(), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for layer in self.layers[:-1]:
            h = self.act(layer(h))
        return self.act(self.layers[-1](h) + self.residual(x))


class Jasper(nn.Module):
    def __init__(self, features: int = 12, width: int = 16, letters: int = 10) -> None:
        super().__init__()
        self.start = nn.Sequential(nn.Conv1d(features, width, 5, 2, 2, bias=False), nn.BatchNorm1d(width), nn.ReLU())
        self.blocks = nn.Sequential(Block(width, width, 5), Block(width, 2 * width, 7))
        self.head = nn.Conv1d(2 * width, letters, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.head(self.blocks(self.start(x))).transpose(1, 2), -1)


def make() -> nn.Module:
    return Jasper()


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 12, 24),)
