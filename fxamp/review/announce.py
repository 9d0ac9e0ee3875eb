"""What is said and written down when a model is converted: log lines, and the folder of FXAMP_LOG_PATH."""

import contextlib
import contextvars
import itertools
import logging
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import nn

from fxamp.errors import OptionError
from fxamp.logs import configure_logging
from fxamp.model.engine import Engine
from fxamp.review.advice import low_already
from fxamp.review.dump import dump
from fxamp.review.report import Report, report, require_engine
from fxamp.review.sharing import overrides_without_effect
from fxamp.review.table import overview
from fxamp.review.uncaptured import holds_other_calls, kept_whole, uncaptured

log = logging.getLogger("fxamp")

MAX_LINES = 18
"""Lines said about one model at INFO, all of its graphs together; with two on how it was captured, 20."""
_MOST = 0.5
"""Of the weights: where a larger share is left out, a warning is due."""

_warned: "weakref.WeakKeyDictionary[nn.Module, set[str]]" = weakref.WeakKeyDictionary()
_informed: "weakref.WeakKeyDictionary[nn.Module, set[str]]" = weakref.WeakKeyDictionary()
_folders: "weakref.WeakKeyDictionary[Engine, Path]" = weakref.WeakKeyDictionary()
_unwritable: set[Path] = set()
_looking = contextvars.ContextVar("looking", default=False)


@contextlib.contextmanager
def only_looking() -> Iterator[None]:
    """While a tool converts a model to look at it: that nothing is gained by it is no news to who asked for a look."""
    token = _looking.set(True)
    try:
        yield
    finally:
        _looking.reset(token)


def announce(converted: nn.Module, warnings: Iterable[str] = ()) -> None:
    """Log what a conversion decided, and dump it where FXAMP_LOG_PATH says.

    The summary and what to know are logged at INFO, MAX_LINES lines at most; every node's decision at DEBUG. That
    little can have been converted (Dynamo left most weights out, hooks keep them, or they are low already) is a
    WARNING, once. Called again for a model, after another graph was captured, it says what is new, and brings the same
    folder up to date.

    Args:
        warnings: more of them, each said once.
    """
    configure_logging()
    engine = require_engine(converted)
    lost = overrides_without_effect(engine)
    is_low = "" if _looking.get() else low_already(converted)
    said = _warned.setdefault(converted, set())
    little = [] if _is_aside(engine) else [_left_out(converted, engine), _whole(converted, engine)]
    for key, text in (*little, *((text, text) for text in (is_low, *lost, *warnings))):
        if text and key not in said:
            said.add(key)
            log.warning(text)
    path = os.environ.get("FXAMP_LOG_PATH", "").strip()
    if not path and not log.isEnabledFor(logging.INFO):
        return
    built = report(converted)
    if log.isEnabledFor(logging.INFO):
        _inform(converted, overview(built))
    if log.isEnabledFor(logging.DEBUG):
        _log_nodes(built)
    if path and (folder := _dump(converted, Path(path))) is not None:
        log.info("written to %s", folder)


def _is_aside(engine: Engine) -> bool:
    """Whether only calls without gradients have met the model as it is now, and others as it was: under the hooks of a
    summary, say, which are gone at the next step."""
    return bool(engine.known) and not engine.has_met_gradients


def _left_out(converted: nn.Module, engine: Engine) -> tuple[str, str]:
    """What Dynamo left out, where that is most of the weights; first, what it is known by, for the share changes."""
    name = type(converted).__qualname__
    share, outside = uncaptured(engine, converted)
    if share <= _MOST:
        return "", ""
    if holds_other_calls(engine):
        return "other calls", f"{name}: {outside}"
    return "left out", f"{_how_much(name, share)}: {outside}"


def _whole(converted: nn.Module, engine: Engine) -> tuple[str, str]:
    """What hooks keep whole, where that is most of the weights."""
    share, inside = kept_whole(engine, converted)
    return ("whole", f"{_how_much(type(converted).__qualname__, share)}: {inside}") if share > _MOST else ("", "")


def _how_much(name: str, share: float) -> str:
    return f"nothing of {name} was converted" if share == 1 else f"most of {name} was not converted"


def _inform(converted: nn.Module, lines: Iterable[str]) -> None:
    """Log what was not said of this model before: a graph for evaluation has the regions of the one for training."""
    said = _informed.setdefault(converted, set())
    for line in lines:
        if line not in said:
            said.add(line)
            log.log(logging.INFO if len(said) < MAX_LINES else logging.DEBUG, line)
            if len(said) == MAX_LINES:
                log.info("there is more: print(fxamp.report(model)), or FXAMP_LOG_LEVEL=DEBUG")


def _log_nodes(built: Report) -> None:
    for row in built.rows:
        log.debug("%s (%s, %s): %s: %s", row.name, row.op, row.role or row.colour, row.runs_in, row.reason)


def _dump(converted: nn.Module, parent: Path) -> Path | None:
    """Dump into this model's own folder below `parent`; a dump that fails is only a warning, and leaves no folder."""
    engine = require_engine(converted)
    folder = _folders.get(engine)
    missing = list(itertools.takewhile(lambda path: not os.path.exists(path), (parent, *parent.parents)))
    try:
        if folder is None or folder.parent != parent:
            folder = _folders[engine] = _new_folder(parent, type(converted).__name__)
        return dump(converted, folder)
    except (OSError, OptionError) as error:
        why = str(error)
        if isinstance(error, OSError):
            why = f"{error.strerror or error}. Name a folder that can be written."
        if parent not in _unwritable:
            _unwritable.add(parent)
            log.warning("FXAMP_LOG_PATH=%s: nothing is dumped: %s", parent, why)
    with contextlib.suppress(OSError):  # a folder that holds something stays
        for path in (*((folder,) if folder is not None else ()), *missing):
            path.rmdir()
            _folders.pop(engine, None)
    return None


def _new_folder(parent: Path, name: str) -> Path:
    """`parent/name-1`, or the next number that nobody has."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = parent / f"{name}-{number}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise AssertionError("unreachable")
