"""Convolutional sequence to sequence: gated convolutions, attention at each step (Gehring et al., arXiv:1705.03122)."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm


class ConvS2S(nn.Module):
    def __init__(self, words: int = 32, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.places = nn.Embedding(16, width)
        self.encoder = nn.ModuleList(weight_norm(nn.Conv1d(width, 2 * width, 3, padding=1)) for _ in range(depth))
        self.decoder = nn.ModuleList(weight_norm(nn.Conv1d(width, 2 * width, 3)) for _ in range(depth))
        self.asks = nn.ModuleList(weight_norm(nn.Linear(width, width)) for _ in range(depth))
        self.answers = nn.ModuleList(weight_norm(nn.Linear(width, width)) for _ in range(depth))
        self.head = weight_norm(nn.Linear(width, words))
        self.scale = math.sqrt(0.5)

    def embed(self, table: nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.size(1), device=tokens.device)
        return F.dropout(table(tokens) + self.places(places), 0.1, self.training)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        given = self.embed(self.source, source)
        h = given.transpose(1, 2)
        for layer in self.encoder:
            h = (F.glu(layer(F.dropout(h, 0.1, self.training)), 1) + h) * self.scale
        keys = h.transpose(1, 2)
        values = (keys + given) * self.scale
        start = self.embed(self.target, target)
        h = start
        for layer, ask, answer in zip(self.decoder, self.asks, self.answers, strict=True):
            padded = F.pad(h.transpose(1, 2), (2, 0))
            g = F.glu(layer(F.dropout(padded, 0.1, self.training)), 1).transpose(1, 2)
            query = (ask(g) + start) * self.scale
            seen = torch.bmm(F.softmax(torch.bmm(query, keys.transpose(1, 2)), -1), values)
            g = (g + answer(seen * math.sqrt(9))) * self.scale
            h = (g + h) * self.scale
        return self.head(h)


def make() -> nn.Module:
    return ConvS2S()


def inputs() -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 32, (3, 9)), torch.randint(0, 32, (3, 7))
