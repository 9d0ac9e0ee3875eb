"""Write a file whole or not at all."""

import contextlib
import os
import secrets
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from fxamp.errors import OptionError


def write_whole(path: Path, content: str | bytes, what: str) -> Path:
    """Write `content` beside `path` and move it there: a reader sees the old file or the new one, never a part.

    1. A link stays a link: the file that it leads to is written.
    2. A file that is there keeps its mode and its owner; a new one has the mode that the umask leaves.
    3. What is there and no regular file (a device, a named pipe), and standard output, is written into.

    Raises:
        OptionError: it cannot be written; `what` names it. Nothing is left behind then, nor by Control-C.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        there = _status(path)
        if there is None or (stat.S_ISREG(there.st_mode) and _descriptor(there) is None):
            _replace(Path(os.path.realpath(path)), data, there)
        else:
            with _opened(path, there) as file:
                file.write(data)
    except OSError as error:
        raise OptionError(f"{what} cannot be written to {str(path)!r}: {error.strerror or error}.") from error
    return path


def _status(path: Path) -> os.stat_result | None:
    """Of what a path leads to, None where nothing is there."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _descriptor(there: os.stat_result) -> int | None:
    """Standard output or error, where this is it (`/dev/stdout`): what it was redirected into, perhaps a file."""
    for number in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            if os.path.samestat(there, os.fstat(number)):
                return number
    return None


def _opened(path: Path, there: os.stat_result) -> BinaryIO:
    """What is written into; standard output behind what was printed."""
    number = _descriptor(there)
    if number is None:
        return open(path, "wb")
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    return os.fdopen(os.dup(number), "wb")


def _replace(target: Path, data: bytes, there: os.stat_result | None) -> None:
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # before the name: a full disk shows here, and a power cut leaves no empty file
        if there is not None:
            _take_over(draft, there)
        os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def _take_over(draft: Path, there: os.stat_result) -> None:
    """Give the new file the owner and the mode of the old one."""
    if hasattr(os, "chown"):
        with contextlib.suppress(PermissionError):  # only root may give files away
            os.chown(draft, there.st_uid, there.st_gid)
    os.chmod(draft, stat.S_IMODE(there.st_mode))
