"""A CPU's layer norm of low values, with the gradients of its weights added up in float32.

The CPU's own kernel adds them in the dtype of its input, row by row: over 8,000 rows float16 loses 1 % of them, and
bfloat16 10 %. A GPU's adds in float32, as torch's sums do on both.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from fxamp.dtypes import LOW_DTYPES
from fxamp.runtime.plain import must_be_plain


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    """`functional.layer_norm` (and `torch.layer_norm`), with the same results and gradients of the input.

    Plain where autograd would not do: while torch.compile, torch.export or torch.jit trace, under functorch transforms
    and forward-mode AD, and for tensor subclasses.
    """
    given = [tensor for tensor in (weight, bias) if tensor is not None]
    is_trained = torch.is_grad_enabled() and any([tensor.requires_grad for tensor in given])
    if is_trained and input.is_cpu and input.dtype in LOW_DTYPES and not must_be_plain(input, *given):
        return _LayerNorm.apply(input, tuple(normalized_shape), weight, bias, eps)  # type: ignore[no-untyped-call, no-any-return]
    return functional.layer_norm(input, normalized_shape, weight, bias, eps)


class _LayerNorm(torch.autograd.Function):
    """Gradients that will be differentiated, and batches of gradients (`is_grads_batched`), are torch's own."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        shape: tuple[int, ...],
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        normed, mean, scale = torch.native_layer_norm(input, shape, weight, bias, eps)
        ctx.save_for_backward(input, weight, bias, mean, scale)
        ctx.shape, ctx.eps = shape, eps
        return normed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, bias, mean, scale = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(grad):
            return _gradients_of_torch(ctx, grad)
        of_input = of_weight = of_bias = None
        if wanted[0]:
            of_input = torch.ops.aten.native_layer_norm_backward(
                grad, input, ctx.shape, mean, scale, weight, bias, [True, False, False]
            )[0]
        if weight is not None and wanted[2]:
            plain = torch.native_layer_norm(input, ctx.shape, None, None, ctx.eps)[0]
            of_weight = (grad * plain).sum_to_size(weight.shape).to(weight.dtype)
        if bias is not None and wanted[3]:
            of_bias = grad.sum_to_size(bias.shape).to(bias.dtype)
        return of_input, None, of_weight, of_bias, None


def _gradients_of_torch(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    input, weight, bias = ctx.saved_tensors[:3]
    inputs = (input, None, weight, bias, None)
    wanted = [tensor for tensor, needed in zip(inputs, ctx.needs_input_grad, strict=True) if needed]
    is_differentiated = torch.is_grad_enabled()
    with torch.enable_grad():
        normed = functional.layer_norm(input, ctx.shape, weight, bias, ctx.eps)
        found = iter(torch.autograd.grad(normed, wanted, grad, create_graph=is_differentiated))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)
