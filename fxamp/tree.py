"""The modules, parameters and buffers of a model under all of their paths, and what paths have in common.

What torch's `named_modules(remove_duplicate=False)` gives, also where a class has a `named_modules` or
`named_parameters` of its own: those from before torch 2.0 take no `remove_duplicate`, others give further names.
"""

from collections.abc import Iterator

import torch
from torch import nn


def every_module(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Path and module, one that stands in two places twice; the model itself has the path ""."""
    yield prefix, model
    for name, child in model._modules.items():
        if child is not None:
            yield from every_module(child, f"{prefix}.{name}" if prefix else name)


def every_parameter(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and parameter, a tied one under each of its names."""
    for path, module in every_module(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{path}.{name}" if path else name, parameter


def every_buffer(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and buffer, likewise."""
    for path, module in every_module(model):
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{path}.{name}" if path else name, buffer


def without_common_end(one: str, other: str) -> tuple[str, str]:
    """Paths of the modules in which two parameters have the same place."""
    ours, theirs = one.split("."), other.split(".")
    while ours and theirs and ours[-1] == theirs[-1]:
        ours.pop()
        theirs.pop()
    return ".".join(ours), ".".join(theirs)
