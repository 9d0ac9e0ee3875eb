"""One low copy of a float32 value for several readers, whose gradients are added up in float32.

    low = value.to(torch.bfloat16)
    a = linear(low, w); b = linear(cast_again(value, low), v)

Autograd adds the gradients of what several nodes read in the dtype of that: of `low` alone they would be rounded anew
at each sum.
"""

from typing import Any

import torch

from fxamp.runtime.plain import must_be_plain


def cast_again(value: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """`value.to(low.dtype)` without making it: `low` is that; the gradient goes back to `value` by a way of its own.

    A cast where autograd would not do: while torch.compile, torch.export or torch.jit trace (Inductor fuses it), under
    functorch transforms and forward-mode AD, and for tensor subclasses.
    """
    if not torch.is_grad_enabled():
        return low
    if must_be_plain(value, low):
        return value.to(low.dtype)
    if value.requires_grad:
        return _CastAgain.apply(value, low.detach())  # type: ignore[no-untyped-call, no-any-return]
    return low


class _CastAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        ctx.dtype = value.dtype
        return low.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.dtype), None
