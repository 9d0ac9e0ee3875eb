"""WaveGlow in small: invertible 1x1 convolutions, affine couplings, weight norm (Prenger et al., arXiv:1811.00002)."""

import torch
from torch import nn

from fxamp.counting.zoo.waveglow import WaveGlow


def make() -> nn.Module:
    model = WaveGlow(6, 8, 2, 8, 2, 8, (2, 2))
    for coupling in model.couplings:
        nn.init.normal_(coupling.end.weight, std=0.05)
    return model


def inputs() -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 6, 16), torch.randn(2, 128)
