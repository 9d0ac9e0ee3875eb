"""BERT with its masked-language head, which is tied to the word table (Devlin et al., arXiv:1810.04805)."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.size()[:-1], self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1)) + mask
        seen = torch.matmul(self.dropout(F.softmax(scores, -1)), v)
        return self.output(seen.permute(0, 2, 1, 3).contiguous().flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm1 = SelfAttention(width, heads), nn.LayerNorm(width, eps=1e-12)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm2, self.dropout = nn.LayerNorm(width, eps=1e-12), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.dropout(self.attention(x, mask)))
        return self.norm2(x + self.dropout(self.outer(F.gelu(self.inner(x)))))


class Bert(nn.Module):
    def __init__(self, words: int = 40, width: int = 16, heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=0)
        self.positions, self.kinds = nn.Embedding(16, width), nn.Embedding(2, width)
        self.norm, self.dropout = nn.LayerNorm(width, eps=1e-12), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.decoder = nn.Linear(width, words)
        self.decoder.weight = self.words.weight
        self.register_buffer("position_ids", torch.arange(16)[None])

    def forward(self, tokens: torch.Tensor, kinds: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.kinds(kinds) + self.positions(self.position_ids[:, : tokens.size(1)])
        x = self.dropout(self.norm(x))
        hidden = (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(torch.float32).min
        for layer in self.layers:
            x = layer(x, hidden)
        return self.decoder(self.transform_norm(F.gelu(self.transform(x))))


def make() -> nn.Module:
    return Bert()


def inputs() -> tuple[torch.Tensor, ...]:
    mask = torch.ones(3, 12)
    mask[1, 9:] = 0
    return torch.randint(1, 40, (3, 12)), torch.randint(0, 2, (3, 12)), mask
