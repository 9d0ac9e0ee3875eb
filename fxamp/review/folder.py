"""Put a set of files into a folder all together: at no moment does it hold files of two sets."""

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from fxamp.whole import sync_directory

_DRAFT = ".fxamp-draft-"
_STALE_SECONDS = 3600
"""A draft of this age was left by a process that was killed, and goes; younger ones may be another process's."""


@contextlib.contextmanager
def replaced_together(target: Path, names: Collection[str]) -> Iterator[Path]:
    """A fresh folder, whose files take the place of those in `target` if the block succeeds.

        with replaced_together(Path("dump"), ("a.txt", "b.txt")) as draft:
            (draft / "a.txt").write_text("new")                     # b.txt is gone afterwards

    1. Everything is written, and brought to the disk, before anything of `target` is touched.
    2. A folder that does not exist appears whole, by one rename.
    3. In one that does, the old files are moved away before the first new one comes in: whoever looks then, or pulls
       the plug, finds fewer files and never a mixture. What raises puts the old ones back.
    4. What bears another name is left alone.

    Args:
        names: of every file that is the set's, written this time or not.

    Raises:
        OSError: a file cannot be written or moved; `target` is then what it was.
    """
    is_there = target.is_dir()
    home = target if is_there else target.parent  # a folder may be a mount, where nothing can be moved into from beside
    home.mkdir(parents=True, exist_ok=True)
    _sweep(home)
    with tempfile.TemporaryDirectory(prefix=_DRAFT, dir=home, ignore_cleanup_errors=True) as made:
        new, old = Path(made) / "new", Path(made) / "old"
        new.mkdir()
        old.mkdir()
        yield new
        _bring_to_disk(new)
        if is_there or not _appears(new, target):
            _swap(new, target, old, names)
        sync_directory(home)


def _sweep(home: Path) -> None:
    """Remove the drafts that killed processes left."""
    for left in home.glob(_DRAFT + "*"):
        with contextlib.suppress(OSError):  # another process may do the same
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _bring_to_disk(folder: Path) -> None:
    for file in folder.iterdir():
        with open(file, "rb+") as opened:
            os.fsync(opened.fileno())
    sync_directory(folder)


def _appears(new: Path, target: Path) -> bool:
    """Rename a folder into its place; False where another process has made one there meanwhile."""
    try:
        os.rename(new, target)
    except OSError:
        if target.is_dir():
            return False
        raise
    return True


def _swap(new: Path, target: Path, old: Path, names: Collection[str]) -> None:
    """Old files out, then new ones in; undone by what raises."""
    taken = next((target / name for name in names if (target / name).is_dir()), None)
    if taken is not None:
        raise IsADirectoryError(errno.EISDIR, f"{taken.name} is a folder there")
    coming = sorted(file.name for file in new.iterdir())
    try:
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # it has none, or another process has moved it
                os.replace(target / name, old / name)
        sync_directory(target)
        for name in coming:
            os.replace(new / name, target / name)
    except BaseException:
        for name in coming:
            if not (new / name).exists():
                (target / name).unlink(missing_ok=True)
        for file in old.iterdir():
            os.replace(file, target / file.name)
        raise
