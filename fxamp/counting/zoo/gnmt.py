"""GNMT: a bidirectional first layer, residual LSTMs, additive attention (Wu et al. 2016)."""

# mypy: disable-error-code="no-any-return"

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class AdditiveAttention(nn.Module):
    """Bahdanau's: tanh of the sum of query and key, for every pair of positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, queries: torch.Tensor, keys: torch.Tensor, is_hidden: torch.Tensor | None) -> torch.Tensor:
        sums = torch.tanh(self.query(queries)[:, :, None] + self.key(keys)[:, None])
        scores = self.score(sums).squeeze(-1)
        if is_hidden is not None:
            scores = scores.masked_fill(is_hidden[:, None], -65504.0)
        return torch.bmm(torch.softmax(scores, -1), keys)


class GNMT(nn.Module):
    """`layers` LSTM layers in encoder and decoder; with lengths of the sources, those are packed and 0 is padding."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.both_ways = nn.LSTM(width, width // 2, bidirectional=True, batch_first=True)
        self.encoder = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers - 1))
        self.first, self.attention = nn.LSTM(width, width, batch_first=True), AdditiveAttention(width)
        self.decoder = nn.ModuleList(nn.LSTM(2 * width, width, batch_first=True) for _ in range(layers - 1))

    def forward(self, source: torch.Tensor, target: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        keys = self._first(self._embedded(source), lengths)
        for layer in self.encoder:
            keys = keys + layer(F.dropout(keys, 0.2, self.training))[0]
        h, _ = self.first(self._embedded(target))
        seen = self.attention(h, keys, None if lengths is None else source == 0)
        for layer in self.decoder:
            h = h + layer(F.dropout(torch.cat((h, seen), -1), 0.2, self.training))[0]
        return self.head(h)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.table(tokens), 0.2, self.training)

    def _first(self, x: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
        if lengths is None:
            return self.both_ways(x)[0]
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.both_ways(packed)[0], batch_first=True, total_length=x.size(1))[0]
