"""Write a file whole or not at all."""

import contextlib
import os
import tempfile
from pathlib import Path

from fxamp.errors import OptionError


def write_whole(path: Path, content: str | bytes, what: str) -> Path:
    """Write `content` beside `path` and move it there: a reader sees the old file or the new one, never a part.

    Raises:
        OptionError: it cannot be written; `what` names it. Nothing is left behind then, nor by Control-C.
    """
    name = ""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # before the name: a full disk shows here, and a power cut leaves no empty file
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        _remove(name)
        raise OptionError(f"{what} cannot be written to {str(path)!r}: {error.strerror or error}.") from error
    except BaseException:
        _remove(name)
        raise
    return path


def _remove(name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name)
