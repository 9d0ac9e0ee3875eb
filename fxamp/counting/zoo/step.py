"""One training step to count."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxamp.errors import FxampError


class MissingPackageError(FxampError, ImportError):
    """A model of the zoo comes from a package that is not installed."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A model, the arguments of one call, and what makes a loss of its result."""

    model: nn.Module
    inputs: tuple[Any, ...]
    loss_of: Callable[[Any], torch.Tensor]
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# tiny -> a step; tensors are made on the default device.
MakeStep = Callable[[bool], Step]


def classify(classes: int, *shape: int) -> Callable[[Any], torch.Tensor]:
    """Cross entropy against labels of `shape`; classes are the last dimension of what the model gives."""
    labels = torch.randint(0, classes, shape)

    def loss_of(logits: Any) -> torch.Tensor:
        return F.cross_entropy(logits.reshape(-1, classes), labels.reshape(-1))

    return loss_of


def own_loss(result: Any) -> torch.Tensor:
    """What a model of transformers gives when it is given labels."""
    return result["loss"]  # type: ignore[no-any-return]
