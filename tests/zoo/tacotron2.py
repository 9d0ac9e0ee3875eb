"""Tacotron 2 in small: characters to mel frames by attention on a recurrent decoder (Shen et al., arXiv:1712.05884)."""

import torch
from torch import nn

from fxamp.counting.zoo.speech import Tacotron2


def make() -> nn.Module:
    return Tacotron2(20, 8, 16, 16, 16, 16, filters=4, kernel=5)


def inputs() -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 20, (2, 9)), torch.randn(2, 5, 8)
