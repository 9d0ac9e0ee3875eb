"""The kernels a CUDA build would choose, for fake CUDA tensors in a build that has none of them.

Without them attention falls into its unfused form and an LSTM into one set of ops per time step, with casts that no
GPU run has. Active within `gpu_kernels()` only; casts under autocast are those of autocast_mode.h and
AutocastRNN.cpp: attention casts its operands, an LSTM casts every weight at every call.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.library import custom_op
from torch.nn import functional as F

from fxamp.dtypes import LOW_DTYPES


@contextlib.contextmanager
def gpu_kernels() -> Iterator[None]:
    """Fused attention and the cuDNN LSTM in the place of what a CPU build runs on fake CUDA tensors."""
    with (
        mock.patch.object(F, "scaled_dot_product_attention", _attention),
        mock.patch.object(torch._C._nn, "scaled_dot_product_attention", _attention),
        mock.patch.object(torch._VF, "lstm", _lstm),
        mock.patch.object(torch, "lstm", _lstm),  # what generated code calls
    ):
        yield


def _autocast_dtype() -> torch.dtype | None:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    was_enabled = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", was_enabled)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(dtype) if is_float and dtype is not None else value


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash attention for low operands without a mask, else the memory-efficient kernel."""
    dtype = _autocast_dtype()
    aten = torch.ops.aten
    with _without_autocast():
        query, key, value, attn_mask = (_cast(given, dtype) for given in (query, key, value, attn_mask))
        if attn_mask is None and query.dtype in LOW_DTYPES:
            flash = aten._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
        groups = query.shape[-3] // key.shape[-3]
        if groups > 1:
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        bias = _attention_bias(attn_mask, query, key)
        efficient = aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def _attention_bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        nothing = torch.full((), float("-inf"), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, 0.0, nothing)
    return mask.expand(*query.shape[:3], key.shape[2])


# Fakes for one cuDNN call each way: (output, last hidden, last cell, reserved space for backward).
@custom_op("fxamp_counting::lstm", mutates_args=())
def _lstm_kernel(
    x: torch.Tensor, weights: list[torch.Tensor], hidden: torch.Tensor, cell: torch.Tensor, features: int
) -> list[torch.Tensor]:
    raise RuntimeError("counted on fake tensors only")


@_lstm_kernel.register_fake
def _(
    x: torch.Tensor, weights: list[torch.Tensor], hidden: torch.Tensor, cell: torch.Tensor, features: int
) -> list[torch.Tensor]:
    steps, batch = x.shape[:2]
    return [
        x.new_empty(steps, batch, features),
        torch.empty_like(hidden),
        torch.empty_like(cell),
        x.new_empty(4 * steps * batch * features),
    ]


@custom_op("fxamp_counting::lstm_backward", mutates_args=())
def _lstm_backward_kernel(
    grad: torch.Tensor,
    reserve: torch.Tensor,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    hidden: torch.Tensor,
    cell: torch.Tensor,
) -> list[torch.Tensor]:
    raise RuntimeError("counted on fake tensors only")


@_lstm_backward_kernel.register_fake
def _(
    grad: torch.Tensor,
    reserve: torch.Tensor,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    hidden: torch.Tensor,
    cell: torch.Tensor,
) -> list[torch.Tensor]:
    return [torch.empty_like(x), *map(torch.empty_like, weights)]


def _keep_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    x, weights, hidden, cell, _ = inputs
    ctx.save_for_backward(output[3], x, hidden, cell, *weights)


def _lstm_gradients(ctx: Any, grads: list[torch.Tensor | None]) -> Any:
    reserve, x, hidden, cell, *weights = ctx.saved_tensors
    grad = grads[0]
    assert grad is not None
    first, *others = _lstm_backward_kernel(grad, reserve, x, weights, hidden, cell)
    return first, others, None, None, None


torch.library.register_autograd("fxamp_counting::lstm", _lstm_gradients, setup_context=_keep_for_backward)


def _lstm(
    x: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor],
    weights: list[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    is_bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """torch._VF.lstm as cuDNN runs it."""
    dtype = _autocast_dtype()
    with _without_autocast():
        x, *state_ = (_cast(given, dtype) for given in (x, *state))
        weights = [_cast(weight, dtype) for weight in weights]
        hidden, cell = state_
        features = hidden.shape[2] * (2 if is_bidirectional else 1)
        steps_first = x.transpose(0, 1) if batch_first else x
        out, hidden, cell, _ = _lstm_kernel(steps_first, weights, hidden, cell, features)
        return (out.transpose(0, 1) if batch_first else out), hidden, cell
