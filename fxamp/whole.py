"""Write a file whole or not at all."""

import contextlib
import os
import tempfile
from pathlib import Path

from fxamp.errors import OptionError


def write_whole(path: Path, text: str, what: str) -> Path:
    """Write `text` beside `path` and move it there.

    Raises:
        OptionError: it cannot be written; `what` names it, and nothing is left behind.
    """
    name = ""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise OptionError(f"{what} cannot be written to {str(path)!r}: {error.strerror or error}.") from error
    return path
