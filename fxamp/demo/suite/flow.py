"""A WaveGlow-style flow: invertible mixing and affine couplings over a wave, conditioned on a coarse version of it.

The waves are not sound: they are the rows of photographs, 64 pixels long; the condition is mean and spread of every
eight pixels.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from fxamp.demo.suite.pictures import textures
from fxamp.demo.suite.task import SuiteTask
from fxamp.demo.tasks import Batch, draw

LENGTH, GROUP, MELS = 64, 8, 2


class Coupling(nn.Module):
    """Log scale and shift of one half of the channels, from the other half and the condition."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.start = weight_norm(nn.Conv1d(GROUP // 2, width, 1))
        self.condition = weight_norm(nn.Conv1d(MELS, 2 * width * depth, 1))
        self.layers = nn.ModuleList(
            weight_norm(nn.Conv1d(width, 2 * width, 3, dilation=2**layer, padding=2**layer)) for layer in range(depth)
        )
        self.skips = nn.ModuleList(weight_norm(nn.Conv1d(width, 2 * width, 1)) for _ in range(depth))
        self.end = nn.Conv1d(width, GROUP, 1)
        for parameter in self.end.parameters():
            nn.init.zeros_(parameter)

    def forward(self, half: Tensor, mel: Tensor) -> tuple[Tensor, Tensor]:
        x = self.start(half)
        conditions = self.condition(mel).chunk(len(self.layers), 1)
        out = torch.zeros_like(x)
        for layer, skip, condition in zip(self.layers, self.skips, conditions, strict=True):
            a, b = (layer(x) + condition).chunk(2, 1)
            residual, skipped = skip(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            x, out = x + residual, out + skipped
        log_scale, shift = self.end(out).chunk(2, 1)
        return log_scale, shift


class Flow(nn.Module):
    """Gives the wave as noise, and the logarithm of the volume that it took, for each wave."""

    def __init__(self, flows: int = 2, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.mixers = nn.ParameterList(torch.linalg.qr(torch.randn(GROUP, GROUP))[0] for _ in range(flows))
        self.couplings = nn.ModuleList(Coupling(width, depth) for _ in range(flows))

    def forward(self, mel: Tensor, wave: Tensor) -> tuple[Tensor, Tensor]:
        x = wave.view(len(wave), -1, GROUP).transpose(1, 2)
        volume = torch.zeros_like(wave[:, 0])
        for mixer, coupling in zip(self.mixers, self.couplings, strict=True):
            volume = volume + x.size(2) * torch.linalg.slogdet(mixer)[1]
            first, second = nn.functional.conv1d(x, mixer[:, :, None]).chunk(2, 1)
            log_scale, shift = coupling(first, mel)
            x = torch.cat((first, torch.exp(log_scale) * second + shift), 1)
            volume = volume + log_scale.sum((1, 2))
        return x, volume


def likelihood_loss(outputs: tuple[Tensor, Tensor], wave: Tensor) -> Tensor:
    """Negative log likelihood of a pixel, in nats."""
    noise, volume = outputs[0].float(), outputs[1].float()
    return (noise.square().sum() / 2 - volume.sum()) / wave.numel() + math.log(2 * math.pi) / 2


def likelihood(outputs: tuple[Tensor, Tensor], wave: Tensor) -> float:
    """The same in float64."""
    noise, volume = outputs[0].double(), outputs[1].double()
    return float((noise.square().sum() / 2 - volume.sum()) / wave.numel() + math.log(2 * math.pi) / 2)


def waves(count: int, seed: int, *, held_out: bool) -> Batch:
    """((mel, wave), wave): rows of photographs, with noise of one grey value so that the density is bounded."""
    grey = textures(count, 1, LENGTH, seed, held_out=held_out)[:, 0]
    noise = torch.rand(grey.shape, generator=torch.Generator().manual_seed(seed)) / 255
    wave = (grey + noise - 0.45) * 4
    groups = wave.view(count, -1, GROUP)
    return (torch.stack((groups.mean(2), groups.std(2)), 1), wave), wave


def flow(device: torch.device, steps: int = 120, batch: int = 16) -> SuiteTask:
    """The density of rows of two photographs; their right thirds are held out."""

    def there(batch_of: Batch) -> Batch:
        (mel, wave), _ = batch_of
        return (mel.to(device), wave.to(device)), wave.to(device)

    return SuiteTask(
        name="flow",
        title=f"WaveGlow-style flow, weight norm; rows of photographs, {LENGTH} pixels (no sound)",
        model=Flow,
        batches=draw(*there(waves(4000, 9, held_out=False)), steps, batch),
        held_out=there(waves(512, 10, held_out=True)),
        steps=steps,
        learning_rate=5e-3,
        loss=likelihood_loss,
        metric=likelihood,
        measures="negative log likelihood of a pixel",
    )
