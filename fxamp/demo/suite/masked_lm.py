"""A masked language model: BERT's encoder, norms last, with the embedding as its last weight too."""

import collections
import unicodedata
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxamp.demo.suite.task import SuiteTask
from fxamp.demo.tasks import Batch

SYMBOLS, CONTEXT = 300, 8
"""Different words, the rarer ones being one of them; words of a name, the longer ones being cut."""
PAD, RARE, MASK = SYMBOLS - 2, SYMBOLS - 1, SYMBOLS
HIDDEN_SHARE = 0.15
IGNORED = -100


class Layer(nn.Module):
    """Self-attention and a GELU layer, a norm after each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.inward(x).chunk(3, -1)
        )
        scores = query @ key.transpose(2, 3) / query.size(-1) ** 0.5
        x = self.attention_norm(x + self.outward((scores.softmax(-1) @ value).transpose(1, 2).flatten(2)))
        return self.mlp_norm(x + self.mlp(x))  # type: ignore[no-any-return]


class MaskedModel(nn.Module):
    """Gives the logits of each symbol, of the hidden ones too."""

    def __init__(self, width: int = 32, heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.symbols, self.positions = nn.Embedding(SYMBOLS + 1, width), nn.Embedding(CONTEXT, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(SYMBOLS + 1))
        nn.init.normal_(self.symbols.weight, std=0.05)
        nn.init.normal_(self.positions.weight, std=0.05)

    def forward(self, text: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.symbols(text) + self.positions.weight))
        return F.linear(self.transform(self.layers(x)), self.symbols.weight, self.bias)


def names_of_characters() -> list[list[str]]:
    """LATIN SMALL LETTER A, and so on: the words of the Unicode names, without those that count in hexadecimal."""
    names = (unicodedata.name(chr(number), "") for number in range(0x10000))
    return [name.split()[:CONTEXT] for name in names if name and not name.startswith(("CJK", "HANGUL SYLLABLE"))]


def hide(text: Tensor, generator: torch.Generator) -> Batch:
    """Words of which some are `MASK`; the targets are those, and `IGNORED` elsewhere."""
    hidden = (torch.rand(text.shape, generator=generator) < HIDDEN_SHARE).to(text.device) & (text != PAD)
    return text.masked_fill(hidden, MASK), text.masked_fill(~hidden, IGNORED)


def masked_accuracy(logits: Tensor, targets: Tensor) -> float:
    """Share of the hidden words that are found."""
    hidden = targets != IGNORED
    return int((logits.argmax(-1) == targets)[hidden].sum()) / int(hidden.sum())


def masked_lm(device: torch.device, steps: int = 220, batch: int = 24) -> SuiteTask:
    """The names of the characters in Python's Unicode database, 15 % of the words hidden; every tenth is held out."""
    names = names_of_characters()
    common = collections.Counter(word for name in names for word in name).most_common(PAD)
    numbers = {word: number for number, (word, _) in enumerate(common)}
    rows = [[numbers.get(word, RARE) for word in name] + [PAD] * (CONTEXT - len(name)) for name in names]
    text = torch.tensor(rows, device=device)
    learnt, tested = text[torch.arange(len(text)) % 10 > 0], text[::10]

    def batches(seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            yield hide(learnt[torch.randint(len(learnt), (batch,), generator=generator).to(device)], generator)

    return SuiteTask(
        name="masked_lm",
        title=f"BERT-style masked model; {len(learnt):,} names of Unicode characters, word by word",
        model=MaskedModel,
        batches=batches,
        held_out=hide(tested, torch.Generator().manual_seed(0)),
        steps=steps,
        learning_rate=5e-3,
        metric=masked_accuracy,
        measures="accuracy on hidden words",
        higher_is_better=True,
    )
