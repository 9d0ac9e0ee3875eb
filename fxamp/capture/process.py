"""What forward does with its process: environment variables that it reads or sets, and files that it opens.

A graph holds for what the variables were.
"""

import builtins
import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from fxamp.capture.locations import is_installed, is_library_frame, user_line
from fxamp.capture.objects import MISSING
from fxamp.capture.refusals import for_python
from fxamp.errors import CaptureError
from fxamp.patched import patched

VARIABLES: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
"""What `os.environ` keeps, which gives the same object at each look."""


@contextlib.contextmanager
def process_noted(keep: Callable[[Any, Any, Any], None], is_paused: Callable[[], bool]) -> Iterator[None]:
    """Take note of the variables that the model asks for in this thread, also of those that there are not; it may set
    none, and open no file.

    (`get`, `in` and `os.getenv` come to the same method. What torch asks for is no part of the model.)

    Args:
        keep: takes an owner, a name and what it holds.
    """
    kind = type(os.environ)
    read, write, delete = [getattr(kind, name) for name in _NAMES]
    plain_open = builtins.open

    def is_asked() -> bool:
        return not is_paused() and _is_asked_by_the_model(sys._getframe(2))

    def getitem(environ: Any, name: Any) -> Any:
        if is_asked():
            key = environ.encodekey(name)
            keep(VARIABLES, key, VARIABLES.get(key, MISSING))
        return read(environ, name)

    def refusing(method: Any) -> Any:
        def call(environ: Any, name: Any, *value: Any) -> None:
            if is_asked():
                key = environ.encodekey(name)
                raise for_python(
                    CaptureError(f"{user_line()}: forward sets {title_of(key)}, which a graph would not do")
                )
            method(environ, name, *value)

        return call

    def opened(*args: Any, **kwargs: Any) -> Any:
        if is_asked() and not is_installed(sys._getframe(1).f_code.co_filename):
            raise CaptureError(f"{user_line()}: forward opens a file, which a graph would do once")
        return plain_open(*args, **kwargs)

    instead = zip(_NAMES, (getitem, refusing(write), refusing(delete)), strict=True)
    with patched(*((kind, name, method) for name, method in instead), (builtins, "open", opened)):
        yield


_NAMES = "__getitem__", "__setitem__", "__delitem__"


def title_of(key: Any) -> str:
    """How a message names one of them."""
    return f"the environment variable {os.fsdecode(key)!r}"


def _is_asked_by_the_model(frame: types.FrameType | None) -> bool:
    while frame is not None and frame.f_globals.get("__name__") in ("os", "_collections_abc", "collections.abc"):
        frame = frame.f_back
    return frame is not None and not is_library_frame(frame)
