"""Losses of outputs, and gradients of losses."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxamp.errors import OptionError


def floats_in(value: Any) -> list[torch.Tensor]:
    """The floating tensors inside a value."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def loss_of(output: Any, loss_fn: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    """The loss of an output; without a loss function the mean of all its floating elements.

    Raises:
        OptionError: the loss function gives no scalar tensor, or reads tensors of inference mode.
    """
    if loss_fn is None:
        parts = [tensor.float().mean() for tensor in floats_in(output)]
        return torch.stack(parts).sum()
    loss = _called(loss_fn, output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise OptionError(f"loss_fn gives {type(loss).__qualname__}, not a scalar tensor. Reduce it: loss.mean().")
    return loss


def _called(loss_fn: Callable[[Any], torch.Tensor], output: Any) -> Any:
    try:
        return loss_fn(output)
    except RuntimeError as error:
        if not str(error).startswith("Inference tensors"):
            raise
        raise OptionError(
            "loss_fn reads tensors that were made under torch.inference_mode, and no gradient goes through those: give "
            "it clones that were made outside."
        ) from error


def gradients_of(loss: torch.Tensor, wanted: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Of a loss with respect to tensors, whose `.grad` is left as it is.

    Raises:
        OptionError: forward checkpoints in torch's older way, which fills `.grad` alone.
    """
    try:
        return torch.autograd.grad(loss, wanted, allow_unused=True)
    except RuntimeError as error:
        if not str(error).startswith("When use_reentrant=True"):
            raise
        raise OptionError(
            "forward checkpoints with use_reentrant=True, whose backward fills .grad and nothing else: checkpoint with "
            "use_reentrant=False, look without a loss function, or train under fxamp.watch_nan."
        ) from error
