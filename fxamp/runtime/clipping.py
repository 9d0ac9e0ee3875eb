"""The norm of an optimizer's gradients, and clipping to one."""

import math
import numbers
import sys
from collections import defaultdict
from typing import Any

import torch

from fxamp.errors import OptionError
from fxamp.runtime import distributed, gradients


def total_norm(every: list[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """Euclidean norm of all gradients together, 0-d float32, computed as torch's clip_grad_norm_ does.

    16-bit gradients are read in float32, so that their norm cannot overflow. Of no gradients it is a 0 on `device`.
    """
    if not every:
        return torch.zeros((), device=device)
    per_tensor: list[torch.Tensor] = []
    with torch.no_grad():
        for same in _by_device(every):
            low = [gradient for gradient in same if gradient.dtype.itemsize == 2]
            high = [gradient for gradient in same if gradient.dtype.itemsize != 2]
            per_tensor.extend(torch._foreach_norm(high, 2.0) if high else ())
            per_tensor.extend(torch._foreach_norm(low, 2.0, dtype=torch.float32) if low else ())
        first = per_tensor[0].device
        stacked = torch.stack([norm.to(first) for norm in per_tensor])
        total: torch.Tensor = torch.linalg.vector_norm(stacked, 2.0)
    return total.float()


def global_norm(optimizer: torch.optim.Optimizer, process_group: Any = None) -> torch.Tensor:
    """Euclidean norm of all gradients of an optimizer over all ranks that share them, 0-d float32.

    A part that several ranks hold counts once: of a DTensor, norms are added over its sharded mesh dimensions alone.

    Args:
        process_group: ranks that hold shards as plain tensors; then all gradients are taken for such shards.
    """
    bins: dict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
    device = torch.device("cpu")
    for parameter in gradients.parameters(optimizer):
        device = distributed.local(parameter).device
        shared = parameter if parameter.grad is None else parameter.grad
        found = bins[(process_group,) if process_group is not None else distributed.shard_groups(shared)]
        values = gradients.summed_values_of(parameter)
        if values is not None:
            added = distributed.without_partial(parameter.grad)  # type: ignore[arg-type]
            found.append(values if added is parameter.grad else gradients.local_numbers(added))
    norms = [distributed.norm_over(total_norm(found, device), groups) for groups, found in bins.items()]
    if not norms:
        return torch.zeros((), device="cpu")
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))


def checked_max_norm(max_norm: object) -> float | None:
    """What to clip to.

    Raises:
        OptionError: anything but a number >= 0 (math.inf is one) or None.
    """
    if max_norm is None:
        return None
    is_number = isinstance(max_norm, numbers.Real) and not isinstance(max_norm, bool)
    if not is_number or not max_norm >= 0 or sys.float_info.max < max_norm < math.inf:  # type: ignore[operator]
        raise OptionError(
            f"max_grad_norm={max_norm!r} must be a number >= 0 (math.inf only measures), or None for no clipping."
        )
    return float(max_norm)  # type: ignore[arg-type]


def multiply_(every: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients in place by a 0-d tensor on any device."""
    with torch.no_grad():
        for same in _by_device(every):
            torch._foreach_mul_(same, factor.to(same[0].device))


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / (norm + 1e-6)), 0-d; the 1e-6 is torch's."""
    return ((norm + 1e-6).reciprocal() * max_norm).clamp(max=1.0)


def _by_device(every: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    grouped: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for gradient in every:
        grouped[gradient.device].append(gradient)
    return list(grouped.values())
