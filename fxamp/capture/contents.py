"""What objects written in C hold that can be written in place: numbers in memory, and texts. Copied, and put back."""

import array
import ctypes
import io
import mmap
from typing import Any

from fxamp.capture.numbers import is_numpys

OF_C = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)  # of which multiprocessing.Value has one
IN_MEMORY = (bytearray, array.array, memoryview, *OF_C)
_MOST_BYTES = 2**26  # a larger array may be a file


def contents_of(value: Any) -> Any:
    """A comparable copy of what it holds; None for what holds nothing of the kind, or too much, or is closed."""
    if is_numpys(value):
        if value.dtype.hasobject:  # in fields there are no objects that could be told apart
            return tuple(map(id, value.ravel().tolist())) if value.dtype.names is None else None
        return numbers_of(value) if value.nbytes <= _MOST_BYTES else None
    try:
        if isinstance(value, IN_MEMORY):
            return numbers_of(value) if memoryview(value).nbytes <= _MOST_BYTES else None
        if isinstance(value, mmap.mmap):
            return value[:] if len(value) <= _MOST_BYTES else None
        if isinstance(value, (io.StringIO, io.BytesIO)):
            return value.getvalue(), value.tell()
    except ValueError:  # it is closed, or released
        return None
    return None


def is_file(value: Any) -> bool:
    """Whether it is an open or closed file, and no text in memory."""
    return isinstance(value, io.IOBase) and not isinstance(value, (io.StringIO, io.BytesIO))


def numbers_of(value: Any) -> bytes:
    """The numbers of an array."""
    return bytes(value) if isinstance(value, (bytearray, memoryview, *OF_C)) else value.tobytes()


def put_contents(value: Any, saved: Any, contents: Any) -> None:
    """Let it hold what it held.

    Args:
        saved: a copy of it, where it is an array of numpy's.
        contents: what `contents_of` gave.
    """
    if is_numpys(value):
        if value.shape != saved.shape:  # it was resized
            value.resize(saved.shape, refcheck=False)
        value[...] = saved
    elif isinstance(value, array.array):
        value[:] = array.array(value.typecode, contents)
    elif isinstance(value, (io.StringIO, io.BytesIO)):
        text, place = contents
        value.seek(0)
        value.truncate()
        value.write(text)
        value.seek(place)
    elif isinstance(value, OF_C):
        ctypes.memmove(ctypes.addressof(value), contents, len(contents))
    elif isinstance(value, memoryview) and value.contiguous:
        value.cast("B")[:] = contents
    elif isinstance(value, memoryview):
        saved = memoryview(contents)
        value[:] = saved.cast(value.format)
    else:
        value[:] = contents
