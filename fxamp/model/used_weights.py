"""Which weights of a model a call has used."""

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxamp.model.hooked import matrices

NEARLY_ALL = 0.9
"""Share of the weights that graphs must hold: of modules, for the forward around them to run as it is written, or
Dynamo's, for it to stay with those."""


def used_in(model: nn.Module, result: Any) -> list[nn.Parameter]:
    """The matrices that a call may have used: those that its result has gradients for, and those that get none.

    All of them where no tensor is found in the result.
    """
    weights = [weight for _, weight in matrices(model)]
    found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if not found:
        return weights
    behind = _leaves_behind(found)
    return [weight for weight in weights if not weight.requires_grad or id(weight) in behind]


def share_given(model: nn.Module, result: Any, given: set[int]) -> float | None:
    """Of what a call used the share that graphs were given; None where it used no matrix.

    Args:
        given: weights by identity.
    """
    sizes = {id(weight): weight.numel() for weight in used_in(model, result)}
    return sum(size for weight, size in sizes.items() if weight in given) / sum(sizes.values()) if sizes else None


def _leaves_behind(results: list[torch.Tensor]) -> set[int]:
    """The tensors, by identity, that backward adds gradients of these to."""
    frontier = [result.grad_fn for result in results if result.grad_fn is not None]
    met, found = set(frontier), set[int]()
    while frontier:
        function = frontier.pop()
        if (leaf := getattr(function, "variable", None)) is not None:
            found.add(id(leaf))
        following = {each for each, _ in function.next_functions if each is not None} - met
        met |= following
        frontier += following
    return found
