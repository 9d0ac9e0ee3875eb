"""Copies of many tensors in a few pieces of memory, and the way back to them, decided on the device."""

import functools
import itertools
import operator

import torch

from fxamp.runtime import distributed
from fxamp.runtime.copies import Skipped, by_kind, own_copies, select_, wide_copies
from fxamp.runtime.layouts import Layouts, Piece
from fxamp.runtime.writes import versions_of

_flatten = torch._C._nn.flatten_dense_tensors
_unflatten = torch._C._nn.unflatten_dense_tensors
_LAYOUT = operator.attrgetter("layout")


class FlatCopies:
    """What tensors hold now, until it is selected back or dropped.

    Those whose numbers lie in their order are copied in pieces, by a few kernels for each; the host pays about two
    microseconds a tensor for it all. Any other (with strides, sparse, of a class of its own) takes a kernel for itself:
    in a piece, all that is in it would.
    """

    @torch.no_grad()
    def __init__(self, tensors: list[torch.Tensor], layouts: Layouts | None = None) -> None:
        layouts = layouts or Layouts(stay=False)
        flat, others = _divided(tensors)
        self._copied: list[tuple[Piece, Piece | None, list[torch.Tensor]]] = []  # (before, now, tensors)
        for _, places in by_kind(flat):
            same = [flat[place] for place in places]
            before = layouts.of("before", same, same[0].dtype)
            now = layouts.of("now", same, same[0].dtype) if layouts.stay else [None] * len(before)
            self._copied.extend((one, other, same[one.part]) for one, other in zip(before, now, strict=True))
        try:
            for piece, _, same in self._copied:
                piece.fill(same)
            self._others = list(zip(others, own_copies(others), strict=True))
        except BaseException:  # out of memory, which the user may catch
            self.drop()
            raise

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What one of them held."""
        return self._values[id(tensor)].clone()

    @functools.cached_property
    def _values(self) -> dict[int, torch.Tensor]:
        flat = (each for piece, _, same in self._copied for each in zip(same, piece.views, strict=True))
        return {id(tensor): value for tensor, value in (*flat, *self._others)}

    @torch.no_grad()
    def select_back(self, skipped: Skipped) -> None:
        """Give the tensors those values back, bit for bit, where the step is skipped. Once."""
        self._forget_values()
        for before, kept, same in self._copied:
            now = kept or Piece(same, before.part, before.flat.dtype, stays=False)
            now.fill(same)
            torch.where(skipped.on(now.flat.device), before.flat, now.flat, out=now.flat)
            torch._foreach_copy_(same, now.views)
            now.free()
            before.free()
        select_(self._others, skipped)
        self.drop()

    def drop(self) -> None:
        """Forget the values, and give their memory back."""
        self._forget_values()
        for before, _, _ in self._copied:
            before.free()
        self._copied, self._others = [], []

    def _forget_values(self) -> None:
        vars(self).pop("_values", None)  # views: who holds one keeps its memory


class WideCopies:
    """float32 copies that are wanted for a while.

    Args:
        layouts: where they lie; each has memory of its own if None.
    """

    def __init__(self, layouts: Layouts | None) -> None:
        self._layouts = layouts
        self._pieces: list[Piece] = []

    def of(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of dense tensors, as `copies.wide_copies`."""
        if self._layouts is None or not tensors:
            return wide_copies(tensors)
        lie = _lie(tensors)
        if all(lie):
            return self._flat(tensors, self._layouts)
        flat, others = _divided(tensors)
        near, far = iter(self._flat(flat, self._layouts)), iter(wide_copies(others))
        return [next(near if is_flat else far) for is_flat in lie]

    def _flat(self, tensors: list[torch.Tensor], layouts: Layouts) -> list[torch.Tensor]:
        copies: dict[int, torch.Tensor] = {}
        for _, places in by_kind(tensors):
            same = [tensors[place] for place in places]
            for piece in layouts.of("wide", same, torch.float32):
                self._pieces.append(piece)
                piece.fill(same[piece.part])
                copies.update(zip(places[piece.part], piece.views, strict=True))
        return [copies[place] for place in range(len(tensors))]

    def drop(self) -> None:
        """Nobody wants them any more."""
        for piece in self._pieces:
            piece.free()
        self._pieces = []


class HostCopies:
    """What tensors in host memory hold now, to be put back later by the host."""

    @torch.no_grad()
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._versions = versions_of(tensors)
        flat, self._strided = _divided(tensors)
        self._flat = [[flat[place] for place in places] for _, places in by_kind(flat)]
        self._pieces = [_copied(same) for same in self._flat]
        self._others = own_copies(self._strided)

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What one of them held."""
        return self._values[id(tensor)].clone()

    @functools.cached_property
    def _values(self) -> dict[int, torch.Tensor]:
        flat = zip(
            itertools.chain(*self._flat), itertools.chain(*map(_unflatten, self._pieces, self._flat)), strict=True
        )
        return {id(tensor): value for tensor, value in (*flat, *zip(self._strided, self._others, strict=True))}

    def are_changed(self) -> bool:
        """Whether any of them holds something else now, or was written."""
        if self._versions != versions_of(self._tensors):
            return True
        pairs = itertools.chain(
            zip(map(_flatten, self._flat), self._pieces, strict=True), zip(self._strided, self._others, strict=True)
        )
        return not all(torch.equal(now, before) for now, before in pairs)


def _divided(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Those whose numbers lie in their order, and the others."""
    lie = _lie(tensors)
    if all(lie):
        return tensors, []
    return list(itertools.compress(tensors, lie)), list(itertools.compress(tensors, map(operator.not_, lie)))


def _lie(tensors: list[torch.Tensor]) -> list[bool]:
    """Of each whether its numbers lie in their order; asked of all at once, it costs little."""
    if set(map(type, tensors)) <= distributed.PLAIN and set(map(_LAYOUT, tensors)) <= {torch.strided}:
        return [tensor.is_contiguous() for tensor in tensors]
    return [type(t) in distributed.PLAIN and t.layout is torch.strided and t.is_contiguous() for t in tensors]


def _copied(tensors: list[torch.Tensor]) -> torch.Tensor:
    flat: torch.Tensor = _flatten(tensors)
    return flat.clone() if len(tensors) == 1 else flat  # of one it is a view
