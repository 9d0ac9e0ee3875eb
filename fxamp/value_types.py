"""Types of what nodes give: of a tensor its dtype and sizes, of several values theirs."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class TensorType:
    """Type of one tensor value.

    Attributes:
        dtype: None when it is not known before real inputs are seen.
        shape: sizes, None when not known.
        requires_grad: whether backward passes through the value.
        stays: whether a float32 value is float32 where its op runs low, too: a kernel's sums, beside its result.
        is_sparse: whether it stores some of its numbers alone.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...] | None = None
    requires_grad: bool = False
    stays: bool = False
    is_sparse: bool = False

    @property
    def nbytes(self) -> int | None:
        """Bytes of the dense value, None when shape or dtype is not known; 0 for a sparse one, which may be any."""
        if self.is_sparse:
            return 0
        if self.shape is None or self.dtype is None:
            return None
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize


# A node's value: one tensor, a (nested) tuple of values, or something that is no tensor (size, bool, None...).
ValueType = TensorType | tuple[Any, ...] | None


def tensors_in(value: ValueType) -> Iterator[TensorType]:
    """The tensor types inside a value type."""
    if isinstance(value, TensorType):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_in(part)


def map_type(function: Callable[[TensorType], TensorType], value: ValueType) -> ValueType:
    """Apply `function` to every tensor type inside a value type."""
    if isinstance(value, TensorType):
        return function(value)
    if isinstance(value, tuple):
        return tuple(map_type(function, part) for part in value)
    return None


def converted(value: ValueType, dtype: torch.dtype) -> ValueType:
    """The value type with all its tensors in `dtype`."""
    return map_type(lambda found: dataclasses.replace(found, dtype=dtype), value)


def with_dtype(value: ValueType, dtype: torch.dtype) -> ValueType:
    """The value type of an op that runs in `dtype`: with its float32 tensors in it, but for those that stay float32."""

    def moved(found: TensorType) -> TensorType:
        is_moved = found.dtype == torch.float32 and not found.stays
        return dataclasses.replace(found, dtype=dtype) if is_moved else found

    return map_type(moved, value)
