"""GNMT-style translation: a bidirectional encoder, residual LSTMs, attention on the decoder's first layer."""

import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxamp.demo.suite.task import SuiteTask
from fxamp.demo.suite.text import library, split
from fxamp.demo.tasks import draw

IDENTIFIER = re.compile(r"\b[a-z]{2,}(?:_[a-z]{2,})+\b")
LONGEST = 12
"""Characters of a source; its translation is no longer than that with its end."""
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_"
PAD, BEGIN, END = range(3)
SYMBOLS = 3 + len(LETTERS)


class Attention(nn.Module):
    """Additive: a tanh of query and key, and one weight vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, queries: Tensor, keys: Tensor, absent: Tensor) -> Tensor:
        sums = torch.tanh(self.query(queries)[:, :, None] + self.key(keys)[:, None])
        scores = self.score(sums).squeeze(-1).masked_fill(absent[:, None], -65504.0)
        return torch.bmm(scores.softmax(-1), keys)


class Translator(nn.Module):
    """Gives the logits of each next character of the target."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.source_symbols = nn.Embedding(SYMBOLS, width, padding_idx=PAD)
        self.target_symbols = nn.Embedding(SYMBOLS, width, padding_idx=PAD)
        self.both_ways = nn.LSTM(width, width // 2, bidirectional=True, batch_first=True)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.first = nn.LSTM(width, width, batch_first=True)
        self.attention = Attention(width)
        self.second = nn.LSTM(2 * width, width, batch_first=True)
        self.head = nn.Linear(2 * width, SYMBOLS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        low = self.both_ways(self.source_symbols(source))[0]
        keys = low + self.encoder(low)[0]
        x = self.first(self.target_symbols(target))[0]
        seen = self.attention(x, keys, source == PAD)
        x = x + self.second(torch.cat((x, seen), -1))[0]
        return self.head(torch.cat((x, seen), -1))  # type: ignore[no-any-return]


def camel(name: str) -> str:
    """camel("read_all_lines") == "readAllLines"."""
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)


def row(text: str, *, begin: bool = False, end: bool = False) -> list[int]:
    """Its symbols, padded."""
    numbers = [BEGIN] * begin + [3 + LETTERS.index(letter) for letter in text] + [END] * end
    return numbers + [PAD] * (LONGEST - len(numbers))


def pairs(text: str, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """((names, their translations so far), their translations): every name of the text once."""
    names = sorted({name for name in IDENTIFIER.findall(text) if len(name) <= LONGEST})
    rows = [(row(name), row(camel(name), begin=True), row(camel(name), end=True)) for name in names]
    source, target, answer = (torch.tensor(part, device=device) for part in zip(*rows, strict=True))
    return (source, target), answer


def translation_loss(logits: Tensor, answers: Tensor) -> Tensor:
    """Cross entropy of the characters, padding left out."""
    return F.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=PAD)


def character_accuracy(logits: Tensor, answers: Tensor) -> float:
    """Share of right characters, each after the true ones before it."""
    real = answers != PAD
    return int((logits.argmax(-1) == answers)[real].sum()) / int(real.sum())


def translation(device: torch.device, steps: int = 180, batch: int = 12) -> SuiteTask:
    """`snake_case` names of the standard library to `camelCase`; the held-out names are none of the learnt ones."""
    learnt, tested = split(library().values())
    known = set(IDENTIFIER.findall(learnt))
    new = " ".join(name for name in IDENTIFIER.findall(tested) if name not in known)
    return SuiteTask(
        name="translation",
        title="GNMT-style LSTMs with attention; snake_case names of the standard library to camelCase",
        model=Translator,
        batches=draw(*pairs(learnt, device), steps, batch),
        held_out=pairs(new, device),
        steps=steps,
        learning_rate=2e-2,
        loss=translation_loss,
        metric=character_accuracy,
        measures="accuracy of characters",
        higher_is_better=True,
        onednn=False,
    )
