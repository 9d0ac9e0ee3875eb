"""Grouped matrix products where torch's meta kernel refuses them: it takes bfloat16 alone, the real ones more.

Source: `_meta_grouped_mm_common` in torch/_meta_registrations.py, aten/src/ATen/native/GroupedMMUtils.h (2.11 to 2.13).
"""

from typing import Any

import torch


def like_grouped(
    mat_a: torch.Tensor, mat_b: torch.Tensor, offs: torch.Tensor | None = None, **others: Any
) -> torch.Tensor:
    """What a grouped product gives, by its sizes.

    Args:
        mat_a: (groups, rows, k), or (rows of all groups, k); with a `mat_b` of two dimensions (rows, k of all groups).
        mat_b: (groups, k, columns), or (k, columns of all groups); beside such a `mat_a` (k of all groups, columns).
        offs: (groups,): where each group ends; none where both have three dimensions.
        others: `bias` and `out_dtype`, which change no size.
    """
    rows, columns = mat_a.shape[-2], mat_b.shape[-1]
    if mat_a.dim() == mat_b.dim():
        groups = mat_a.shape[0] if offs is None else offs.shape[0]
        result = mat_a.new_empty((groups, rows, columns))
    else:
        result = mat_a.new_empty((rows, columns))
    if torch.is_grad_enabled() and (mat_a.requires_grad or mat_b.requires_grad):
        return result.requires_grad_().clone()  # no leaf: it may be written in place
    return result


def grouped_mm(
    mat_a: torch.Tensor, mat_b: torch.Tensor, offs: torch.Tensor | None = None, **others: Any
) -> torch.Tensor:
    """`torch._grouped_mm`, also of float32 and float16 under torch.compile and torch.export."""
    if torch.compiler.is_compiling() and mat_a.dtype != torch.bfloat16:
        return _opaque(mat_a, mat_b, offs)  # type: ignore[no-any-return]
    return torch._grouped_mm(mat_a, mat_b, offs, **others)


@torch.library.custom_op("fxamp::grouped_mm", mutates_args=())
def _opaque(mat_a: torch.Tensor, mat_b: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    return torch._grouped_mm(mat_a, mat_b, offs)


@_opaque.register_fake
def _(mat_a: torch.Tensor, mat_b: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    return like_grouped(mat_a, mat_b, offs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    mat_a, mat_b, offs = ctx.saved_tensors
    gradient = gradient.contiguous()
    return _opaque(gradient, mat_b.mT, offs), _opaque(mat_a.mT, gradient, offs), None


_opaque.register_autograd(_backward, setup_context=_keep)

GROUPED = frozenset(
    found
    for found in (getattr(torch, "_grouped_mm", None), getattr(torch.nn.functional, "grouped_mm", None), grouped_mm)
    if found is not None
)
"""Products of groups of rows, or of columns, each with a matrix of its own."""
