"""A residual classifier with batch norm: ResNet's, ResNeXt's and SE-ResNeXt's bottleneck in one small net."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxamp.demo.suite.task import SuiteTask
from fxamp.demo.tasks import draw, in_nine_places, scans_of_digits


class Squeeze(nn.Module):
    """Squeeze and excitation: a gate for each channel, from the mean of all of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(width, width // 4), nn.ReLU(), nn.Linear(width // 4, width), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x.mean((2, 3)))[:, :, None, None]  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 (in groups), 1 x 1, each with batch norm, around a shortcut."""

    def __init__(self, channels: int, width: int, groups: int = 1, stride: int = 1, *, squeeze: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width // 2, 1, bias=False),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(),
            nn.Conv2d(width // 2, width // 2, 3, stride, padding=1, groups=groups, bias=False),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(),
            nn.Conv2d(width // 2, width, 1, bias=False),
            nn.BatchNorm2d(width),
            Squeeze(width) if squeeze else nn.Identity(),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResidualNet(nn.Module):
    """8 x 8 scans to ten classes: a plain bottleneck, then one in groups with squeeze and excitation."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(
            Bottleneck(width, 2 * width, stride=2), Bottleneck(2 * width, 4 * width, groups=4, stride=2, squeeze=True)
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, scans: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(scans)).mean((2, 3)))  # type: ignore[no-any-return]


def classifier(device: torch.device, steps: int = 150, batch: int = 24) -> SuiteTask:
    """scikit-learn's digits, each moved by one pixel in every direction."""
    learnt, tested = scans_of_digits(device)
    return SuiteTask(
        name="classifier",
        title=f"residual convolutional classifier with batch norm; {len(learnt[1])} scans of digits to learn",
        model=ResidualNet,
        batches=draw(*in_nine_places(*learnt), steps, batch),
        held_out=tested,
        steps=steps,
        learning_rate=5e-3,
        measures="accuracy",
        higher_is_better=True,
    )
