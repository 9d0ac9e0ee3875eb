"""A character language model with an LSTM, as in the guide's Figure 1."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxamp.demo.suite.task import SuiteTask
from fxamp.demo.suite.text import characters, library, split
from fxamp.demo.tasks import CHARACTERS, Batch, windows


class RecurrentModel(nn.Module):
    """Gives the logits of each next character."""

    def __init__(self, width: int = 64, depth: int = 1) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS) + 1, width)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, len(CHARACTERS) + 1)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.lstm(self.characters(text))[0])  # type: ignore[no-any-return]


def perplexity(logits: Tensor, targets: Tensor) -> float:
    """Of a symbol."""
    return math.exp(F.cross_entropy(logits.float().flatten(0, -2), targets.flatten()).item())


def drawn_windows(text: Tensor, steps: int, batch: int, context: int, seed: int) -> list[Batch]:
    """Batches of random windows."""
    generator = torch.Generator().manual_seed(seed)
    starts = (torch.randint(len(text) - context, (batch,), generator=generator) for _ in range(steps))
    return [windows(text, start, context) for start in starts]


def recurrent_lm(device: torch.device, steps: int = 160, batch: int = 16, context: int = 16) -> SuiteTask:
    """The first million characters of the standard library's source, and every tenth module held out."""
    learnt, tested = (characters(text[:1_000_000]).to(device) for text in split(library().values()))
    starts = torch.linspace(0, len(tested) - context - 1, 512).long()
    return SuiteTask(
        name="recurrent_lm",
        title="LSTM character model; the source of Python's standard library",
        model=RecurrentModel,
        batches=lambda seed: iter(drawn_windows(learnt, steps, batch, context, seed)),
        held_out=windows(tested, starts, context),
        steps=steps,
        learning_rate=1e-2,
        metric=perplexity,
        measures="perplexity of a character",
        onednn=False,
    )
