"""The Transformer for translation, on torch's own modules (Vaswani et al., arXiv:1706.03762)."""

import math

import torch
from torch import nn


class Translator(nn.Module):
    def __init__(self, words: int = 32, width: int = 16) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.body = nn.Transformer(width, 2, 2, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, words)
        angle = torch.arange(20)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        self.register_buffer("places", torch.stack([angle.sin(), angle.cos()], -1).flatten(1))
        self.scale = math.sqrt(width)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(target.size(1), device=target.device)
        padding = source == 0
        out = self.body(
            self.source(source) * self.scale + self.places[: source.size(1)],
            self.target(target) * self.scale + self.places[: target.size(1)],
            tgt_mask=later, src_key_padding_mask=padding, memory_key_padding_mask=padding,
        )  # fmt: skip
        return self.head(out)


def make() -> nn.Module:
    return Translator()


def inputs() -> tuple[torch.Tensor, ...]:
    source = torch.randint(1, 32, (3, 9))
    source[1, 6:] = 0
    return source, torch.randint(1, 32, (3, 7))
