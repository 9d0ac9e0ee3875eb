"""Iterators that are there before forward runs: a graph would freeze the element that one gives."""

import io
import threading
from collections.abc import Iterator
from typing import Any

from fxamp.capture.objects import is_library
from fxamp.capture.refusals import for_python
from fxamp.errors import CaptureError


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator of Python's own or a package's, whose `__next__` is not traced; files are none."""
    return isinstance(value, Iterator) and is_library(type(value)) and not isinstance(value, (io.IOBase, Drawn))


class Drawn:
    """Stands for an iterator while a forward is traced.

    Args:
        iterator: what other threads go on taking elements from.
        title: how a message names it.
    """

    def __init__(self, iterator: Any, title: str) -> None:
        self._iterator, self._title = iterator, title
        self._thread = threading.get_ident()

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        """The next element, in a thread that traces nothing.

        Raises:
            CaptureError: in the one that traces.
        """
        if threading.get_ident() != self._thread:
            return next(self._iterator)
        raise for_python(  # Dynamo takes some itself, of global ones
            CaptureError(
                f"forward takes the next element of {self._title} ({type(self._iterator).__qualname__}), which is "
                "another at each call. Take it outside, and pass it in."
            )
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)
