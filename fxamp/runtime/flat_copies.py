"""Copies of many tensors in a few pieces of memory, and the way back to them, decided on the device."""

import functools
import itertools
from collections.abc import Iterator

import torch

from fxamp.runtime.copies import Skipped, by_kind, is_plain, own_copies, select_

CHUNK_BYTES = 64 * 2**20
"""Of one piece; while values are selected back there is one more."""

_flatten = torch._C._nn.flatten_dense_tensors
_unflatten = torch._C._nn.unflatten_dense_tensors


class FlatCopies:
    """What tensors hold now.

    Those whose numbers lie in their order are copied in pieces: for each piece one kernel copies, and three select; the
    host pays a few microseconds a tensor for it all. Any other (with strides, sparse, of a class of its own) takes a
    kernel for itself: in a piece, all that is in it would.
    """

    @torch.no_grad()
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._pieces = [(same, _copied(same)) for same in _pieces([each for each in tensors if _can_be_flat(each)])]
        others = [each for each in tensors if not _can_be_flat(each)]
        self._others = list(zip(others, own_copies(others), strict=True))

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What one of them held."""
        return self._values[id(tensor)].clone()

    @functools.cached_property
    def _values(self) -> dict[int, torch.Tensor]:
        pairs = (pair for same, flat in self._pieces for pair in zip(same, _unflatten(flat, same), strict=True))
        return {id(tensor): value for tensor, value in (*pairs, *self._others)}

    def are_changed(self) -> bool:
        """Whether any of them holds something else now. Reads the device."""
        pairs = itertools.chain(((_flatten(same), flat) for same, flat in self._pieces), self._others)
        return not all(torch.equal(now, before) for now, before in pairs)

    @torch.no_grad()
    def select_back(self, skipped: Skipped) -> None:
        """Give the tensors those values back, bit for bit, where the step is skipped. Once."""
        for same, flat in self._pieces:
            torch.where(skipped.on(flat.device), flat, _flatten(same), out=flat)
            torch._foreach_copy_(same, _unflatten(flat, same))
        select_(self._others, skipped)
        self._pieces, self._others = [], []


def _can_be_flat(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and tensor.is_contiguous()


def _copied(tensors: list[torch.Tensor]) -> torch.Tensor:
    flat: torch.Tensor = _flatten(tensors)
    return flat.clone() if len(tensors) == 1 else flat  # of one it is a view


def _pieces(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    for _, places in by_kind(tensors):
        piece: list[torch.Tensor] = []
        filled = 0
        for tensor in (tensors[place] for place in places):
            if piece and filled + tensor.nbytes > CHUNK_BYTES:
                yield piece
                piece, filled = [], 0
            piece.append(tensor)
            filled += tensor.nbytes
        yield piece
