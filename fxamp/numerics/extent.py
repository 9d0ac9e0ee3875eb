"""What a tensor holds, in a few numbers."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from fxamp.dtypes import dtype_name
from fxamp.errors import OptionError
from fxamp.sparse import held, is_sparse, parts_of


@dataclasses.dataclass(frozen=True)
class Extent:
    """What a value holds.

    Attributes:
        low, high: smallest and largest finite element; None where there is none.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    nans: int
    infs: int

    @property
    def is_finite(self) -> bool:
        return not (self.nans or self.infs)

    @property
    def is_mask(self) -> bool:
        """Zeros and infinities, as an additive mask has them; nothing but infinities is an overflow."""
        return bool(self.infs) and not self.nans and self.low == self.high == 0.0

    def __str__(self) -> str:
        kind = dtype_name(self.dtype)
        span = "nothing finite" if self.low is None else f"[{self.low:.4g}, {self.high:.4g}]"
        bad = [f"{count} {word}" for count, word in ((self.nans, "nan"), (self.infs, "inf")) if count]
        return f"{kind} {list(self.shape)} {span}" + (f", {' and '.join(bad)}" if bad else "")


def extent_of(tensor: torch.Tensor) -> Extent:
    """The extent of a floating tensor."""
    values = held(tensor)
    if values.numel():  # nearly every value is finite, and then this is all
        smallest, largest = map(float, values.aminmax())
        if math.isfinite(smallest) and math.isfinite(largest):
            return Extent(tensor.dtype, tuple(tensor.shape), smallest, largest, 0, 0)
    finite = torch.isfinite(values)
    kept = values[finite]
    nans = int(torch.isnan(values).sum())
    infs = values.numel() - int(finite.sum()) - nans
    low, high = (float(kept.min()), float(kept.max())) if kept.numel() else (None, None)
    return Extent(tensor.dtype, tuple(tensor.shape), low, high, nans, infs)


def check_finite(tensors: Iterable[torch.Tensor], what: str) -> None:
    """Refuse data whose ranges mean nothing; an additive mask may hold -inf.

    Raises:
        OptionError: a NaN, or a positive infinity; `what` names what holds it.
    """
    for tensor in tensors:
        values = held(tensor)
        if bool((values.isnan() | values.isposinf()).any()):
            raise OptionError(f"{what} NaN or infinite inputs ({extent_of(tensor)}): ranges of such data mean nothing.")


def check_not_empty(inputs: Any, what: str) -> None:
    """Refuse a call without a single sample: no error, no range and no finding of it means anything.

    An empty tensor beside others is none, such as a cache before its first call.

    Raises:
        OptionError: every tensor among the inputs that has dimensions is empty; `what` says what they are.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if tensors and not any(tensor.numel() for tensor in tensors):
        raise OptionError(
            f"{what} empty (tensor of shape {list(tensors[0].shape)}): nothing can be measured on it. Give at least "
            "one sample."
        )


def numbers_in(value: Any) -> list[torch.Tensor]:
    """The floating tensors inside a value, and complex ones as pairs of floating numbers."""
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            found.append(leaf)
        elif isinstance(leaf, torch.Tensor) and leaf.is_complex() and not is_sparse(leaf):
            found.append(torch.view_as_real(leaf.detach().resolve_conj()))
    return found


def storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    """What tells whose memory it is; an address would not: the next value may get a freed one's."""
    return StorageWeakRef(parts_of(tensor.detach())[-1].untyped_storage())  # type: ignore[no-untyped-call]


def extent_of_all(tensors: list[torch.Tensor]) -> Extent:
    extents = [extent_of(tensor) for tensor in tensors]
    return next((found for found in extents if not found.is_finite), extents[0])


def joined(extents: Iterable[Extent]) -> Extent:
    """What a value holds in several runs of its graph; dtype and shape of the first."""
    first, *others = extents
    lows = [found.low for found in (first, *others) if found.low is not None]
    highs = [found.high for found in (first, *others) if found.high is not None]
    nans, infs = (max(getattr(found, kind) for found in (first, *others)) for kind in ("nans", "infs"))
    return dataclasses.replace(first, low=min(lows, default=None), high=max(highs, default=None), nans=nans, infs=infs)
