"""Python state that changes between calls, and what it does to the graphs that were made with it."""

import collections
import logging
from typing import Any

import torch
from torch import nn

from fxamp.capture.held_tensors import make_of, tensors_held
from fxamp.capture.places import Place
from fxamp.capture.state import Cell
from fxamp.errors import CaptureError
from fxamp.model.variant import Variant

log = logging.getLogger("fxamp")


class Changes:
    """Sees that a model whose Python state changes is not captured for each value of it.

    Attributes:
        live: numbers that have changed, or that forward counts, and containers whose tensors are others: read at each
            call.
        is_given_up: whether graphs were, because forward sets or reads what is another thing at each call.
    """

    # Graphs that differ in Python state alone, and changes of one piece of it that pass without a word.
    most = 4
    # Changes from outside of forward after which there is another way: a capture takes as long as many steps.
    most_from_outside = 16

    def __init__(self) -> None:
        self.live: frozenset[Place] = frozenset()
        self.is_given_up = False
        self._set_in_forward: set[str] = set()
        self._counts: collections.Counter[str] = collections.Counter()
        self._warned: set[str] = set()

    def note(self, variant: Variant) -> None:
        """Take note of what a new graph reads at each call, and sets."""
        self.live |= variant.captured.live
        self._set_in_forward |= variant.captured.attributes_set

    def follow(self, module: nn.Module, stale: list[Variant], known: list[Variant], falls_back: bool) -> None:
        """See that the next graph lasts longer than those whose state is not the model's any more.

        A number becomes a value that is read at each call, and so do the tensors of a container. A few graphs are kept
        for other state, which may come back; the oldest makes room.

        Args:
            stale: graphs for such a call, made with other state.
            known: all for such a call; those of no more use are removed.
            falls_back: whether there is another way than capture.

        Raises:
            CaptureError: the model, or somebody, changes again and again what it decides on.
        """
        for variant in stale[-1:]:  # the newest graph tells what has changed since
            changed = variant.changed_state(module)
            places = {(cell.path or "", cell.name) for cell in changed if _can_be_read_anew(cell, module)} - self.live
            if places and len(places) == len(changed):
                known.remove(variant)  # the next graph is for every value
            self.live |= places
            self._counts.update(cell.title for cell in changed if (cell.path or "", cell.name) not in places)
        name = type(module).__qualname__
        for title in [title for title, count in self._counts.items() if count > self.most]:
            if falls_back and (title in self._set_in_forward or self._counts[title] > self.most_from_outside):
                known[:] = [each for each in known if all(each is not other for other in stale)]  # none holds again
                self.is_given_up = True
                what = f"sets {title}" if title in self._set_in_forward else f"reads {title}, which changes,"
                raise CaptureError(
                    f"forward of {name} {what} and decides on it in Python, so that it would be captured again and "
                    "again. Keep it in a buffer, or pass it as an argument."
                )
            if title not in self._warned:
                self._warned.add(title)
                log.warning(
                    "%s of %s has changed %d times between calls, and each time the model is captured again. Pass "
                    "it to forward as an argument, or keep it in a buffer.",
                    title,
                    name,
                    self._counts[title],
                )
        if len(stale) > self.most:
            known.remove(next(variant for variant in stale if variant in known))


def _can_be_read_anew(cell: Cell, module: nn.Module) -> bool:
    """Whether the next graph can be for what an attribute of a module holds, whatever that is."""
    if cell.path is None or cell.kind or not _holds_tensors(cell.frozen):
        return cell.is_number
    try:
        now = cell.holder(module).get(cell.name)
    except AttributeError:  # the module is gone
        return False
    return make_of(now) is not None and bool(tensors_held(now))


def _holds_tensors(stand_in: tuple[Any, ...]) -> bool:
    """Whether what a stand-in is for is a container with tensors in it."""
    parts = (part for part in stand_in[1:] if isinstance(part, tuple) and len(part) == 2 and isinstance(part[1], tuple))
    return any(part[0] is torch.Tensor or _holds_tensors(part) for _, part in parts)
