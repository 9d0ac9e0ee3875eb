"""bigLSTM: LSTMs with projections and a sampled softmax (Jozefowicz et al., arXiv:1602.02410)."""

import torch
from torch import nn
from torch.nn import functional as F


class BigLSTM(nn.Module):
    def __init__(self, words: int = 48, width: int = 16, hidden: int = 24) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, hidden, 2, proj_size=width, batch_first=True, dropout=0.1)
        self.dropout = nn.Dropout(0.1)
        self.out_weight, self.out_bias = nn.Parameter(torch.randn(words, width) * 0.1), nn.Parameter(torch.zeros(words))

    def forward(self, tokens: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        h, _ = self.lstm(self.dropout(self.table(tokens)))
        h = self.dropout(h).flatten(0, 1)
        return F.linear(h, F.embedding(sample, self.out_weight), self.out_bias[sample])


def make() -> nn.Module:
    return BigLSTM()


def inputs() -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 48, (3, 7)), torch.randperm(48)[:20]
