"""What a task is, and the two of the demo: real data, a small model each, and the batches that a seed stands for."""

import dataclasses
import importlib
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxamp.errors import FxampError

Values = Tensor | tuple[Tensor, ...]
"""Inputs or targets; the first dimension of each tensor counts the examples."""
Batch = tuple[Any, Any]
"""Inputs and targets, each of them `Values`."""
SPLIT_SEED = 1797
"""Which scans are held out; the same for every run, whatever its own seed."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all answers."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def accuracy(logits: Tensor, targets: Tensor) -> float:
    """Share of right answers."""
    return int((logits.argmax(-1) == targets).sum()) / targets.numel()


@dataclasses.dataclass(frozen=True)
class Task:
    """One thing to learn.

    Attributes:
        batches: of a seed: yields `steps` batches, the same for the same seed.
        loss: of the model's outputs and the targets.
        metric: the same, over the whole held-out set.
    """

    name: str
    title: str
    model: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Batch]]
    held_out: Batch
    steps: int
    learning_rate: float
    loss: Callable[[Any, Any], Tensor] = cross_entropy
    metric: Callable[[Any, Any], float] = accuracy

    @property
    def device(self) -> torch.device:
        """Where the data is."""
        return parts(self.held_out[0])[0].device


def parts(values: Values) -> tuple[Tensor, ...]:
    """The tensors, also of a single one."""
    return values if isinstance(values, tuple) else (values,)


def take(values: Values, rows: Tensor | slice) -> Any:
    """These examples only."""
    return tuple(part[rows] for part in values) if isinstance(values, tuple) else values[rows]


def draw(inputs: Values, targets: Values, steps: int, batch: int) -> Callable[[int], Iterator[Batch]]:
    """`batches` of a task that draws its examples at random, with repetition."""
    first = parts(inputs)[0]

    def batches(seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            rows = torch.randint(len(first), (batch,), generator=generator).to(first.device)
            yield take(inputs, rows), take(targets, rows)

    return batches


def load(module: str) -> Any:
    """A module of the extra `demo`.

    Raises:
        FxampError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise FxampError(
            f"The demo needs {module.partition('.')[0]!r}, which is not installed: pip install 'fxamp[demo]'"
        ) from error


# Digits

INK = 16
"""A pixel's largest value in the data set; 0 is paper."""


class DigitsNet(nn.Module):
    """8x8 scans to ten classes: three convolutions with batch norm, then a linear layer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *conv_block(1, width),
            *conv_block(width, 2 * width),
            nn.MaxPool2d(2),
            *conv_block(2 * width, 4 * width),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(16 * width, 10)

    def forward(self, scans: Tensor) -> Tensor:
        return self.head(self.features(scans).flatten(1))  # type: ignore[no-any-return]


def conv_block(channels: int, filters: int) -> tuple[nn.Module, ...]:
    """Convolution, batch norm, ReLU; the size stays."""
    return nn.Conv2d(channels, filters, 3, padding=1, bias=False), nn.BatchNorm2d(filters), nn.ReLU()


def digits(device: torch.device, steps: int = 400, batch: int = 64) -> Task:
    """scikit-learn's digits: 1,797 scans of handwritten digits, a third of them held out."""
    learnt, tested = scans_of_digits(device)
    return Task(
        name="digits",
        title=f"digits: conv net with batch norm; {len(learnt[1])} scans to learn, {len(tested[1])} held out",
        model=DigitsNet,
        batches=draw(*in_nine_places(*learnt), steps, batch),
        held_out=in_nine_places(*tested),
        steps=steps,
        learning_rate=1e-3,
    )


def scans_of_digits(device: torch.device) -> tuple[Batch, Batch]:
    """scikit-learn's digits, to learn and held out: scans of 1 x 8 x 8 (0 is paper, 1 is ink) with their labels."""
    data = load("sklearn.datasets").load_digits()
    scans = torch.from_numpy(data.images).float().div(INK).unsqueeze(1).to(device)
    labels = torch.from_numpy(data.target).to(device)
    order = torch.randperm(len(scans), generator=torch.Generator().manual_seed(SPLIT_SEED)).to(device)
    learnt, tested = order[len(order) // 3 :], order[: len(order) // 3]
    return (scans[learnt], labels[learnt]), (scans[tested], labels[tested])


def in_nine_places(scans: Tensor, labels: Tensor) -> Batch:
    """Every scan nine times: in its place, and moved by one pixel each way (what comes in is paper)."""
    padded = F.pad(scans, (1, 1, 1, 1))
    places = [padded[..., down : down + 8, right : right + 8] for down in range(3) for right in range(3)]
    return torch.cat(places), labels.repeat(len(places))


# Characters

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
OTHER = len(CHARACTERS)
"""The one symbol that stands for every other character."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.split(project(x)) for project in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def split(self, x: Tensor) -> Tensor:
        """(batch, length, width) to (batch, heads, length, width / heads)."""
        return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)


class Block(nn.Module):
    """A transformer block, norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class CharacterModel(nn.Module):
    """A causal transformer over characters, or other symbols; gives the logits of each next one."""

    def __init__(
        self, context: int, width: int = 48, heads: int = 3, depth: int = 2, symbols: int = len(CHARACTERS) + 1
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(symbols, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)
        nn.init.normal_(self.characters.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.positions
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def stdlib(device: torch.device, steps: int = 800, batch: int = 8, context: int = 32) -> Task:
    """The source of Python's own standard library: every tenth file is held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    learnt = encode(file for number, file in enumerate(files) if number % 10).to(device)
    tested = encode(files[::10]).to(device)

    def batches(seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            yield windows(learnt, torch.randint(len(learnt) - context, (batch,), generator=generator), context)

    starts = torch.linspace(0, len(tested) - context - 1, 4096).long()
    return Task(
        name="stdlib",
        title=f"stdlib: character transformer; {len(learnt):,} characters to learn, {len(tested):,} held out",
        model=lambda: CharacterModel(context),
        batches=batches,
        held_out=windows(tested, starts, context),
        steps=steps,
        learning_rate=2.5e-3,
    )


def encode(files: Iterator[Path] | list[Path]) -> Tensor:
    """The text of the files as symbols, one after the other."""
    text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    symbols = dict(zip(CHARACTERS, range(OTHER), strict=True))
    return torch.tensor([symbols.get(character, OTHER) for character in text], dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, context: int) -> Batch:
    """For each start, `context` symbols and, for each of them, the one that follows."""
    places = starts.to(text.device).unsqueeze(1) + torch.arange(context + 1, device=text.device)
    symbols = text[places].long()
    return symbols[:, :-1], symbols[:, 1:]


TASKS: dict[str, Callable[..., Task]] = {"digits": digits, "stdlib": stdlib}
