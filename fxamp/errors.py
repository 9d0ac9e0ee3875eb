"""Every error the package raises, an FxampError that is also the builtin a Python user expects; and its warnings."""

import contextlib
import difflib
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator

import torch

_FOLDERS = (os.path.join(os.path.dirname(file), "") for file in (__file__, torch.__file__))
_INSIDE = (*_FOLDERS, contextlib.__file__)  # the last for the decorators of both
_warned: set[str] = set()
_noting = threading.local()


class FxampError(Exception):
    """Base of all errors raised by fxamp; the message names the culprit and the remedy."""


class CaptureError(FxampError, RuntimeError):
    """The model could not be captured as a graph."""


class OpListError(FxampError, ValueError):
    """An op list is malformed or contradicts itself."""


class OptionError(FxampError, ValueError):
    """An argument of a public function has a value that is not allowed."""


class InputError(OptionError, RuntimeError):
    """The model fails on the inputs of a call: a RuntimeError, as what torch's kernels raise there is."""


class InvariantError(FxampError, RuntimeError):
    """A graph broke a rule that must hold after a pass: a defect of fxamp, not of the model."""


class ScaleCollapseError(FxampError, RuntimeError):
    """The loss scale sat at its floor while gradients stayed non-finite."""


class ShardedParameterError(FxampError, RuntimeError):
    """A sharded parameter was read outside the unit that gathers it."""


class CheckpointError(FxampError, RuntimeError):
    """A checkpoint cannot be written, read or applied."""


@contextlib.contextmanager
def uncaught_captures() -> Iterator[None]:
    """Inside, a CaptureError that code of the user's catches (`except Exception`) is raised at the end all the same.

    The class has an `__init__` for that time alone: Dynamo of torch 2.11 follows no error that has one.
    """
    was: list[CaptureError] | None = getattr(_noting, "errors", None)
    noted: list[CaptureError] = []
    _noting.errors = noted
    if was is None:
        setattr(CaptureError, "__init__", _noted)  # noqa: B010
    try:
        yield
        if noted:
            raise noted[0]
    finally:
        _noting.errors = was
        if was is None:
            delattr(CaptureError, "__init__")


def _noted(error: CaptureError, *args: object) -> None:
    super(CaptureError, error).__init__(*args)
    noted: list[CaptureError] | None = getattr(_noting, "errors", None)
    if noted is not None:
        noted.append(error)


class FxampWarning(UserWarning):
    """What fxamp warns of by `warnings.warn`; the message names the culprit and the remedy."""


def warn(text: str) -> None:
    """Give an FxampWarning with the user's own line: that the nearest caller outside of this package and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, FxampWarning, stacklevel=level)


def warn_once(text: str) -> None:
    """Warn, unless this process has already said so: a model has several graphs, and the first one is a preview."""
    if text not in _warned:
        _warned.add(text)
        warn(text)


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A hint that ends an error message.

    nearest("linaer", ["linear"]) == nearest("LINEAR", ["linear"]) == " Did you mean 'linear'?"

    Returns "" when nothing is close.
    """
    spellings = {known.lower(): known for known in allowed}
    close = difflib.get_close_matches(name.lower(), spellings, n=1)
    return f" Did you mean {spellings[close[0]]!r}?" if close else ""
