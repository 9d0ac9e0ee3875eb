"""Jasper-style transcription: residual blocks of one-dimensional convolutions over frames, and CTC.

The frames are not sound: they are the columns of handwritten digits side by side, eight bands each, which is real data
of the shape of a spectrogram.
"""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxamp.demo.suite.task import SuiteTask
from fxamp.demo.tasks import Batch, draw, scans_of_digits

DIGITS, BANDS, FRAMES = 3, 8, 32
"""Digits in a row, pixels of a column, columns of a row: three digits and the paper between them."""
BLANK = 10


def step(channels: int, width: int, kernel: int, stride: int = 1) -> tuple[nn.Module, ...]:
    """Convolution and batch norm."""
    return nn.Conv1d(channels, width, kernel, stride, kernel // 2, bias=False), nn.BatchNorm1d(width)


class Block(nn.Module):
    """Two convolutions, and a residual that joins before the last activation."""

    def __init__(self, channels: int, width: int, kernel: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *step(channels, width, kernel), nn.ReLU(), nn.Dropout(0.1), *step(width, width, kernel)
        )
        self.residual, self.dropout = nn.Sequential(*step(channels, width, 1)), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(F.relu(self.body(x) + self.residual(x)))  # type: ignore[no-any-return]


class Jasper(nn.Module):
    """Gives the logits of ten digits and the blank for every second frame."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.prologue = nn.Sequential(*step(BANDS, width, 5, 2), nn.ReLU())
        self.blocks = nn.Sequential(Block(width, width, 5), Block(width, width, 5))
        self.head = nn.Conv1d(width, BLANK + 1, 1)

    def forward(self, frames: Tensor) -> Tensor:
        return self.head(self.blocks(self.prologue(frames))).transpose(1, 2)  # type: ignore[no-any-return]


def ctc(logits: Tensor, digits: Tensor) -> Tensor:
    """Connectionist temporal classification, in fp32."""
    scores = logits.float().log_softmax(-1).transpose(0, 1)
    count = len(digits)
    frames, letters = (torch.full((count,), length, device=scores.device) for length in (len(scores), DIGITS))
    return F.ctc_loss(scores, digits, frames, letters, BLANK)


def error_rate(logits: Tensor, digits: Tensor) -> float:
    """Edits to the most likely transcriptions, per digit."""
    edits = 0
    for found, wanted in zip(logits.argmax(-1).tolist(), digits.tolist(), strict=True):
        edits += distance([symbol for symbol, _ in itertools.groupby(found) if symbol != BLANK], wanted)
    return edits / digits.numel()


def distance(found: list[int], wanted: list[int]) -> int:
    """Insertions, deletions and replacements between the two."""
    costs = list(range(len(wanted) + 1))
    for row, symbol in enumerate(found, 1):
        before, costs[0] = costs[0], row
        for column, other in enumerate(wanted, 1):
            before, costs[column] = (
                costs[column],
                min(before + (symbol != other), costs[column] + 1, costs[column - 1] + 1),
            )
    return costs[-1]


def rows_of_digits(part: Batch, count: int, seed: int) -> Batch:
    """Scans side by side, with random gaps: (count, BANDS, FRAMES) and the digits."""
    scans, labels = part
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(scans), (count, DIGITS), generator=generator)
    gaps = torch.randint((FRAMES - DIGITS * BANDS) // DIGITS + 1, (count, DIGITS), generator=generator)
    starts = gaps.cumsum(1) + BANDS * torch.arange(DIGITS)
    frames = torch.zeros(count, BANDS, FRAMES)
    for row, (scan, start) in enumerate(zip(drawn.tolist(), starts.tolist(), strict=True)):
        for one, left in zip(scan, start, strict=True):
            frames[row, :, left : left + BANDS] = scans[one, 0]
    return frames, labels[drawn]


def speech(device: torch.device, steps: int = 140, batch: int = 16) -> SuiteTask:
    """Rows of three digits."""
    learnt, tested = scans_of_digits(torch.device("cpu"))
    frames, digits = (part.to(device) for part in rows_of_digits(learnt, 2000, 5))
    held_out = rows_of_digits(tested, 400, 6)
    return SuiteTask(
        name="speech",
        title="Jasper-style 1-d convolutions with CTC; the columns of three handwritten digits (no sound)",
        model=Jasper,
        batches=draw(frames, digits, steps, batch),
        held_out=(held_out[0].to(device), held_out[1].to(device)),
        steps=steps,
        learning_rate=1e-2,
        loss=ctc,
        metric=error_rate,
        measures="digit error rate",
    )
