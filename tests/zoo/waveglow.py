"""WaveGlow: invertible 1x1 convolutions and affine couplings (Prenger et al., arXiv:1811.00002)."""

import warnings

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.nn.utils import weight_norm


def normed(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return weight_norm(module)


class Coupling(nn.Module):
    def __init__(self, half: int, mels: int, width: int, depth: int) -> None:
        super().__init__()
        self.start = normed(nn.Conv1d(half, width, 1))
        self.conditions = normed(nn.Conv1d(mels, 2 * width * depth, 1))
        self.layers = nn.ModuleList(
            normed(nn.Conv1d(width, 2 * width, 3, dilation=2**i, padding=2**i)) for i in range(depth)
        )
        self.skips = nn.ModuleList(normed(nn.Conv1d(width, 2 * width, 1)) for _ in range(depth))
        self.end = nn.Conv1d(width, 2 * half, 1)
        nn.init.normal_(self.end.weight, std=0.05)

    def forward(self, audio: torch.Tensor, mel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.start(audio)
        conditions = self.conditions(mel).chunk(len(self.layers), 1)
        out = torch.zeros_like(h)
        for layer, skip, condition in zip(self.layers, self.skips, conditions, strict=True):
            a, b = (layer(h) + condition).chunk(2, 1)
            residual, skipped = skip(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            h, out = h + residual, out + skipped
        log_scale, shift = self.end(out).chunk(2, 1)
        return log_scale, shift


class WaveGlow(nn.Module):
    def __init__(self, channels: int = 8, mels: int = 6, flows: int = 2, width: int = 8) -> None:
        super().__init__()
        self.upsample = nn.ConvTranspose1d(mels, mels, 4, 2, 1)
        self.mixers = nn.ParameterList(torch.linalg.qr(torch.randn(channels, channels))[0] for _ in range(flows))
        self.couplings = nn.ModuleList(Coupling(channels // 2, mels, width, 2) for _ in range(flows))

    def forward(self, mel: torch.Tensor, audio: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mel = self.upsample(mel)
        log_scales, log_dets = [], []
        for mixer, coupling in zip(self.mixers, self.couplings, strict=True):
            log_dets.append(audio.size(0) * audio.size(2) * torch.linalg.slogdet(mixer)[1])
            audio = torch.nn.functional.conv1d(audio, mixer[:, :, None])
            first, second = audio.chunk(2, 1)
            log_scale, shift = coupling(first, mel)
            audio = torch.cat([first, torch.exp(log_scale) * second + shift], 1)
            log_scales.append(log_scale)
        return audio, torch.stack(log_scales), torch.stack(log_dets)


def make() -> nn.Module:
    return WaveGlow()


def inputs() -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 6, 8), torch.randn(2, 8, 16)
