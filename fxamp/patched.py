"""Put other things under names of Python modules and classes for a while."""

import contextlib
from collections.abc import Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def patched(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Context: under a name of a Python module or a class stands something else.

    Ctrl-C may come between any two lines, so nothing is put there before the `try` that takes it away.

    Args:
        places: holder, name, and what is to stand there.
    """
    before = [(holder, name, vars(holder).get(name, _ABSENT)) for holder, name, _ in places]
    try:
        for holder, name, instead in places:
            setattr(holder, name, instead)
        yield
    finally:
        for holder, name, own in before:
            if own is not _ABSENT:
                setattr(holder, name, own)
            elif name in vars(holder):  # a class inherits it
                delattr(holder, name)
