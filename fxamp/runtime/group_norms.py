"""A CPU's group norm of low values that keeps its mean and scale in float32 for the backward pass.

torch keeps both in the weights' dtype. Rounded, they move all gradients of a group the same way, the more the further
the mean is from 0, and biases before it get the sum of that. With float32 weights the CPU's kernel keeps them whole.
"""

import torch
from torch.nn import functional

from fxamp.dtypes import LOW_DTYPES
from fxamp.runtime.plain import must_be_plain


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """`functional.group_norm` (and `torch.group_norm`), with the same results (a last bit apart without weights).

    Plain where nothing is differentiated, and where `must_be_plain` says so: exporters want one dtype.
    """
    given = [tensor for tensor in (input, weight, bias) if tensor is not None]
    is_trained = torch.is_grad_enabled() and any([tensor.requires_grad for tensor in given])
    if is_trained and input.is_cpu and input.dtype in LOW_DTYPES and not must_be_plain(*given):
        weight, bias = (None if tensor is None else tensor.float() for tensor in (weight, bias))
        if weight is None and bias is None:
            weight = input.new_ones(input.shape[1], dtype=torch.float32)
    return functional.group_norm(input, num_groups, weight, bias, eps)
