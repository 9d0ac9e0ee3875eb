"""What the speed suite trains: ten models at published sizes, a small and a large batch each, tiny ones for a CPU."""

# mypy: disable-error-code="no-any-return"

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxamp.counting.zoo.gnmt import GNMT
from fxamp.counting.zoo.language import GPT2, NCF, Bert, Llama
from fxamp.counting.zoo.vision import ResNet, UNet, ViT

SIZES = ("small", "large")
TINY_BATCH = {"small": 2, "large": 4}
TINY_WORDS = 32

Batch = tuple[tuple[torch.Tensor, ...], torch.Tensor]
"""The model's arguments, and the targets of its loss."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One model of the suite.

    Attributes:
        make: (tiny) -> a new model, on torch's default device.
        batch: (tiny, batch size) -> a batch, on torch's default device.
        sizes: the batch size called "small", and the one called "large".
        unit: what throughput counts, so many of them in each sample.
        is_channels_last: images and convolution weights lie channels-last in memory.
    """

    make: Callable[[bool], nn.Module]
    batch: Callable[[bool, int], Batch]
    sizes: tuple[int, int]
    unit: str = "images"
    units_per_sample: int = 1
    is_channels_last: bool = False


@dataclasses.dataclass(frozen=True)
class Workload:
    """One model at one batch size on one device; `make` gives a new model each time."""

    make: Callable[[], nn.Module]
    inputs: tuple[torch.Tensor, ...]
    targets: torch.Tensor
    batch_size: int
    units: int
    unit: str

    @staticmethod
    def loss_fn(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Cross entropy over the last dimension; for scores with a target each, of two classes."""
        if targets.is_floating_point():
            return F.binary_cross_entropy_with_logits(outputs, targets)
        return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))


def workload(name: str, size: str, device: torch.device, tiny: bool = False) -> Workload:
    """A model of `FAMILIES` at the batch size called `size`."""
    family = FAMILIES[name]
    count = TINY_BATCH[size] if tiny else family.sizes[SIZES.index(size)]
    torch.manual_seed(0)
    with device:
        inputs, targets = family.batch(tiny, count)

    def make() -> nn.Module:
        torch.manual_seed(0)
        with device:
            model = family.make(tiny)
        if family.is_channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model.train()

    if family.is_channels_last:
        inputs = tuple(given.contiguous(memory_format=torch.channels_last) for given in inputs)
    per_sample = 1 if tiny else family.units_per_sample
    return Workload(make, inputs, targets, count, count * per_sample, family.unit)


def _images(
    side: int, tiny_side: int = 32, classes: int = 1000, is_dense: bool = False
) -> Callable[[bool, int], Batch]:
    def batch(tiny: bool, count: int) -> Batch:
        extent = tiny_side if tiny else side
        labels = (count, extent, extent) if is_dense else (count,)
        return (torch.randn(count, 3, extent, extent),), torch.randint(0, classes, labels)

    return batch


def _tokens(words: int, length: int, inputs: int = 1) -> Callable[[bool, int], Batch]:
    def batch(tiny: bool, count: int) -> Batch:
        shape, vocabulary = (count, 8 if tiny else length), TINY_WORDS if tiny else words
        return tuple(torch.randint(0, vocabulary, shape) for _ in range(inputs)), torch.randint(0, vocabulary, shape)

    return batch


def _masked_tokens(words: int, length: int) -> Callable[[bool, int], Batch]:
    def batch(tiny: bool, count: int) -> Batch:
        (tokens,), targets = _tokens(words, length)(tiny, count)
        return (tokens, torch.zeros_like(tokens), torch.ones_like(tokens)), targets

    return batch


def _ratings(users: int, items: int) -> Callable[[bool, int], Batch]:
    def batch(tiny: bool, count: int) -> Batch:
        pairs = (torch.randint(0, 16 if tiny else most, (count,)) for most in (users, items))
        return tuple(pairs), torch.rand(count, 1)

    return batch


def _resnet50(tiny: bool) -> nn.Module:
    return ResNet((1, 1), 8) if tiny else ResNet((3, 4, 6, 3), 64)


def _bert(width: int, depth: int) -> Callable[[bool], nn.Module]:
    return lambda tiny: Bert(TINY_WORDS, 16, 2, 2, 8) if tiny else Bert(30522, width, depth, width // 64, 512)


def _ncf(tiny: bool) -> nn.Module:
    return NCF(16, 16, 8, (16, 16, 8)) if tiny else NCF(138493, 26744, 64, (256, 256, 128, 64))


FAMILIES: dict[str, Family] = {
    "resnet50": Family(_resnet50, _images(224), (8, 128)),
    "resnet50_channels_last": Family(_resnet50, _images(224), (8, 128), is_channels_last=True),
    "bert_base": Family(_bert(768, 12), _masked_tokens(30522, 512), (2, 32), "tokens", 512),
    "gpt2": Family(
        lambda tiny: GPT2(TINY_WORDS, 16, 2, 2, 8) if tiny else GPT2(50257, 768, 12, 12, 1024),
        _tokens(50257, 1024), (1, 16), "tokens", 1024,
    ),
    "vit_b": Family(
        lambda tiny: ViT(16, 2, 2, 32, 16) if tiny else ViT(768, 12, 12, 224, 16), _images(224), (8, 128)
    ),
    "ncf": Family(_ncf, _ratings(138493, 26744), (4096, 1 << 20), "samples"),
    "unet": Family(
        lambda tiny: UNet(8, 2) if tiny else UNet(64, 5), _images(512, 16, 2, is_dense=True), (1, 8)
    ),
    "llama": Family(
        lambda tiny: Llama(TINY_WORDS, 16, 2, 2, 24) if tiny else Llama(32000, 2048, 6, 32, 5632),
        _tokens(32000, 2048), (1, 4), "tokens", 2048,
    ),
    "bert_large": Family(_bert(1024, 24), _masked_tokens(30522, 512), (2, 16), "tokens", 512),
    "gnmt": Family(
        lambda tiny: GNMT(TINY_WORDS, 16, 2) if tiny else GNMT(32317, 1024, 4),
        _tokens(32317, 48, inputs=2), (8, 64), "tokens", 48,
    ),
}  # fmt: skip
