"""A CPU's layer and group norms of low values, with gradients that are computed in float32.

1. Beside low weights the CPU's kernels keep a row's or a group's mean and scale for the backward pass in the low dtype.
   Rounded, these move all gradients of the group the same way, the more the further its mean is from 0; a scale may be
   inf in float16. So they are handed float32 weights: results are the same to the bit.
2. The layer norm adds up the gradients of its weights in the dtype of its input, row by row: over 8,000 rows float16
   loses 1 % of them, and bfloat16 10 %. A GPU's adds in float32, as torch's sums do on both.
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
    """`functional.layer_norm` (and `torch.layer_norm`), with the same results."""
    if not _is_ours(input, weight, bias):
        return functional.layer_norm(input, normalized_shape, weight, bias, eps)
    if weight is None and bias is None:
        return functional.layer_norm(input, normalized_shape, _factors(input, normalized_shape, None), None, eps)
    return _LayerNorm.apply(input, tuple(normalized_shape), weight, bias, eps)  # type: ignore[no-untyped-call, no-any-return]


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """`functional.group_norm` (and `torch.group_norm`), with the same results; a last bit apart without weights."""
    if _is_ours(input, weight, bias):
        is_bare = weight is None and bias is None
        weight, bias = _factors(input, input.shape[1:2], None) if is_bare else _wide(weight), _wide(bias)
    return functional.group_norm(input, num_groups, weight, bias, eps)


def _is_ours(input: torch.Tensor, *weights: torch.Tensor | None) -> bool:
    """Not where nothing is differentiated, of no rows, nor where `must_be_plain` says so: exporters want one dtype."""
    given = [tensor for tensor in (input, *weights) if tensor is not None]
    is_trained = torch.is_grad_enabled() and any([tensor.requires_grad for tensor in given])
    is_low = input.is_cpu and input.dtype in LOW_DTYPES and input.numel() > 0
    return is_trained and is_low and not must_be_plain(*given)


def _factors(input: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None) -> torch.Tensor:
    """A norm's weight in float32, ones where it has none."""
    return input.new_ones(tuple(shape), dtype=torch.float32) if weight is None else weight.float()


def _wide(weight: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight is None else weight.float()


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
        factors = _factors(input, shape, weight)
        normed, mean, scale = torch.native_layer_norm(input, shape, factors, _wide(bias), eps)
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
            factors = _factors(input, ctx.shape, weight)
            of_input = torch.ops.aten.native_layer_norm_backward(
                grad, input, ctx.shape, mean, scale, factors, _wide(bias), [True, False, False]
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
