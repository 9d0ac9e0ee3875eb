"""The Transformer for translation in small, on torch's own modules, with masks (Vaswani et al., arXiv:1706.03762)."""

import torch
from torch import nn

from fxamp.counting.zoo.language import Translator


def make() -> nn.Module:
    return Translator(32, 16, 2, 2, length=20)


def inputs() -> tuple[torch.Tensor, ...]:
    source = torch.randint(1, 32, (3, 9))
    source[1, 6:] = 0
    return source, torch.randint(1, 32, (3, 7))
