"""Write everything that was decided into a folder."""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from fxamp.errors import OptionError
from fxamp.review.code import texts
from fxamp.review.diff import unified_diff
from fxamp.review.dot import as_dot, draw
from fxamp.review.html import as_html, missing_jinja
from fxamp.review.report import report, require_engine

log = logging.getLogger("fxamp")

_OPTIONAL = ("report.html", "graph.svg")
"""Written where jinja2 or Graphviz is there; else those of an earlier dump would tell of other graphs."""


def dump(converted: nn.Module, directory: str | Path) -> Path:
    """Write before.txt, after.txt, graph.diff, report.json, report.html, graph.dot; with Graphviz graph.svg.

        fxamp.dump(model, "dump"); webbrowser.open("dump/report.html")
        # patch before.txt graph.diff   gives after.txt

    Files are complete or not there: they are written beside the folder and moved into it. An existing folder
    keeps its other files. report.html needs jinja2 (`pip install fxamp[review]`); without it a warning.

    Returns:
        The folder.

    Raises:
        OptionError: the model was not converted, or the folder cannot be written.
    """
    target, built = Path(directory), report(converted)
    variants = [] if built.left else require_engine(converted).graphs()
    before, after = texts(variants)
    with _complete_or_not(target) as folder:
        _write(folder / "before.txt", before)
        _write(folder / "after.txt", after)
        _write(folder / "graph.diff", unified_diff(before, after))
        _write(folder / "report.json", built.to_json() + "\n")
        _write(folder / "graph.dot", as_dot(built.rows))
        draw(folder / "graph.dot", folder / "graph.svg")
        if missing_jinja():
            log.warning("report.html is not written: it needs jinja2. Run: pip install 'fxamp[review]'")
        else:
            _write(folder / "report.html", as_html(built, variants))
    return target


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _complete_or_not(target: Path) -> Iterator[Path]:
    """A fresh folder beside `target`, whose files are moved to `target` if the block succeeds.

    Raises:
        OptionError: the folder or a file in it cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as made:
            folder = Path(made) / "files"
            folder.mkdir()
            yield folder
            _move(folder, target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OptionError(
            f"the dump cannot be written to {str(target)!r}: {reason}. Give a folder that can be written, "
            "with room for a few megabytes; nothing was left half-written."
        ) from error


def _move(folder: Path, target: Path) -> None:
    if not target.exists():
        shutil.move(folder, target)
        return
    target.mkdir(exist_ok=True)
    for name in _OPTIONAL:
        if not (folder / name).exists():
            (target / name).unlink(missing_ok=True)
    for file in folder.iterdir():
        os.replace(file, target / file.name)
