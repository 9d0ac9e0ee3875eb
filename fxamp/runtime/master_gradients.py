"""Float32 gradients of 16-bit parameters, which their masters share: `master.grad` is `parameter.grad`, or nothing."""

from collections.abc import Iterable

import torch

from fxamp.runtime.masters import MASTER, is_low


def widen_gradients_(parameters: Iterable[torch.Tensor]) -> None:
    """Turn the 16-bit gradients of parameters into float32 ones, for their masters too."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and is_low(parameter) and gradient.dtype == parameter.dtype:
            parameter.grad_dtype = None
            parameter.grad = gradient.float()
        mirror_gradient(parameter)


def drop_widened(parameters: Iterable[torch.Tensor], set_to_none: bool = True) -> None:
    """Clear widened gradients, so that the next are 16 bits again: none, or 16-bit zeros."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.dtype != parameter.dtype:
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
            if not set_to_none:
                parameter.grad = torch.zeros_like(gradient, dtype=parameter.dtype, requires_grad=False)
        mirror_gradient(parameter)


def mirror_gradient(parameter: torch.Tensor) -> None:
    """Give a parameter's master the same float32 gradient, or none if the parameter has none.

    A step that was skipped, or `model.zero_grad()`, would leave the master the gradient of an earlier backward.
    """
    master: torch.Tensor | None = getattr(parameter, MASTER, None)
    if master is not None:
        gradient = parameter.grad
        master.grad = None if gradient is None or gradient.dtype != torch.float32 else gradient
