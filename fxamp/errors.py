"""Every error the package raises: an FxampError that is also the builtin a Python user expects."""

import difflib
from collections.abc import Iterable


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


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A hint that ends an error message.

    nearest("linaer", ["linear"]) == nearest("LINEAR", ["linear"]) == " Did you mean 'linear'?"

    Returns "" when nothing is close.
    """
    spellings = {known.lower(): known for known in allowed}
    close = difflib.get_close_matches(name.lower(), spellings, n=1)
    return f" Did you mean {spellings[close[0]]!r}?" if close else ""
