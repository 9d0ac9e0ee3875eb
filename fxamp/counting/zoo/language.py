"""BERT-base, GPT-2 small, a Llama-like decoder, nn.Transformer, an LSTM language model, and NCF."""

# mypy: disable-error-code="no-any-return"

import itertools
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxamp.counting.zoo.step import MakeStep, Step, classify


class Attention(nn.Module):
    """Heads in one fused kernel."""

    def __init__(self, width: int, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.joint(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.is_causal)
        return self.out(h.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Pre-norm transformer block, as in GPT-2 and ViT."""

    def __init__(self, width: int, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, is_causal)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1, self.training)


class GPT2(nn.Module):
    """Radford et al. 2019; the head is the token table."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads, is_causal=True) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        position = torch.arange(tokens.shape[1], device=tokens.device)
        h = F.dropout(self.tokens(tokens) + self.positions(position), 0.1, self.training)
        return self.head(self.norm(self.blocks(h)))


class PostNormBlock(nn.Module):
    """Norm after each residual, as in BERT; attention takes a padding mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(width, heads, is_causal=False), nn.LayerNorm(width, eps=1e-12)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + F.dropout(self.attention(x, mask), 0.1, self.training))
        return self.norm2(x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training))


class Bert(nn.Module):
    """Devlin et al. 2018: masked language modelling."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.segments, self.norm = nn.Embedding(2, width), nn.LayerNorm(width, eps=1e-12)
        self.blocks = nn.ModuleList(PostNormBlock(width, heads) for _ in range(depth))
        self.transform, self.head_norm = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
        position = torch.arange(tokens.shape[1], device=tokens.device)
        h = self.norm(self.tokens(tokens) + self.positions(position) + self.segments(segments))
        h = F.dropout(h, 0.1, self.training)
        mask = (1.0 - is_token[:, None, None, :].float()) * torch.finfo(torch.float32).min
        for block in self.blocks:
            h = block(h, mask)
        return self.head(self.head_norm(F.gelu(self.transform(h))))


class RMSNorm(nn.Module):
    """As Hugging Face's Llama writes it out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class LlamaBlock(nn.Module):
    """RMS norms, rotary positions, gated feed-forward."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Touvron et al. 2023."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.tokens, self.size = nn.Embedding(vocabulary, width), width // heads
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, hidden) for _ in range(depth))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tokens(tokens)
        position = torch.arange(tokens.shape[1], device=tokens.device).float()
        rate = 1e4 ** (-torch.arange(0, self.size, 2, device=tokens.device).float() / self.size)
        angle = torch.outer(position, rate)
        angle = torch.cat((angle, angle), -1)
        cos, sin = angle.cos().to(h.dtype), angle.sin().to(h.dtype)
        for block in self.blocks:
            h = block(h, cos, sin)
        return self.head(self.norm(h))


class Translator(nn.Module):
    """Vaswani et al. 2017, from torch's own layers; with `length`, positions and masks too, and word 0 is padding."""

    places: torch.Tensor

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, length: int = 0) -> None:
        super().__init__()
        self.tokens, self.scale = nn.Embedding(vocabulary, width), math.sqrt(width)
        self.core = nn.Transformer(width, heads, depth, depth, 4 * width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        angle = torch.arange(length)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        self.register_buffer("places", torch.stack([angle.sin(), angle.cos()], -1).flatten(1))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not len(self.places):
            return self.head(self.core(self.tokens(source), self.tokens(target)))
        is_later = nn.Transformer.generate_square_subsequent_mask(target.size(1), device=target.device)
        is_padding = source == 0
        out = self.core(
            self._placed(source), self._placed(target),
            tgt_mask=is_later, src_key_padding_mask=is_padding, memory_key_padding_mask=is_padding,
        )  # fmt: skip
        return self.head(out)

    def _placed(self, words: torch.Tensor) -> torch.Tensor:
        return self.tokens(words) * self.scale + self.places[: words.size(1)]


class LSTMLM(nn.Module):
    """Zaremba et al. 2014."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, width, layers, dropout=0.5)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h, _ = self.lstm(F.dropout(self.tokens(tokens), 0.5, self.training))
        return self.head(F.dropout(h, 0.5, self.training))


class NCF(nn.Module):
    """He et al. 2017: matrix factorisation beside a multi-layer perceptron."""

    def __init__(self, users: int, items: int, factors: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.user_mf, self.item_mf = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.user_mlp, self.item_mlp = nn.Embedding(users, widths[0] // 2), nn.Embedding(items, widths[0] // 2)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(factors + widths[-1], 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        h = torch.cat((self.user_mlp(user), self.item_mlp(item)), -1)
        for layer in self.layers:
            h = F.dropout(F.relu(layer(h)), 0.5, self.training)
        return self.head(torch.cat((self.user_mf(user) * self.item_mf(item), h), -1))


def _tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape)


def gpt2_small(tiny: bool) -> Step:
    vocabulary, width, depth, heads, batch, length = (32, 16, 2, 2, 2, 8) if tiny else (50257, 768, 12, 12, 8, 1024)
    model = GPT2(vocabulary, width, depth, heads, length)
    return Step(model, (_tokens(vocabulary, batch, length),), classify(vocabulary, batch, length))


def bert_base(tiny: bool) -> Step:
    vocabulary, width, depth, heads, batch, length = (32, 16, 2, 2, 2, 8) if tiny else (30522, 768, 12, 12, 16, 512)
    model = Bert(vocabulary, width, depth, heads, length)
    inputs = (_tokens(vocabulary, batch, length), _tokens(2, batch, length), _tokens(2, batch, length))
    return Step(model, inputs, classify(vocabulary, batch, length))


def llama_1b(tiny: bool) -> Step:
    vocabulary, width, depth, heads, hidden, batch, length = (
        (32, 16, 2, 2, 24, 2, 8) if tiny else (32000, 2048, 22, 32, 5632, 2, 2048)
    )
    model = Llama(vocabulary, width, depth, heads, hidden)
    return Step(model, (_tokens(vocabulary, batch, length),), classify(vocabulary, batch, length))


def transformer_base(tiny: bool) -> Step:
    vocabulary, width, depth, heads, batch, length = (32, 16, 1, 2, 2, 8) if tiny else (32768, 512, 6, 8, 32, 128)
    model = Translator(vocabulary, width, depth, heads)
    inputs = (_tokens(vocabulary, batch, length), _tokens(vocabulary, batch, length))
    return Step(model, inputs, classify(vocabulary, batch, length))


def lstm_lm(tiny: bool) -> Step:
    vocabulary, width, layers, length, batch = (32, 16, 2, 5, 2) if tiny else (33278, 1024, 2, 35, 32)
    model = LSTMLM(vocabulary, width, layers)
    return Step(model, (_tokens(vocabulary, length, batch),), classify(vocabulary, length, batch))


def ncf(tiny: bool) -> Step:
    users, items, factors, batch = (16, 16, 8, 32) if tiny else (138493, 26744, 64, 1 << 20)
    model = NCF(users, items, factors, (16, 16, 8) if tiny else (256, 256, 128, 64))
    wanted = torch.rand(batch, 1)

    def loss_of(scores: Any) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(scores, wanted)

    return Step(model, (_tokens(users, batch), _tokens(items, batch)), loss_of)


LANGUAGE: dict[str, MakeStep] = {
    "bert_base": bert_base,
    "gpt2_small": gpt2_small,
    "llama_1b": llama_1b,
    "transformer_base": transformer_base,
    "lstm_lm": lstm_lm,
    "ncf": ncf,
}
