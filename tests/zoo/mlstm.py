"""The multiplicative-LSTM byte model in small (Krause et al., arXiv:1609.07959)."""

import torch
from torch import nn

from fxamp.counting.zoo.mlstm import Sentiment


def make() -> nn.Module:
    return Sentiment(64, 16, 16)


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 64, (3, 6)),)
