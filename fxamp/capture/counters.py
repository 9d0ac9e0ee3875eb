"""Numbers that forward sets in attributes: `self.steps += 1`, `self.width = 7`, `self.started = time.time()`."""

from typing import Any

from fxamp.capture.captured import Captured
from fxamp.capture.elements import SCALARS
from fxamp.capture.held_tensors import places_read_anew
from fxamp.capture.kept_items import Kept
from fxamp.capture.places import Place
from fxamp.capture.traces import Attribute
from fxamp.errors import CaptureError


def sets_numbers(captured: Captured) -> bool:
    """Whether forward sets attributes to numbers or strings that are constants of the graph."""
    return any(type(each) in (int, float, complex, str) for values in _constants(captured).values() for each in values)


def numbers_before(captured: Captured) -> frozenset[Place]:
    """Of the attributes that forward sets, those that hold a number before."""
    found = []
    for attribute, _ in captured.places_set:
        before = vars(captured.root.get_submodule(attribute.path)).get(attribute.name)
        if type(before) in (int, float):
            found.append((attribute.path, attribute.name))
    return frozenset(found)


def held_before(captured: Captured) -> frozenset[Place]:
    """Of the attributes that forward reads and sets, those that are containers of tensors before (`self.hidden`)."""
    read = {(cell.path, cell.name) for cell in captured.state if not cell.kind and cell.path is not None}
    set_ = {(place.path, place.name) for place, _ in captured.places_set if isinstance(place, Attribute)}
    return frozenset(places_read_anew(captured.root, {place for place in set_ if place in read}))


def check_repeatable(first: Captured, again: Captured) -> None:
    """Check that what a graph sets is what forward would set at each call.

    Args:
        again: the same, captured once more.

    Raises:
        CaptureError: an attribute is set to another constant.
    """
    others = _constants(again)
    for attribute, values in _constants(first).items():
        for before, after in zip(values, others.get(attribute, ()), strict=False):
            if isinstance(before, SCALARS) and before != after:
                raise CaptureError(
                    f"forward sets attribute {attribute.title!r} to {before!r}, and to {after!r} when it is traced "
                    "again: it hangs on something outside of the model, which a graph would not ask again."
                )


def _constants(captured: Captured) -> dict[Kept, list[Any]]:
    """What is the same at each call in what forward sets."""
    return {place: list(part.constants()) for place, part in captured.places_set}
