"""Write a file whole or not at all; and which paths a file can have."""

import contextlib
import glob
import os
import secrets
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from fxamp.errors import FxampError, OptionError

try:
    import fcntl
except ImportError:  # Windows, which removes no file that somebody has open
    fcntl = None  # type: ignore[assignment]


def write_whole(path: Path, content: str | bytes, what: str) -> Path:
    """`put_whole` of `content`.

    Raises:
        OptionError: it cannot be written; `what` names it. Nothing is left behind then, nor by Control-C.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        put_whole(path, lambda file: file.write(data))
    except OSError as error:
        raise OptionError(f"{what} cannot be written to {str(path)!r}: {error.strerror or error}.") from error
    return path


def checked_path(path: Any, problem: str, argument: str = "path", error: type[FxampError] = OptionError) -> Path:
    """The path, unless nothing can have it.

        checked_path("a\\0b", "the plan cannot be written")
        # the plan cannot be written: path='a\\x00b' holds a NUL character. Give a str or a pathlib.Path.

    Args:
        argument: of the public function, by which it came.
        error: what is raised.

    Raises:
        FxampError: `error`: it is neither str nor os.PathLike of str, is empty, or holds what no file's name can.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    wrong = ""
    if not isinstance(text, str):
        wrong = "is no path"
    elif not text:
        wrong = "is empty"
    elif "\0" in text:
        wrong = "holds a NUL character"
    elif not _is_encodable(text):
        wrong = "holds what no file's name can"
    if not wrong:
        return Path(path)
    given = path if text is None else text
    raise error(f"{problem}: {argument}={given!r} {wrong}. Give a str or a pathlib.Path.")


def _is_encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def put_whole(
    path: Path, write: Callable[[BinaryIO], object], check: Callable[[Path], object] = lambda draft: None
) -> None:
    """Let `write` fill a file beside `path`, and move it there: a reader sees the old one or the new, never a part.

    1. A link stays a link: the file that it leads to is written.
    2. A file that is there keeps its mode and its owner; a new one has the mode that the umask leaves.
    3. What is there and no regular file (a device, a named pipe), and standard output, is written into.

    Whatever is raised, by `write` and `check` too, comes through: `path` is as it was then, and nothing is left behind.

    Args:
        check: called with the complete file's own path, before it becomes `path`; raises where it must not.
    """
    there = _status(path)
    if there is None or (stat.S_ISREG(there.st_mode) and _descriptor(there) is None):
        _replace(Path(os.path.realpath(path)), write, check, there)
    else:
        with _opened(path, there) as file:
            write(file)


def remove_drafts(path: Path) -> None:
    """Remove what writers of `path` left behind when they were killed; those at work keep theirs."""
    target = Path(os.path.realpath(path))
    for draft in target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 8}.part"):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            handle = os.open(draft, os.O_RDONLY)
            try:
                if _claim(handle):
                    draft.unlink()
            finally:
                os.close(handle)


def _claim(handle: int) -> bool:
    """Lock an open file, unless another process has; whoever is killed lets it go."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


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


def _replace(
    target: Path,
    write: Callable[[BinaryIO], object],
    check: Callable[[Path], object],
    there: os.stat_result | None,
) -> None:
    draft, handle = _new_draft(target)
    lock = os.dup(handle)  # until the draft has its name
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # before the name: a full disk shows here, and a power cut leaves no empty file
        check(draft)
        if there is not None:
            _take_over(draft, there)
        os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    finally:
        os.close(lock)
    sync_directory(target.parent)


def _new_draft(target: Path) -> tuple[Path, int]:
    """A new file beside `target`, open and locked."""
    while True:
        draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        if _claim(handle) and draft.exists():  # else another writer found it before it was locked
            return draft, handle
        os.close(handle)


def sync_directory(directory: Path) -> None:
    """Bring the rename itself to the disk, where directories can be opened (not on Windows) and synchronised."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    with contextlib.suppress(OSError):  # the file is there already, and whole
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _take_over(draft: Path, there: os.stat_result) -> None:
    """Give the new file the owner and the mode of the old one."""
    if hasattr(os, "chown"):
        with contextlib.suppress(PermissionError):  # only root may give files away
            os.chown(draft, there.st_uid, there.st_gid)
    os.chmod(draft, stat.S_IMODE(there.st_mode))
