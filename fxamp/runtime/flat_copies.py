"""Copies of many tensors in a few pieces of memory, and the way back to them, decided on the device."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch

from fxamp.runtime import distributed
from fxamp.runtime.copies import Skipped, by_kind, own_copies, select_
from fxamp.runtime.writes import versions_of

CHUNK_BYTES = 64 * 2**20
"""Of one piece, where an eighth of all is less; while values are selected back there is one more."""
KEPT_LAYOUTS = 64
"""Of one optimizer: sets of shapes, each of the tensors of a device and dtype that one step changes."""

_flatten = torch._C._nn.flatten_dense_tensors
_unflatten = torch._C._nn.unflatten_dense_tensors
_SHAPE, _LAYOUT = map(operator.attrgetter, ("shape", "layout"))


class _Piece:
    """Memory for tensors of one device, dtype and list of shapes.

    Args:
        stays: its bytes come and go, and its views stay. A graph that is recorded would not see them come.

    Attributes:
        is_filled: it holds numbers that somebody wants.
    """

    def __init__(self, like: list[torch.Tensor], stays: bool) -> None:
        self.flat = torch.empty(sum(tensor.numel() for tensor in like), dtype=like[0].dtype, device=like[0].device)
        self.views: list[torch.Tensor] = list(_unflatten(self.flat, like))
        self._storage = self.flat.untyped_storage()
        self._bytes = self._storage.nbytes()
        self._stays = stays
        self.free()

    def fill(self, tensors: list[torch.Tensor]) -> None:
        if self._stays:
            self._storage.resize_(self._bytes)
        self.is_filled = True
        torch._foreach_copy_(self.views, tensors)

    def free(self) -> None:
        self.is_filled = False
        if self._stays:
            self._storage.resize_(0)


@dataclasses.dataclass
class _Pair:
    """Where some of the tensors of a kind are copied to: what they held, and, for a moment, what they hold."""

    part: slice
    before: _Piece
    now: _Piece | None


class Layouts:
    """Where copies of an optimizer's tensors lie. Making a view costs the host more than filling it: they are kept."""

    def __init__(self, stay: bool = True) -> None:
        self._stay = stay
        self._of: dict[Any, list[_Pair]] = {}

    def __reduce__(self) -> Any:
        return Layouts, ()  # of an optimizer that is copied: its own

    def of(self, tensors: list[torch.Tensor]) -> list[_Pair]:
        """For tensors of one device and dtype; others' where a step inside of a step has filled its own."""
        key = (tensors[0].device, tensors[0].dtype, *map(_SHAPE, tensors))
        if key not in self._of:
            if len(self._of) >= KEPT_LAYOUTS:
                self._of.clear()
            self._of[key] = [self._pair(tensors[part], part) for part in _parts(tensors)]
        pairs = self._of[key]
        return Layouts(stay=False).of(tensors) if any(pair.before.is_filled for pair in pairs) else pairs

    def _pair(self, tensors: list[torch.Tensor], part: slice) -> _Pair:
        return _Pair(part, _Piece(tensors, self._stay), _Piece(tensors, True) if self._stay else None)


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
        self._pairs: list[tuple[_Pair, list[torch.Tensor]]] = []
        for _, places in by_kind(flat):
            same = [flat[place] for place in places]
            self._pairs.extend((pair, same[pair.part]) for pair in layouts.of(same))
        try:
            for pair, same in self._pairs:
                pair.before.fill(same)
            self._others = list(zip(others, own_copies(others), strict=True))
        except BaseException:  # out of memory, which the user may catch
            self.drop()
            raise

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What one of them held."""
        return self._values[id(tensor)].clone()

    @functools.cached_property
    def _values(self) -> dict[int, torch.Tensor]:
        pairs = (each for pair, same in self._pairs for each in zip(same, pair.before.views, strict=True))
        return {id(tensor): value for tensor, value in (*pairs, *self._others)}

    @torch.no_grad()
    def select_back(self, skipped: Skipped) -> None:
        """Give the tensors those values back, bit for bit, where the step is skipped. Once."""
        for pair, same in self._pairs:
            before, now = pair.before, pair.now or _Piece(same, stays=False)
            now.fill(same)
            torch.where(skipped.on(now.flat.device), before.flat, now.flat, out=now.flat)
            torch._foreach_copy_(same, now.views)
            now.free()
            before.free()
        select_(self._others, skipped)
        self.drop()

    def drop(self) -> None:
        """Forget the values, and give their memory back."""
        for pair, _ in self._pairs:
            pair.before.free()
        self._pairs, self._others = [], []


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
    if set(map(type, tensors)) <= distributed.PLAIN and set(map(_LAYOUT, tensors)) <= {torch.strided}:
        lie = [tensor.is_contiguous() for tensor in tensors]
        if all(lie):
            return tensors, []
    else:
        lie = [type(t) in distributed.PLAIN and t.layout is torch.strided and t.is_contiguous() for t in tensors]
    return list(itertools.compress(tensors, lie)), list(itertools.compress(tensors, map(operator.not_, lie)))


def _copied(tensors: list[torch.Tensor]) -> torch.Tensor:
    flat: torch.Tensor = _flatten(tensors)
    return flat.clone() if len(tensors) == 1 else flat  # of one it is a view


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
