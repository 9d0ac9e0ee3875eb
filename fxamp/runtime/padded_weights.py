"""Weights with room behind their elements, as GEMMs of padded sizes read them.

A weight grows by zeros (or another number) at the end of its dimensions. A dimension that is made of blocks, such as
the four gates of an LSTM, grows behind each block:

    grown(weight, ((4, 1), (1, 0)))     # 4 * 1023 x 512 -> 4 * 1024 x 512
"""

import math
from collections.abc import MutableMapping, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

Dims = tuple[tuple[int, int], ...]
"""For each dimension: blocks it is made of, and elements that are added behind each of them."""
Growth = tuple[Dims, float]
"""How a weight grows, and the number that fills the new elements."""


def grown(value: torch.Tensor, dims: Dims, fill: float = 0.0) -> torch.Tensor:
    """The value with room behind its blocks; gradients are those of its own elements.

    Args:
        value: of any shape; a size is a multiple of the dimension's blocks.
        dims: one pair for each dimension.
    """
    amounts = [
        amount for blocks, extra in reversed(dims) for amount in ((0, extra) if blocks == 1 else (0, extra, 0, 0))
    ]
    padded = functional.pad(value.reshape(_blocked(value.shape, dims)), amounts, value=fill)
    return padded.reshape(grown_shape(value.shape, dims))


def own_part(padded: torch.Tensor, shape: Sequence[int], dims: Dims) -> torch.Tensor:
    """The part of a grown value that is the weight's own, block by block: a view.

    Args:
        shape: of the weight.

    Returns:
        Of the weight's shape where no dimension has blocks; else each such dimension is two.
    """
    sizes = _blocked(shape, dims)
    part = padded if len(sizes) == padded.dim() else padded.view(_blocked(padded.shape, dims))
    for dim, size in enumerate(sizes):
        if part.size(dim) != size:
            part = part.narrow(dim, 0, size)
    return part


def cut(padded: torch.Tensor, dims: Dims) -> torch.Tensor:
    """What `grown` was made of, dense; gradients come back with zeros behind each block."""
    shape = [size - blocks * extra for size, (blocks, extra) in zip(padded.shape, dims, strict=True)]
    return own_part(padded, shape, dims).reshape(shape)


def grown_shape(shape: Sequence[int], dims: Dims) -> tuple[int, ...]:
    """The sizes of a weight of `shape` when it has grown."""
    return tuple(size + blocks * extra for size, (blocks, extra) in zip(shape, dims, strict=True))


def copy_grown(
    weight: torch.Tensor, growth: Growth, dtype: torch.dtype, place: torch.Tensor | None = None
) -> torch.Tensor:
    """A fresh grown copy in `dtype`, laid out as the weight is: a copy that converts, and a fill of each border.

    Args:
        place: memory for it, of its sizes.
    """
    dims, fill = growth
    copy = empty_grown(weight, dims, dtype) if place is None else place
    sizes = _blocked(weight.shape, dims)
    part = copy if len(sizes) == copy.dim() else copy.view(_blocked(copy.shape, dims))
    for dim, size in enumerate(sizes):
        if part.size(dim) != size:
            part.narrow(dim, size, part.size(dim) - size).fill_(fill)
            part = part.narrow(dim, 0, size)
    part.copy_(weight.reshape(sizes))
    return copy


def empty_grown(weight: torch.Tensor, dims: Dims, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a grown copy, with the weight's order of strides."""
    shape = grown_shape(weight.shape, dims)
    if weight.is_contiguous():
        return weight.new_empty(shape, dtype=dtype)
    order = sorted(range(weight.dim()), key=weight.stride, reverse=True)
    return torch.empty_permuted(shape, order, dtype=dtype, device=weight.device)


def adds_rows(dims: Dims) -> bool:
    """Whether a weight grows behind its last row alone."""
    return dims[0][0] == 1 and not any(extra for _, extra in dims[1:])


def grows_in_rows(weight: torch.Tensor, dims: Dims) -> bool:
    """Whether only rows are added, and the weight's own part of them is as dense as the weight is."""
    if not adds_rows(dims):
        return False
    layout = _CHANNELS_LAST.get(weight.dim(), torch.contiguous_format)
    return weight.is_contiguous() or weight.is_contiguous(memory_format=layout)


# Weights with room for more rows behind their own, and the memory that has it. Whoever gives a weight other memory
# (`.data = `, `.to(device)`) takes the room from it; a weak reference keeps that memory's identity from being reused.
_rooms: MutableMapping[torch.Tensor, tuple[StorageWeakRef, int]] = WeakIdKeyDictionary()


def make_room(weight: torch.Tensor, multiple: int) -> None:
    """Move a dense weight into memory with rows of zeros behind its own, up to a multiple of rows.

    It stays as it was for whoever reads or writes it; `in_room` finds the rows behind it.
    """
    values = with_room(weight.detach(), multiple)
    if values is not None:
        weight.data = values
        note_room(weight, multiple)


def with_room(values: torch.Tensor, multiple: int) -> torch.Tensor | None:
    """A copy that has rows of zeros behind it in memory; None where none are needed, or rows are not dense."""
    rows = values.size(0) if values.dim() and values.numel() else 0
    dims = ((1, -rows % multiple), *((1, 0),) * (values.dim() - 1))
    if not -rows % multiple or not grows_in_rows(values, dims):
        return None
    whole = empty_grown(values, dims, values.dtype).zero_()
    return whole[:rows].copy_(values)


def note_room(weight: torch.Tensor, multiple: int) -> None:
    """Remember that the memory of a weight came from `with_room`."""
    _rooms[weight] = StorageWeakRef(weight.untyped_storage()), multiple  # type: ignore[no-untyped-call]


def renew_room(weight: torch.Tensor, moved: torch.Tensor) -> None:
    """Give a weight that was moved to other memory, or what was put in its place, the room that it had."""
    if weight in _rooms:
        make_room(moved, _rooms[weight][1])


def in_room(weight: torch.Tensor, growth: Growth) -> torch.Tensor | None:
    """A weight with the rows of zeros that its memory has behind it, a view; None where it has none."""
    dims, fill = growth
    room = _rooms.get(weight)
    if room is None or fill or not grows_in_rows(weight, dims):
        return None
    shape, storage = grown_shape(weight.shape, dims), weight.untyped_storage()
    is_its_own = storage._cdata == room[0].cdata and weight.storage_offset() == 0
    nbytes = math.prod(shape) * weight.element_size()
    return weight.as_strided(shape, weight.stride()) if is_its_own and storage.nbytes() >= nbytes else None


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _blocked(shape: Sequence[int], dims: Dims) -> list[int]:
    """The sizes with each dimension of several blocks as two."""
    found: list[int] = []
    for size, (blocks, _) in zip(shape, dims, strict=True):
        found += [size] if blocks == 1 else [blocks, size // blocks]
    return found
