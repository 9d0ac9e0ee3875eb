"""Results of padded GEMMs as their readers in the other precision want them: the model's own part, converted.

    logits = cast_of_part(padded, -1, 7, torch.float32)     # of padded[..., :-7]

torch would convert the gradient into memory of its own and copy that into zeros of the padded size. Here the
conversion writes into the padded gradient: for a vocabulary of 50257 that is the largest tensor of a step, read and
written once less.
"""

import math
from typing import Any

import torch
from torch.nn import functional

from fxamp.runtime.plain import must_be_plain


def cast_of_part(padded: torch.Tensor, dim: int, extra: int, dtype: torch.dtype) -> torch.Tensor:
    """All but the last `extra` elements along `dim`, in `dtype`; gradients come back with zeros behind them.

    Plain indexing and `.to` where autograd would not do: while torch.compile, torch.export or torch.jit trace, under
    functorch transforms and forward-mode AD, and for tensor subclasses.

    Args:
        padded: of any shape.
        dim: from the back, -1 for the last.
        extra: how many elements were added, at least 1.
        dtype: of the result, which is not that of `padded`.
    """
    if torch.is_grad_enabled() and padded.requires_grad and not must_be_plain(padded):
        return _CastOfPart.apply(padded, dim, extra, dtype)  # type: ignore[no-untyped-call, no-any-return]
    return _part(padded, dim, extra).to(dtype)


def _part(padded: torch.Tensor, dim: int, extra: int) -> torch.Tensor:
    return padded.narrow(dim, 0, padded.size(dim) - extra)


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


class _CastOfPart(torch.autograd.Function):
    """A batch of gradients (`is_grads_batched`) and a gradient of a subclass take torch's own pad and `.to`."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, dim: int, extra: int, dtype: torch.dtype) -> torch.Tensor:
        ctx.dim, ctx.extra, ctx.dtype = dim, extra, padded.dtype
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(padded)
        ctx.shape, ctx.strides = padded.shape, padded.stride() if is_dense else _contiguous(padded.shape)
        return _part(padded, dim, extra).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        is_batched = torch._C._functorch.is_legacy_batchedtensor(grad)
        if is_batched or must_be_plain(grad):
            behind = (*(0, 0) * (-1 - ctx.dim), 0, ctx.extra)
            return functional.pad(grad.to(ctx.dtype), behind), None, None, None
        wide = torch.empty_strided(ctx.shape, ctx.strides, dtype=ctx.dtype, device=grad.device)
        size = ctx.shape[ctx.dim] - ctx.extra
        wide.narrow(ctx.dim, 0, size).copy_(grad)
        wide.narrow(ctx.dim, size, ctx.extra).zero_()
        return wide, None, None, None
