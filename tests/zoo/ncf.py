"""Neural collaborative filtering: NeuMF (He et al., arXiv:1708.05031)."""

import itertools

import torch
from torch import nn


class NeuMF(nn.Module):
    def __init__(self, users: int = 30, items: int = 20, width: int = 8) -> None:
        super().__init__()
        self.user_factors, self.item_factors = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_features, self.item_features = nn.Embedding(users, 2 * width), nn.Embedding(items, 2 * width)
        sizes = (4 * width, 2 * width, width)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(2 * width, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        factors = self.user_factors(users) * self.item_factors(items)
        h = torch.cat((self.user_features(users), self.item_features(items)), -1)
        for layer in self.layers:
            h = self.dropout(torch.relu(layer(h)))
        return torch.sigmoid(self.head(torch.cat((factors, h), -1)))


def make() -> nn.Module:
    return NeuMF()


def inputs() -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 30, (64,)), torch.randint(0, 20, (64,))
