"""GNMT: a bidirectional packed encoder, residual LSTMs and additive attention (Wu et al., arXiv:1609.08144)."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.score = nn.Parameter(torch.randn(width) * 0.1)

    def forward(self, query: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        sums = torch.tanh(self.query(query)[:, :, None] + self.key(keys)[:, None])
        scores = torch.matmul(sums, self.score).masked_fill(hidden[:, None], -65504.0)
        return torch.bmm(torch.softmax(scores, -1), keys)


class GNMT(nn.Module):
    def __init__(self, words: int = 32, width: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width, padding_idx=0)
        self.first = nn.LSTM(width, width // 2, bidirectional=True, batch_first=True)
        self.encoder = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(2))
        self.decoder_first = nn.LSTM(width, width, batch_first=True)
        self.attention = Attention(width)
        self.decoder = nn.ModuleList(nn.LSTM(2 * width, width, batch_first=True) for _ in range(2))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, words)

    def encode(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.dropout(self.table(tokens)), lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.first(packed)[0], batch_first=True, total_length=tokens.size(1))
        return h

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        keys = self.encode(tokens, lengths)
        for layer in self.encoder:
            keys = keys + layer(self.dropout(keys))[0]
        h, _ = self.decoder_first(self.dropout(self.table(target)))
        seen = self.attention(h, keys, tokens == 0)
        for layer in self.decoder:
            h = h + layer(self.dropout(torch.cat([h, seen], -1)))[0]
        return self.head(h)


def make() -> nn.Module:
    return GNMT()


def inputs() -> tuple[torch.Tensor, ...]:
    tokens, lengths = torch.randint(1, 32, (3, 7)), torch.tensor([4, 7, 5])
    return tokens * (torch.arange(7) < lengths[:, None]), lengths, torch.randint(1, 32, (3, 6))
