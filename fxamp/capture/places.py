"""Where a model's modules and tensors stand."""

import torch
from torch import nn

from fxamp.tree import every_module

Place = tuple[str, str]  # path of a module, and the name of an attribute


def paths_of(root: nn.Module) -> dict[int, str]:
    """id of each module -> its (first) path."""
    return {id(module): path for path, module in root.named_modules()}


def paths_of_tensors(root: nn.Module) -> dict[int, str]:
    """id of every parameter, buffer and plain tensor attribute -> its path; tied tensors have their first path."""
    paths: dict[int, str] = {}
    for prefix, module in root.named_modules():
        owned = [*module._parameters.items(), *module._buffers.items(), *module.__dict__.items()]
        for name, value in owned:
            if isinstance(value, torch.Tensor):
                paths.setdefault(id(value), f"{prefix}.{name}" if prefix else name)
    return paths


def ties_of(root: nn.Module) -> dict[tuple[str, str], tuple[str, str, str]]:
    """(path, name) of each tensor that stands in two places -> path, kind and name of the first of them."""
    first: dict[int, tuple[str, str, str]] = {}
    found: dict[tuple[str, str], tuple[str, str, str]] = {}
    for path, module in every_module(root):
        for kind in ("_parameters", "_buffers", ""):
            held = module.__dict__.get(kind, {}) if kind else module.__dict__  # a module of torch.jit keeps none there
            for name, tensor in held.items():
                place = (path, kind, name)
                if isinstance(tensor, torch.Tensor) and first.setdefault(id(tensor), place) != place:
                    found[path, name] = first[id(tensor)]
    return found
