"""How far a tensor of a mixed run is from the same of an fp32 run."""

import math
from collections.abc import Sequence

import torch

from fxamp.sparse import is_sparse, side_by_side


def error_of(exact: torch.Tensor, mixed: torch.Tensor) -> float:
    """Norm of the difference by the norm of `exact`; inf where only `mixed` is not finite."""
    one, other = _pair(exact, mixed)
    size, difference = float(one[torch.isfinite(other)].norm()), difference_of(exact, mixed)
    return difference / size if size and math.isfinite(size) else (0.0 if difference == 0 else math.inf)


def error_of_all(exact: Sequence[torch.Tensor], mixed: Sequence[torch.Tensor]) -> float:
    """The largest error of two runs' outputs; inf where they are of other sizes, on which data has decided."""
    pairs = list(zip(exact, mixed, strict=False))
    return max((error_of(*both) if are_alike(*both) else math.inf for both in pairs), default=0.0)


def difference_of(exact: torch.Tensor, mixed: torch.Tensor) -> float:
    """Norm of the difference, of what is finite in `mixed`; inf where only `mixed` is not finite."""
    one, other = _pair(exact, mixed)
    is_finite = torch.isfinite(other)
    if bool((~is_finite & torch.isfinite(one)).any()):
        return math.inf
    return float((one - other)[is_finite].nan_to_num(posinf=0.0, neginf=0.0).norm())


def introduced(error: float, before: float) -> float:
    """What an error adds to the largest of what came in; 0 behind an infinite one, where nothing can be told."""
    return 0.0 if math.isinf(before) else max(0.0, error - before)


def largest_difference(exact: torch.Tensor, mixed: torch.Tensor) -> float:
    """Largest absolute difference of what is finite in `exact`; inf where only that is."""
    one, other = _pair(exact, mixed)
    is_finite = torch.isfinite(one)
    difference = (one - other)[is_finite].abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return float(difference.max()) if difference.numel() else 0.0


def share_flushed(exact: torch.Tensor, mixed: torch.Tensor) -> float:
    """Share of the numbers that are not zero in `exact` and are zero in `mixed`."""
    one, other = _pair(exact, mixed)
    nonzero = int((one != 0).sum())
    return int(((one != 0) & (other == 0)).sum()) / nonzero if nonzero else 0.0


def share_not_finite(exact: Sequence[torch.Tensor], mixed: Sequence[torch.Tensor]) -> float:
    """Share of the numbers that are finite in neither."""
    pairs = [_pair(*both) for both in zip(exact, mixed, strict=False) if are_alike(*both)]
    bad = sum(int((~torch.isfinite(one) & ~torch.isfinite(other)).sum()) for one, other in pairs)
    return bad / max(1, sum(one.numel() for one, _ in pairs))


def holds_all_of(exact: torch.Tensor, mixed: torch.Tensor) -> bool:
    """Whether a value that may be padded can be held against the other: data may have made it smaller."""
    is_as_large = all(one <= other for one, other in zip(exact.shape, mixed.shape, strict=False))
    return exact.dim() == mixed.dim() and is_as_large


def are_alike(exact: torch.Tensor, mixed: torch.Tensor) -> bool:
    """Whether two values that are not padded can be held against each other: data may have decided on their sizes."""
    return exact.shape == mixed.shape


def _pair(exact: torch.Tensor, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as float64, the mixed one without its padding; of two sparse ones what either stores."""
    if is_sparse(exact) and is_sparse(mixed):
        exact, mixed = side_by_side(exact, mixed.to(exact.device))
    part = tuple(slice(0, size) for size in exact.shape)
    return exact.double(), mixed[part].to(exact.device).double()
