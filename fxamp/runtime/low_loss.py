"""Cross entropy in float32 of logits that are read low."""

import torch
from torch import Tensor
from torch.nn import functional


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """What torch's cross_entropy gives for `input.float()`, by a kernel that reads low logits and writes float32.

    Args:
        input: (C), (N, C) or (N, C, ...), float16 or bfloat16; its gradient is rounded once.
        target: class indices, (), (N) or (N, ...).
        label_smoothing: 0; anything else mixes classes.

    Returns:
        The float32 loss.
    """
    assert label_smoothing == 0.0
    dim = min(1, input.dim() - 1)
    log_probability = functional.log_softmax(input, dim, dtype=torch.float32)
    return functional.nll_loss(log_probability, target, weight, size_average, ignore_index, reduce, reduction)
