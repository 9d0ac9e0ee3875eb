"""A CPU's layer and group norms of low values, with gradients that are computed in float32.

1. Beside low weights the CPU's kernels keep a row's or a group's mean and scale for the backward pass in the low dtype.
   Rounded, these move all gradients of the group the same way, the more the further its mean is from 0; a scale may be
   inf in float16. So backward makes both anew, beside float32 weights; results are the kernel's own.
2. The layer norm adds up the gradients of its weights in the dtype of its input, row by row: over 8,000 rows float16
   loses 1 % of them, and bfloat16 10 %. A GPU's adds in float32, as torch's sums do on both.
"""

import dataclasses
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
        return _Norm.apply(_LAYER, input, weight, bias, tuple(normalized_shape), eps)  # type: ignore[no-untyped-call, no-any-return]
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
        return _Norm.apply(_GROUP, input, weight, bias, num_groups, eps)  # type: ignore[no-untyped-call, no-any-return]
    return functional.group_norm(input, num_groups, weight, bias, eps)


def _is_ours(input: torch.Tensor, *weights: torch.Tensor | None) -> bool:
    """Not where nothing is differentiated, of no rows, nor where `must_be_plain` says so: exporters want one dtype."""
    given = [tensor for tensor in (input, *weights) if tensor is not None]
    is_trained = torch.is_grad_enabled() and any([tensor.requires_grad for tensor in given])
    is_low = input.is_cpu and input.dtype in LOW_DTYPES and input.numel() > 0
    return is_trained and is_low and not must_be_plain(*given)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A norm.

    Attributes:
        norm: (input, by, weight, bias, eps) -> its result.
        again: (gradient, input, weight, by, eps) -> the gradient of its input, and its result without weights.
        summed: (input, by) -> the size that the gradients of its weights are added up to.
    """

    norm: Callable[..., torch.Tensor]
    again: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    summed: Callable[..., Sequence[int]]


class _Norm(torch.autograd.Function):
    """Gradients that will be differentiated are torch's own."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: _Kind,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        by: Any,
        eps: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, bias)
        ctx.kind, ctx.by, ctx.eps = kind, by, eps
        return kind.norm(input, by, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            return None, *_gradients_of_torch(ctx, grad), None, None
        input, weight, bias = ctx.saved_tensors
        of_input, plain = ctx.kind.again(grad, input, weight, ctx.by, ctx.eps)
        size = ctx.kind.summed(input, ctx.by)
        of_weight = (grad * plain).sum_to_size(size).reshape(weight.shape) if ctx.needs_input_grad[2] else None
        of_bias = grad.sum_to_size(size).reshape(bias.shape) if ctx.needs_input_grad[3] else None
        return None, of_input, of_weight, of_bias, None, None


def _gradients_of_torch(ctx: Any, grad: torch.Tensor) -> list[torch.Tensor | None]:
    needed = ctx.needs_input_grad[1:4]
    input, weight, bias = ctx.saved_tensors  # a checkpoint gives them once
    wanted = [tensor for tensor, is_needed in zip((input, weight, bias), needed, strict=True) if is_needed]
    normed = ctx.kind.norm(input, ctx.by, weight, bias, ctx.eps)
    found = iter(torch.autograd.grad(normed, wanted, grad, create_graph=True))
    return [next(found) if is_needed else None for is_needed in needed]


def _layer_again(
    grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, shape: tuple[int, ...], eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    ones = input.new_ones(shape, dtype=torch.float32)
    plain, mean, scale = torch.native_layer_norm(input, shape, ones, None, eps)
    back = torch.ops.aten.native_layer_norm_backward
    return back(grad, input, shape, mean, scale, _float32(ones, weight), None, _OF_INPUT)[0], plain


def _group_again(
    grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    format = suggest_memory_format(input)
    input, grad = input.contiguous(memory_format=format), grad.contiguous(memory_format=format)
    count, channels = input.shape[:2]
    sizes = count, channels, input.numel() // (count * channels), groups
    ones = input.new_ones(channels, dtype=torch.float32)
    plain, mean, scale = torch.native_group_norm(input, ones, None, *sizes, eps)
    back = torch.ops.aten.native_group_norm_backward
    return back(grad, input, mean, scale, _float32(ones, weight), *sizes, _OF_INPUT)[0], plain


_OF_INPUT = [True, False, False]
"""Which gradients torch's functions are asked for: of the input, not of weight and bias."""


def _float32(ones: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """A norm's weight in float32, ones where it has none; no cast, of which a GPU's norm has none either."""
    return ones if weight is None else ones * weight


_LAYER = _Kind(functional.layer_norm, _layer_again, lambda input, shape: shape)
_GROUP = _Kind(functional.group_norm, _group_again, lambda input, _: (1, input.shape[1], *(1,) * (input.dim() - 2)))
