"""Write everything that was decided into a folder."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from fxamp.errors import OptionError
from fxamp.review.code import texts
from fxamp.review.diff import unified_diff
from fxamp.review.dot import as_dot, draw
from fxamp.review.folder import replaced_together
from fxamp.review.html import as_html, missing_jinja
from fxamp.review.report import report, require_engine
from fxamp.whole import checked_path

log = logging.getLogger("fxamp")

FILES = ("before.txt", "after.txt", "graph.diff", "report.json", "report.html", "graph.dot", "graph.svg")
"""Of a dump; report.html is written where jinja2 is there, graph.svg where Graphviz is."""


def dump(converted: nn.Module, directory: str | Path) -> Path:
    """Write before.txt, after.txt, graph.diff, report.json, report.html, graph.dot; with Graphviz graph.svg.

        fxamp.dump(model, "dump"); webbrowser.open("dump/report.html")
        # patch before.txt graph.diff   gives after.txt

    The files are one dump's at any moment, complete or not there: what goes wrong leaves those of the last dump. An
    existing folder keeps its other files. report.html needs jinja2 (`pip install fxamp[review]`); without it a warning.

    Args:
        converted: a converted model; of one that convert() was asked to leave as it is the files say so.
        directory: made where it does not exist.

    Returns:
        The folder.

    Raises:
        OptionError: the model was not converted, or the folder cannot be written.
    """
    target, built = checked_path(directory, "the dump cannot be written", "directory"), report(converted)
    variants = [] if built.left else require_engine(converted).graphs()
    before, after = texts(variants)
    with _naming_refusals(target), replaced_together(target, FILES) as folder:
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
def _naming_refusals(target: Path) -> Iterator[None]:
    """What the disk refuses, in words.

    Raises:
        OptionError: the folder or a file in it cannot be written.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OptionError(
            f"the dump cannot be written to {str(target)!r}: {reason}. Give a folder that can be written, "
            "with room for a few megabytes; nothing was left half-written."
        ) from error
