"""What a GraphedStep can be given, and what its loss_fn may return."""

import torch

from fxamp.errors import OptionError
from fxamp.runtime.arguments import check_needs_no_closure
from fxamp.runtime.scaler import LossScaler


def check_arguments(model: object, loss_fn: object, optimizer: object, scaler: object, max_graphs: object) -> None:
    """Refuse arguments of the constructor.

    Raises:
        OptionError: says which, and what is allowed.
    """
    order = "The order is GraphedStep(model, loss_fn, optimizer, scaler)."
    if isinstance(scaler, torch.amp.GradScaler) and not isinstance(scaler, LossScaler):
        raise OptionError(
            f"scaler is a {type(scaler).__name__}, whose step reads the device; use fxamp.LossScaler, "
            "which loads its state: LossScaler().load_state_dict(scaler.state_dict())."
        )
    if scaler is not None and not isinstance(scaler, LossScaler):
        raise OptionError(f"scaler is a {type(scaler).__name__}, not a fxamp.LossScaler or None. {order}")
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"model is a {type(model).__name__}, not a torch.nn.Module. {order}")
    if not callable(loss_fn):
        raise OptionError(f"loss_fn is a {type(loss_fn).__name__}, which cannot be called. {order}")
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise OptionError(f"optimizer is a {type(optimizer).__name__}, not an optimizer. {order}")
    check_needs_no_closure(optimizer, "GraphedStep() runs one forward and backward a step")
    if isinstance(max_graphs, bool) or not isinstance(max_graphs, int) or max_graphs < 0:
        raise OptionError(f"max_graphs={max_graphs!r} must be an integer >= 0.")


def check_loss(loss: object) -> None:
    """Refuse what backward() cannot begin at. Reads no number.

    Raises:
        OptionError: says what it is instead of one real number with a gradient.
    """
    if not isinstance(loss, torch.Tensor):
        raise OptionError(f"loss_fn returned a {type(loss).__name__}; it returns the loss, a tensor of one element.")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise OptionError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)} and {loss.dtype}; the loss is one real number: "
            ".mean() or .sum()."
        )
    if not loss.requires_grad:
        raise OptionError(
            "loss_fn returned a loss that needs no gradient: it was detached, made under no_grad(), or depends on no "
            "parameter that is trained."
        )
