"""Models of torchvision at published sizes; nothing is downloaded.

Next to a torch of another build (one without CUDA, say) torchvision's compiled part does not load, and torchvision
fails to import, because it describes operators that nothing has declared. They are declared here.
"""

# mypy: disable-error-code="no-any-return"

import functools
import importlib
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxamp.counting.zoo.step import MakeStep, MissingPackageError, Step, classify

# What torchvision's Python describes of its compiled part.
_OPERATORS = tuple(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms"))
_TINY_CLASSES = 10


@functools.cache
def torchvision_models() -> Any:
    """torchvision.models.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        return importlib.import_module("torchvision.models")
    except ModuleNotFoundError as error:
        version = torch.__version__.partition("+")[0]
        raise MissingPackageError(f"needs torchvision (pip install torchvision torch=={version})") from error
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _declare_operators()
        return importlib.import_module("torchvision.models")


def _declare_operators() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in _OPERATORS:
        library.define(schema)  # type: ignore[no-untyped-call]
    _KEPT.append(library)


_KEPT: list[torch.library.Library] = []  # an operator goes with the library that declared it


class Trunk(nn.Module):
    """A detector without its anchors and its matching: the maps, and boxes and scores of each."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.head(list(self.backbone(images).values()))


def _classifier(name: str, batch: int, side: int, tiny_side: int = 32, **options: Any) -> MakeStep:
    def make(tiny: bool) -> Step:
        classes, count, size = (_TINY_CLASSES, 2, tiny_side) if tiny else (1000, batch, side)
        model = torchvision_models().get_model(name, num_classes=classes, **options)
        labels = torch.randint(0, classes, (count,))

        def loss_of(result: Any) -> torch.Tensor:
            first, *others = result if isinstance(result, tuple) else (result,)
            return sum((F.cross_entropy(head, labels) for head in others), F.cross_entropy(first, labels))

        return Step(model, (torch.randn(count, 3, size, size),), loss_of)

    return make


def _segmenter(name: str, batch: int, side: int) -> MakeStep:
    def make(tiny: bool) -> Step:
        classes, count, size = (4, 2, 32) if tiny else (21, batch, side)
        model = torchvision_models().get_model(name, num_classes=classes, weights_backbone=None)
        labels = torch.randint(0, classes, (count, size, size))
        images = torch.randn(count, 3, size, size)
        return Step(model, (images,), lambda result: F.cross_entropy(result["out"], labels))

    return make


def ssd300_vgg16(tiny: bool) -> Step:
    count, classes, boxes = 1 if tiny else 32, 91, 8732
    detector = torchvision_models().get_model("ssd300_vgg16", num_classes=classes, weights_backbone=None)
    places, labels = torch.randn(count, boxes, 4), torch.randint(0, classes, (count, boxes))

    def loss_of(found: Any) -> torch.Tensor:
        scores = F.cross_entropy(found["cls_logits"].flatten(0, 1), labels.flatten())
        return scores + F.smooth_l1_loss(found["bbox_regression"], places)

    return Step(Trunk(detector.backbone, detector.head), (torch.randn(count, 3, 300, 300),), loss_of)


def r3d_18(tiny: bool) -> Step:
    classes, count, frames, side = (_TINY_CLASSES, 2, 8, 16) if tiny else (400, 8, 16, 112)
    model = torchvision_models().get_model("r3d_18", num_classes=classes)
    return Step(model, (torch.randn(count, 3, frames, side, side),), classify(classes, count))


TORCHVISION: dict[str, MakeStep] = {
    "resnet18": _classifier("resnet18", 32, 224),
    "mobilenet_v3_small": _classifier("mobilenet_v3_small", 32, 224),
    "efficientnet_b0": _classifier("efficientnet_b0", 32, 224),
    "densenet121": _classifier("densenet121", 32, 224),
    "vgg16_bn": _classifier("vgg16_bn", 32, 224),
    "swin_t": _classifier("swin_t", 32, 224),
    "convnext_tiny": _classifier("convnext_tiny", 32, 224),
    "vit_b_16": _classifier("vit_b_16", 32, 224, 224),
    "inception_v3": _classifier("inception_v3", 32, 299, 299, init_weights=False),
    "googlenet": _classifier("googlenet", 32, 224, init_weights=False),
    "deeplabv3_resnet50": _segmenter("deeplabv3_resnet50", 8, 512),
    "fcn_resnet50": _segmenter("fcn_resnet50", 8, 512),
    "ssd300_vgg16": ssd300_vgg16,
    "r3d_18": r3d_18,
}
