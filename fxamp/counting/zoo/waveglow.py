"""WaveGlow's steps: invertible 1x1 convolutions and affine couplings that a mel spectrogram conditions.

Sizes: Prenger, Valle, Catanzaro, "WaveGlow: A Flow-based Generative Network for Speech Synthesis", arXiv:1811.00002,
section 3.2, with weight norm on all convolutions of a coupling but the last.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from fxamp.counting.zoo.step import Step

Flowed = tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]


class Coupling(nn.Module):
    """Log scale and shift of one half of the channels, from the other half and the spectrogram."""

    def __init__(self, half: int, mels: int, width: int, depth: int) -> None:
        super().__init__()
        self.start = weight_norm(nn.Conv1d(half, width, 1))
        self.conditions = weight_norm(nn.Conv1d(mels, 2 * width * depth, 1))
        self.layers = nn.ModuleList(
            weight_norm(nn.Conv1d(width, 2 * width, 3, dilation=2**layer, padding=2**layer)) for layer in range(depth)
        )
        self.residuals = nn.ModuleList(weight_norm(nn.Conv1d(width, width, 1)) for _ in range(depth - 1))
        self.skips = nn.ModuleList(weight_norm(nn.Conv1d(width, width, 1)) for _ in range(depth))
        self.end = nn.Conv1d(width, 2 * half, 1)

    def forward(self, half: torch.Tensor, mel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.start(half)
        skipped: list[torch.Tensor] = []
        for number, condition in enumerate(self.conditions(mel).chunk(len(self.layers), 1)):
            a, b = (self.layers[number](h) + condition).chunk(2, 1)
            gated = torch.tanh(a) * torch.sigmoid(b)
            skipped.append(self.skips[number](gated))
            if number < len(self.residuals):
                h = h + self.residuals[number](gated)
        total = skipped[0]
        for each in skipped[1:]:
            total = total + each
        log_scale, shift = self.end(total).chunk(2, 1)
        return log_scale, shift


class WaveGlow(nn.Module):
    """(spectrogram, wave) -> (noise, log scales, log determinants of the mixers).

    Args:
        group: samples that are one step of the flow, as channels.
        stride: samples of one frame of the spectrogram.
        early: (every so many flows, so many channels) are given out without further flows.
    """

    def __init__(
        self, mels: int, group: int, flows: int, width: int, depth: int, stride: int, early: tuple[int, int]
    ) -> None:
        super().__init__()
        self.group, self.early = group, early
        self.upsample = nn.ConvTranspose1d(mels, mels, 4 * stride, stride)
        self.mixers, self.couplings = nn.ParameterList(), nn.ModuleList()
        left = group
        for flow in range(flows):
            left -= early[1] if self._gives_out(flow) else 0
            self.mixers.append(torch.linalg.qr(torch.randn(left, left))[0])
            self.couplings.append(Coupling(left // 2, mels * group, width, depth))

    def _gives_out(self, flow: int) -> bool:
        return flow > 0 and flow % self.early[0] == 0

    def _grouped(self, wave: torch.Tensor) -> torch.Tensor:
        """(batch, channels, samples) -> (batch, channels * group, samples / group)."""
        return wave.unfold(2, self.group, self.group).permute(0, 1, 3, 2).flatten(1, 2)

    def forward(self, mel: torch.Tensor, wave: torch.Tensor) -> Flowed:
        mel = self._grouped(self.upsample(mel)[..., : wave.size(1)])
        x = self._grouped(wave.unsqueeze(1))
        given, log_scales, volumes = [], [], []
        for flow, (mixer, coupling) in enumerate(zip(self.mixers, self.couplings, strict=True)):
            if self._gives_out(flow):
                given.append(x[:, : self.early[1]])
                x = x[:, self.early[1] :]
            volumes.append(x.size(0) * x.size(2) * torch.linalg.slogdet(mixer.float())[1])
            first, second = F.conv1d(x, mixer[:, :, None]).chunk(2, 1)
            log_scale, shift = coupling(first, mel)
            x = torch.cat((first, torch.exp(log_scale) * second + shift), 1)
            log_scales.append(log_scale)
        return torch.cat((*given, x), 1), log_scales, volumes


def waveglow(tiny: bool) -> Step:
    batch, frames, mels, stride = (2, 4, 6, 8) if tiny else (10, 32, 80, 256)  # 8,000 samples: half a second at 16 kHz
    samples = 32 if tiny else 8000
    if tiny:
        model = WaveGlow(mels, 8, 3, 8, 2, stride, (2, 2))
    else:
        model = WaveGlow(mels, 8, 12, 512, 8, stride, (4, 2))

    def loss_of(result: Flowed) -> torch.Tensor:
        noise, log_scales, volumes = result
        volume = torch.stack([scale.sum() for scale in log_scales]).sum() + torch.stack(volumes).sum()
        return (noise.square().sum() / 2 - volume) / noise.numel()

    return Step(model, (torch.randn(batch, mels, frames), torch.randn(batch, samples)), loss_of)
