"""ResNet-50, ResNeXt-101, SE-ResNeXt-101, U-Net, ConvNeXt-T, ViT-B/16."""

# mypy: disable-error-code="no-any-return"

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from fxamp.counting.zoo.step import MakeStep, Step, classify


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """ResNet's block of 1x1, 3x3 and 1x1 convolutions; ResNeXt's where it has groups."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, groups: int = 1) -> None:
        super().__init__()
        self.a = conv_bn(inputs, width, 1)
        self.b = conv_bn(width, width, 3, stride, groups)
        self.c = conv_bn(width, outputs, 1)
        is_same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if is_same else conv_bn(inputs, outputs, 1, stride)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.b(F.relu(self.a(x), inplace=True)), inplace=True)
        h = self.gate(self.c(h))
        h += self.shortcut(x)
        return F.relu(h, inplace=True)


class SqueezeBottleneck(Bottleneck):
    """With squeeze and excitation (Hu et al. 2017): channels are scaled by what their means say."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, groups: int = 1) -> None:
        super().__init__(inputs, width, outputs, stride, groups)
        self.squeeze, self.excite = nn.Linear(outputs, outputs // 16), nn.Linear(outputs // 16, outputs)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3))))))
        return x * scale[:, :, None, None]


class ResNet(nn.Module):
    """He et al. 2015; ResNeXt (Xie et al. 2016) with `groups` of `group_width` channels in the first stage."""

    def __init__(
        self,
        depths: tuple[int, ...],
        width: int,
        classes: int = 1000,
        groups: int = 1,
        group_width: int | None = None,
        block: type[Bottleneck] = Bottleneck,
    ) -> None:
        super().__init__()
        inner = width if group_width is None else groups * group_width
        self.stem, channels, blocks = conv_bn(3, width, 7, 2), width, []
        for stage, depth in enumerate(depths):
            for number in range(depth):
                outputs, stride = 4 * (width << stage), 2 if stage and not number else 1
                blocks.append(block(channels, inner << stage, outputs, stride, groups))
                channels = outputs
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.max_pool2d(F.relu(self.stem(x), inplace=True), 3, 2, 1)
        return self.head(F.adaptive_avg_pool2d(self.blocks(h), 1).flatten(1))


class UNet(nn.Module):
    """Ronneberger et al. 2015, with batch norm."""

    def __init__(self, width: int, depth: int, classes: int = 2, channels: int = 3) -> None:
        super().__init__()
        widths = [width << level for level in range(depth)]
        self.downs = nn.ModuleList(self._pair(a, b) for a, b in zip([channels, *widths], widths, strict=False))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.joins = nn.ModuleList(self._pair(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Sequential:
        first, second = conv_bn(inputs, outputs, 3), conv_bn(outputs, outputs, 3)
        return nn.Sequential(first, nn.ReLU(inplace=True), second, nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for number, down in enumerate(self.downs):
            x = down(F.max_pool2d(x, 2) if number else x)
            kept.append(x)
        for up, join, skip in zip(self.ups, self.joins, reversed(kept[:-1]), strict=True):
            x = join(torch.cat((skip, up(x)), 1))
        return self.head(x).permute(0, 2, 3, 1)


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, norm over channels last, two linear layers, a layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.depth(x).permute(0, 2, 3, 1))
        return x + self.scale * self.down(F.gelu(self.up(h))).permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of an image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Liu et al. 2022."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), ChannelNorm(width)]
        for stage, depth in enumerate(depths):
            if stage:
                layers += [ChannelNorm(width << stage - 1), nn.Conv2d(width << stage - 1, width << stage, 2, 2)]
            layers += [ConvNeXtBlock(width << stage) for _ in range(depth)]
        self.layers, last = nn.Sequential(*layers), width << len(depths) - 1
        self.norm, self.head = nn.LayerNorm(last), nn.Linear(last, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(x).mean((2, 3))))


class ViT(nn.Module):
    """Dosovitskiy et al. 2020."""

    def __init__(self, width: int, depth: int, heads: int, image: int, patch: int, classes: int = 1000) -> None:
        from fxamp.counting.zoo.language import Block

        super().__init__()
        tokens = (image // patch) ** 2 + 1
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token, self.position = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.randn(1, tokens, width))
        self.blocks = nn.Sequential(*[Block(width, heads, is_causal=False) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat((self.token.expand(h.shape[0], -1, -1), h), 1) + self.position
        return self.head(self.norm(self.blocks(h))[:, 0])


def _images(make: Callable[[], nn.Module], batch: int, side: int, classes: int = 1000, *per_image: int) -> Step:
    return Step(make(), (torch.randn(batch, 3, side, side),), classify(classes, batch, *per_image))


def resnet50(tiny: bool) -> Step:
    return _images(lambda: ResNet((1, 1), 8), 2, 32) if tiny else _images(lambda: ResNet((3, 4, 6, 3), 64), 32, 224)


def _grouped(block: type[Bottleneck]) -> MakeStep:
    def make(tiny: bool) -> Step:
        if tiny:
            return _images(lambda: ResNet((1, 1), 8, groups=4, group_width=4, block=block), 2, 32)
        return _images(lambda: ResNet((3, 4, 23, 3), 64, groups=32, group_width=4, block=block), 32, 224)

    return make


def unet(tiny: bool) -> Step:
    if tiny:
        return _images(lambda: UNet(8, 2), 1, 16, 2, 16, 16)
    return _images(lambda: UNet(64, 5), 8, 512, 2, 512, 512)


def convnext_tiny(tiny: bool) -> Step:
    if tiny:
        return _images(lambda: ConvNeXt((1, 1), 8), 2, 32)
    return _images(lambda: ConvNeXt((3, 3, 9, 3), 96), 32, 224)


def vit_b16(tiny: bool) -> Step:
    if tiny:
        return _images(lambda: ViT(16, 2, 2, 32, 16), 2, 32)
    return _images(lambda: ViT(768, 12, 12, 224, 16), 64, 224)


VISION: dict[str, MakeStep] = {
    "resnet50": resnet50,
    "resnext101_32x4d": _grouped(Bottleneck),
    "se_resnext101_32x4d": _grouped(SqueezeBottleneck),
    "unet": unet,
    "convnext_tiny": convnext_tiny,
    "vit_b16": vit_b16,
}
