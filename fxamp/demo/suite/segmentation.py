"""A U-Net that finds the ink of digits written on photographs."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxamp.demo.suite.pictures import scenes
from fxamp.demo.suite.task import SuiteTask
from fxamp.demo.tasks import Batch, draw, scans_of_digits

SIZE = 16
INKED = 0.4
"""From this share of ink on a pixel belongs to the digit."""


def double(channels: int, width: int) -> nn.Sequential:
    """Two convolutions with batch norm; the size stays."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Down by two, up by two, and the skip between; gives a logit for each pixel."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down, self.bottom = double(1, width), double(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.joined, self.head = double(2 * width, width), nn.Conv2d(width, 1, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        fine = self.down(pictures)
        coarse = self.up(self.bottom(F.max_pool2d(fine, 2)))
        return self.head(self.joined(torch.cat((fine, coarse), 1)))  # type: ignore[no-any-return]


def overlap(logits: Tensor, masks: Tensor) -> float:
    """Intersection over union of what is marked and what is ink, over all pixels."""
    marked, inked = logits > 0, masks > 0.5
    return int((marked & inked).sum()) / max(1, int((marked | inked).sum()))


def segmentation(device: torch.device, steps: int = 100, batch: int = 12, count: int = 600) -> SuiteTask:
    """Digits on windows of photographs; digits and places of the photographs are held out."""
    learnt, tested = scans_of_digits(torch.device("cpu"))

    def masked(part: Batch, count: int, seed: int, *, held_out: bool) -> Batch:
        made = scenes(*part, count, SIZE, (8,), seed, held_out=held_out)
        return made.pictures.to(device), (made.ink > INKED).float().to(device)

    return SuiteTask(
        name="segmentation",
        title="U-Net; the ink of digits written on photographs, 16 x 16 pixels",
        model=UNet,
        batches=draw(*masked(learnt, count, 1, held_out=False), steps, batch),
        held_out=masked(tested, 128, 2, held_out=True),
        steps=steps,
        learning_rate=1e-2,
        loss=F.binary_cross_entropy_with_logits,
        metric=overlap,
        measures="intersection over union",
        higher_is_better=True,
    )
