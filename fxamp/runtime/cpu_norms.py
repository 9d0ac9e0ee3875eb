"""A CPU's layer and group norms of low values, with gradients that are computed in float32.

1. Beside low weights the CPU's kernels keep a row's or a group's mean and scale for the backward pass in the low dtype.
   Rounded, these move all gradients of the group the same way, the more the further its mean is from 0; a scale may be
   inf in float16. So they are handed float32 weights: results are the same to the bit.
2. The layer norm adds up the gradients of its weights in the dtype of its input, row by row: over 8,000 rows float16
   loses 1 % of them, and bfloat16 10 %. A GPU's adds in float32, as torch's sums do on both.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
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
    if _is_ours(input, weight, bias):
        return _LayerNorm.apply(input, weight, bias, tuple(normalized_shape), eps)  # type: ignore[no-untyped-call, no-any-return]
    return functional.layer_norm(input, normalized_shape, weight, bias, eps)


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """`functional.group_norm` (and `torch.group_norm`), with the same results."""
    if _is_ours(input, weight, bias):
        return _GroupNorm.apply(input, weight, bias, num_groups, eps)  # type: ignore[no-untyped-call, no-any-return]
    return functional.group_norm(input, num_groups, weight, bias, eps)


def _is_ours(input: torch.Tensor, *weights: torch.Tensor | None) -> bool:
    """Not where nothing is differentiated, of no rows, nor where `must_be_plain` says so: exporters want one dtype."""
    given = [tensor for tensor in (input, *weights) if tensor is not None]
    is_trained = torch.is_grad_enabled() and any([tensor.requires_grad for tensor in given])
    is_low = input.is_cpu and input.dtype in LOW_DTYPES and input.numel() > 0
    return is_trained and is_low and not must_be_plain(*given)


class _Norm(torch.autograd.Function):
    """A norm by itself in forward; in backward again, beside float32 weights.

    Gradients that will be differentiated, and batches of gradients (`is_grads_batched`), are torch's own.
    """

    norm: Callable[..., torch.Tensor]

    @classmethod
    def forward(
        cls, ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, by: Any, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, bias)
        ctx.by, ctx.eps = by, eps
        return cls.norm(input, by, weight, bias, eps)

    @classmethod
    def backward(cls, ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(grad):
            found = cls.differentiated(ctx, grad, *ctx.saved_tensors)
        else:
            found = cls.gradients(ctx, grad, *ctx.saved_tensors)
        return *found, None, None

    @classmethod
    def gradients(
        cls, ctx: Any, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        """Of input, weight and bias."""
        raise NotImplementedError

    @classmethod
    def differentiated(cls, ctx: Any, grad: torch.Tensor, *given: torch.Tensor | None) -> list[torch.Tensor | None]:
        """The same by autograd."""
        wanted = [tensor for tensor, needed in zip(given, ctx.needs_input_grad, strict=False) if needed]
        is_differentiated = torch.is_grad_enabled()
        with torch.enable_grad():
            normed = cls.norm(given[0], ctx.by, *given[1:], ctx.eps)
            found = iter(torch.autograd.grad(normed, wanted, grad, create_graph=is_differentiated))  # type: ignore[arg-type]
        return [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]


class _LayerNorm(_Norm):
    norm = staticmethod(functional.layer_norm)

    @classmethod
    def gradients(
        cls, ctx: Any, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        shape, wanted = ctx.by, ctx.needs_input_grad
        ones = input.new_ones(shape, dtype=torch.float32)
        plain, mean, scale = torch.native_layer_norm(input, shape, ones, None, ctx.eps)
        of_input = of_weight = of_bias = None
        if wanted[0]:
            of_input = torch.ops.aten.native_layer_norm_backward(
                grad, input, shape, mean, scale, _float32(ones, weight), None, [True, False, False]
            )[0]
        if weight is not None and wanted[1]:
            of_weight = (grad * plain).sum_to_size(weight.shape)
        if bias is not None and wanted[2]:
            of_bias = grad.sum_to_size(bias.shape)
        return [of_input, of_weight, of_bias]


class _GroupNorm(_Norm):
    norm = staticmethod(functional.group_norm)

    @classmethod
    def gradients(
        cls, ctx: Any, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        wanted = ctx.needs_input_grad
        format = suggest_memory_format(input)
        input, grad = input.contiguous(memory_format=format), grad.contiguous(memory_format=format)
        count, channels = input.shape[:2]
        sizes = count, channels, input.numel() // (count * channels), ctx.by
        ones = input.new_ones(channels, dtype=torch.float32)
        plain, mean, scale = torch.native_group_norm(input, ones, None, *sizes, ctx.eps)
        places = [dimension for dimension in range(input.dim()) if dimension != 1]
        of_input = of_weight = of_bias = None
        if wanted[0]:
            of_input = torch.ops.aten.native_group_norm_backward(
                grad, input, mean, scale, _float32(ones, weight), *sizes, [True, False, False]
            )[0]
        if weight is not None and wanted[1]:
            of_weight = (grad * plain).sum(places)
        if bias is not None and wanted[2]:
            of_bias = grad.sum(places)
        return [of_input, of_weight, of_bias]


def _float32(ones: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """A norm's weight in float32, ones where it has none; no cast, of which a GPU's norm has none either."""
    return ones if weight is None else ones * weight
