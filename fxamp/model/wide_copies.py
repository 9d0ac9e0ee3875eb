"""What a forward that runs as it is written sees of weights that are stored low where it wants float32 ones: copies."""

import contextlib
import threading
from collections.abc import Iterator

import torch

from fxamp.runtime.masters import exact_values, set_master
from fxamp.runtime.writes import address_of


class WideCopies:
    """The copies of one forward, whose writes into them are taken into the weights."""

    def __init__(self) -> None:
        self._made: dict[torch.Tensor, list[tuple[torch.Tensor, int, int]]] = {}

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """A new copy in float32, for forward to read and write."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():  # whose tensors count no writes
                copy = weight.float()
        else:
            copy = weight.float()
        self._made.setdefault(weight, []).append((copy, copy._version, address_of(copy)))
        return copy

    def take_back(self, weight: torch.Tensor) -> None:
        """Let a weight have what was written into its copies; where they are as they were made it stays exact."""
        for number, (copy, version, address) in enumerate(made := self._made.get(weight, [])):
            if copy._version != version or address_of(copy) != address:
                written = copy.detach()
                as_shown = written == weight.detach().float()
                set_master(weight, torch.where(as_shown, exact_values(weight), written))
                made[number] = copy, copy._version, address_of(copy)

    def take_all_back(self) -> None:
        for weight in self._made:
            self.take_back(weight)


_innermost = threading.local()


@contextlib.contextmanager
def taking_back_writes() -> Iterator[None]:
    """Around a forward: at its end, and if it raises too, weights have what it wrote into their copies."""
    outer, copies = getattr(_innermost, "copies", None), WideCopies()
    _innermost.copies = copies
    try:
        yield
    finally:
        _innermost.copies = outer
        copies.take_all_back()


def take_back_writes(weight: torch.Tensor | None = None) -> None:
    """Before a weight is read, or all of them: let it have what the innermost forward has written into its copies."""
    copies: WideCopies | None = getattr(_innermost, "copies", None)
    if copies is not None:
        copies.take_all_back() if weight is None else copies.take_back(weight)


def wide_copy(weight: torch.Tensor) -> torch.Tensor:
    """A low weight in float32, as the innermost forward is to see it."""
    copies: WideCopies | None = getattr(_innermost, "copies", None)
    return weight.float() if copies is None else copies.of(weight)
