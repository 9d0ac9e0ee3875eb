"""Which modules are equal for a graph, so that one holds for all of them."""

from typing import Any

import torch
from torch import nn

from fxamp.model.state_dicts import LOWERED
from fxamp.model.structure import Structure

_NO_DIFFERENCE = frozenset({*nn.Module().__dict__, LOWERED})


def likeness(block: nn.Module) -> tuple[Any, ...]:
    """Equal for blocks of one structure: classes, shapes, flags, numbers and names, and the same objects."""
    plain = [
        (path, name, type(value), value)
        for path, module in block.named_modules()
        for name, value in sorted(module.__dict__.items())
        if isinstance(value, (bool, int, float, str, torch.dtype))
    ]
    others = [
        (path, name, value if _is_plain_tuple(value) else id(value))
        for path, module in block.named_modules()
        for name, value in sorted(module.__dict__.items())
        if name not in _NO_DIFFERENCE
        and not isinstance(value, (bool, int, float, str, torch.dtype, torch.Tensor, type(None)))
    ]
    shapes = [
        (name, tensor.shape, tensor.requires_grad)
        for name, tensor in (*block.named_parameters(), *block.named_buffers())
    ]
    return type(block), Structure(block).fingerprint, tuple(plain), tuple(others), tuple(shapes)


def kind(block: nn.Module) -> tuple[Any, ...]:
    """Equal for blocks that differ in nothing but what they hold beside modules and tensors (the number of a layer)."""
    classes = [(path, type(module)) for path, module in block.named_modules()]
    shapes = [(name, tensor.shape) for name, tensor in (*block.named_parameters(), *block.named_buffers())]
    return tuple(classes), tuple(shapes)


def _is_plain_tuple(value: Any) -> bool:
    return type(value) in (tuple, torch.Size) and all(isinstance(each, (bool, int, float, str)) for each in value)
