"""GNMT without packing: a bidirectional first layer, residual LSTMs, additive attention (Wu et al. 2016)."""

# mypy: disable-error-code="no-any-return"

import torch
from torch import nn
from torch.nn import functional as F


class AdditiveAttention(nn.Module):
    """Bahdanau's: tanh of the sum of query and key, for every pair of positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        sums = torch.tanh(self.query(queries)[:, :, None] + self.key(keys)[:, None])
        return torch.bmm(torch.softmax(self.score(sums).squeeze(-1), -1), keys)


class GNMT(nn.Module):
    """`layers` LSTM layers in encoder and decoder; every sentence has the same length."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.both_ways = nn.LSTM(width, width // 2, bidirectional=True, batch_first=True)
        self.encoder = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers - 1))
        self.first, self.attention = nn.LSTM(width, width, batch_first=True), AdditiveAttention(width)
        self.decoder = nn.ModuleList(nn.LSTM(2 * width, width, batch_first=True) for _ in range(layers - 1))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        keys, _ = self.both_ways(self._embedded(source))
        for layer in self.encoder:
            keys = keys + layer(F.dropout(keys, 0.2, self.training))[0]
        h, _ = self.first(self._embedded(target))
        seen = self.attention(h, keys)
        for layer in self.decoder:
            h = h + layer(F.dropout(torch.cat((h, seen), -1), 0.2, self.training))[0]
        return self.head(h)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.table(tokens), 0.2, self.training)
