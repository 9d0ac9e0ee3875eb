"""Environment variables that forward reads: a graph holds for what they were."""

import contextlib
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from fxamp.capture.locations import is_library_frame
from fxamp.capture.objects import MISSING

VARIABLES: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
"""What `os.environ` keeps, which gives the same object at each look."""


@contextlib.contextmanager
def environment_reads(keep: Callable[[Any, Any, Any], None], is_paused: Callable[[], bool]) -> Iterator[None]:
    """Take note of the variables that the model asks for in this thread, also of those that there are not.

    (`get`, `in` and `os.getenv` come to the same method. What torch asks for is no part of the model.)

    Args:
        keep: takes an owner, a name and what it holds.
    """
    kind, thread = type(os.environ), threading.get_ident()
    original: Any = kind.__getitem__

    def getitem(environ: Any, name: Any) -> Any:
        if threading.get_ident() == thread and not is_paused() and _is_asked_by_the_model(sys._getframe(1)):
            key = environ.encodekey(name)
            keep(VARIABLES, key, VARIABLES.get(key, MISSING))
        return original(environ, name)

    try:
        kind.__getitem__ = getitem  # type: ignore[method-assign]
        yield
    finally:
        kind.__getitem__ = original  # type: ignore[method-assign]


def title_of(key: Any) -> str:
    """How a message names one of them."""
    return f"the environment variable {os.fsdecode(key)!r}"


def _is_asked_by_the_model(frame: types.FrameType | None) -> bool:
    while frame is not None and frame.f_globals.get("__name__") in ("os", "_collections_abc", "collections.abc"):
        frame = frame.f_back
    return frame is not None and not is_library_frame(frame)
