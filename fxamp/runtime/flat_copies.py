"""Copies of many tensors in a few pieces of memory, and the way back to them, decided on the device."""

import functools
from collections.abc import Iterator

import torch

from fxamp.runtime.copies import by_kind, copy_on, is_plain

CHUNK_BYTES = 64 * 2**20
"""Of one piece; while values are selected back there is one more."""

_flatten = torch._C._nn.flatten_dense_tensors
_unflatten = torch._C._nn.unflatten_dense_tensors


def can_be_flat(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers lie in their order; copied into others, they would take all of their piece a kernel
    for each tensor."""
    return is_plain(tensor) and tensor.is_contiguous()


class FlatCopies:
    """What tensors hold now.

    For each piece one kernel copies, and three select: the host pays a few microseconds a tensor for it all.

    Args:
        tensors: each `can_be_flat`.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._pieces = [(same, _copied(same)) for same in _pieces(tensors)]

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._values

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What one of them held."""
        return self._values[id(tensor)].clone()

    @functools.cached_property
    def _values(self) -> dict[int, torch.Tensor]:
        pairs = (pair for same, flat in self._pieces for pair in zip(same, _unflatten(flat, same), strict=True))
        return {id(tensor): value for tensor, value in pairs}

    def are_changed(self) -> bool:
        """Whether any of them holds something else now. Reads the device."""
        return not all(torch.equal(flat, _flatten(same)) for same, flat in self._pieces)

    def select_back(self, found_inf: torch.Tensor) -> None:
        """Give the tensors those values back, bit for bit, where `found_inf` is above 0. Once."""
        skipped: dict[torch.device, torch.Tensor] = {}
        with torch.no_grad():
            for same, flat in self._pieces:
                if flat.device not in skipped:
                    skipped[flat.device] = copy_on(flat.device, found_inf) > 0
                torch.where(skipped[flat.device], flat, _flatten(same), out=flat)
                torch._foreach_copy_(same, _unflatten(flat, same))
        self._pieces = []


def _copied(tensors: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
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
