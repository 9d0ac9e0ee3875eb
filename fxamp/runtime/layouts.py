"""Memory for copies of many tensors: its bytes come and go, its views stay."""

import operator
import sys
from collections.abc import Iterator
from typing import Any

import torch

CHUNK_BYTES = 64 * 2**20
"""Of one piece, where an eighth of all is less."""
KEPT_VIEWS = 100_000
"""Of one optimizer, about half a kilobyte each; with more it begins anew."""

ALIGNMENT = 64
"""Bytes, of where a copy begins: kernels read four numbers at a time where they may."""

_SHAPE = operator.attrgetter("shape")


class Piece:
    """Memory for copies of tensors of one device, dtype and list of shapes.

    Args:
        like: the tensors.
        part: where they are in the list of all.
        dtype: of the copies.
        stays: memory is there from `fill` to `free`, and views of it always. A graph that is recorded would not see
            it come; then both live as long as the object.

    Attributes:
        flat, views: of all copies, and of each.
        is_filled: it holds numbers that somebody wants.
        is_left: somebody has kept a view that was lent to him, and with it the memory.
    """

    def __init__(self, like: list[torch.Tensor], part: slice, dtype: torch.dtype, stays: bool) -> None:
        self.part = part
        starts, size = _starts(like, ALIGNMENT // dtype.itemsize)
        self.flat = torch.empty(size, dtype=dtype, device=like[0].device)
        places = zip(starts, like, strict=True)
        self.views = [self.flat[start : start + tensor.numel()].view(tensor.shape) for start, tensor in places]
        self._storage = self.flat.untyped_storage()
        self._bytes = self._storage.nbytes()
        self._stays = stays
        self.is_left = False
        self._counts = self._references()
        self.free()

    def fill(self, tensors: list[torch.Tensor]) -> None:
        """Copy the tensors here, by one multi-tensor copy."""
        if self._stays:
            self._storage.resize_(self._bytes)
        self.is_filled = True
        torch._foreach_copy_(self.views, tensors)

    def free(self) -> None:
        """Give the bytes back; where somebody else holds a view by now, leave all to him."""
        self.is_filled = False
        if not self._stays:
            return
        self.is_left = self._references() != self._counts
        if self.is_left:
            self.views, self.flat = [], self.flat.new_empty(0)
        else:
            self._storage.resize_(0)

    def _references(self) -> list[int]:
        """How many there are to the memory, and to each view."""
        return [torch._C._storage_Use_Count(self._storage._cdata), *map(sys.getrefcount, self.views)]


class Layouts:
    """Where copies of an optimizer's tensors lie. Making a view costs the host more than filling it: they are kept.

    Args:
        stay: of pieces; else each call of `of` makes its own.
    """

    def __init__(self, stay: bool = True) -> None:
        self.stay = stay
        self._of: dict[Any, list[Piece]] = {}

    def __reduce__(self) -> Any:
        return Layouts, ()  # of an optimizer that is copied: its own

    def of(self, role: str, tensors: list[torch.Tensor], dtype: torch.dtype) -> list[Piece]:
        """Pieces for tensors of one device and dtype; new ones where those are filled, as by a step around this one."""
        if not self.stay:
            return [Piece(tensors[part], part, dtype, stays=False) for part in _parts(tensors)]
        key = (role, tensors[0].device, dtype, *map(_SHAPE, tensors))
        pieces = self._of.get(key)
        if pieces is None or any(piece.is_left for piece in pieces):
            if sum(len(piece.views) for kept in self._of.values() for piece in kept) > KEPT_VIEWS:
                self._of.clear()
            pieces = [Piece(tensors[part], part, dtype, stays=True) for part in _parts(tensors)]
            self._of[key] = pieces
        return Layouts(stay=False).of(role, tensors, dtype) if any(piece.is_filled for piece in pieces) else pieces

    @property
    def held_bytes(self) -> int:
        """Of memory, now."""
        return sum(piece.flat.untyped_storage().nbytes() for kept in self._of.values() for piece in kept)


def _starts(tensors: list[torch.Tensor], step: int) -> tuple[list[int], int]:
    """Where each begins, at multiples of `step` numbers, and how many numbers there are in all."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() // step) * step
    return starts, end


def _parts(tensors: list[torch.Tensor]) -> Iterator[slice]:
    """Runs of tensors that a piece holds."""
    limit = max(CHUNK_BYTES, sum(tensor.nbytes for tensor in tensors) // 8)
    start, filled = 0, 0
    for place, tensor in enumerate(tensors):
        if place > start and filled + tensor.nbytes > limit:
            yield slice(start, place)
            start, filled = place, 0
        filled += tensor.nbytes
    yield slice(start, len(tensors))
