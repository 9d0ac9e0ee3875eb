"""Where in the user's code something happened."""

import os
import re
import sys
import types
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import nn

from fxamp.errors import CaptureError

_PACKAGE = Path(__file__).parent.parent
# Folders, each with its separator: torchvision's path begins as torch's does.
_OURS = os.path.join(_PACKAGE, "")
_TORCHS = os.path.join(Path(torch.__file__).parent, "")
# Models that ship with the package are user code like any other.
_MODELS = (os.path.join(_PACKAGE, "demo", ""), os.path.join(_PACKAGE, "counting", ""))
_ASKED = os.path.join(_PACKAGE, "capture", "asked.py")
_LINE = re.compile(r'File "([^"]+)", line (\d+)')


# Code that programs write: ours, torch.fx, dataclasses and namedtuples, attrs, numpy's dispatch, Python's imports.
_GENERATED = ("<fxamp ", "<eval_with_key", "<string>", "<attrs generated", "<__array_function__", "<frozen ")


def is_library_file(filename: str) -> bool:
    """Whether a file is torch's, this package's, or generated.

    Other code without a file is the user's: typed in a session, made by `exec`, or of a `torch.package`.
    """
    if filename.startswith("<"):
        return filename.startswith(_GENERATED)
    return filename.startswith((_TORCHS, _OURS)) and not filename.startswith(_MODELS)


def is_library_function(function: types.FunctionType) -> bool:
    """The same for a function; what was given to `python -c` is the user's."""
    return _is_librarys(function.__code__, function.__module__)


def is_library_frame(frame: types.FrameType) -> bool:
    """The same for the code that runs in a frame."""
    return _is_librarys(frame.f_code, frame.f_globals.get("__name__"))


def _is_librarys(code: types.CodeType, module: str | None) -> bool:
    filename = code.co_filename
    return is_library_file(filename) and not (filename.startswith("<") and module == "__main__")


def is_installed(filename: str) -> bool:
    """Whether a file is of a package that pip has installed, which nobody edits while it is used."""
    return "site-packages" in filename or "dist-packages" in filename


def is_torchs_file(filename: str) -> bool:
    """Whether a file is torch's."""
    return filename.startswith(_TORCHS)


def asker(depth: int) -> types.FrameType:
    """The frame that many above the caller's: who reads an attribute, past the `getattr` that stands in the files of a
    forward (asked.py).
    """
    frame = sys._getframe(depth + 1)
    while frame.f_code.co_filename == _ASKED and frame.f_back is not None:
        frame = frame.f_back
    return frame


def user_lines_in(text: str) -> list[str]:
    """ "file.py:12" of each line of the user's in the text of a traceback, outermost first."""
    return [f"{file}:{line}" for file, line in _LINE.findall(text) if not is_library_file(file)]


def user_frames() -> Iterator[types.FrameType]:
    """The frames of the model that are neither torch's nor ours, innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if frame.f_code.co_name == "trace" and filename.startswith(_OURS):
            return  # what lies outside of the trace called convert(), and made no node
        if not is_library_frame(frame):
            yield frame
        frame = frame.f_back


def user_line_below(outermost: str, inside: Collection[str]) -> str | None:
    """Of what called the caller: "file.py:12" of the innermost frame of the model that a function of this package,
    `outermost`, has called.

    Returns:
        "" where there is none, or this package has called by itself; None where one of its functions named by `inside`
        stands in between, or nothing of that name has called.
    """
    found = ""
    frame: types.FrameType | None = sys._getframe(2)
    is_own = frame is not None and frame.f_code.co_filename.startswith(_OURS)
    while frame is not None:
        filename, name = frame.f_code.co_filename, frame.f_code.co_name
        if filename.startswith(_OURS):
            if name == outermost or name in inside:
                return found if name == outermost else None
        if not (found or is_own) and not is_library_frame(frame):
            found = f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def user_line() -> str:
    """ "file.py:12" of the innermost frame of the model that is neither torch's nor ours; "" when there is none."""
    return next((f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in user_frames()), "")


def line_of(error: BaseException) -> str:
    """The innermost line of the user's code in an error's traceback."""
    found, trace = "", error.__traceback__
    while trace is not None:
        if not is_library_frame(trace.tb_frame):
            found = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def explained(error: Exception, root: nn.Module, has_example: bool) -> CaptureError:
    """A CaptureError that names the line and the way out."""
    where = line_of(error)
    way_out = (
        "Write that line with torch functions, or convert the submodules around it."
        if has_example
        else "Pass example_inputs to fxamp.convert, write that line with torch functions, or convert submodules."
    )
    return CaptureError(
        f"{type(root).__qualname__} cannot be captured symbolically. {f'{where}: ' if where else ''}"
        f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}. {way_out}"
    )


def unfollowable(what: str, has_example: bool, data: bool) -> CaptureError:
    """A CaptureError for a Python question about a traced value.

    Args:
        what: the question ("Python's bool() of a traced value").
        data: whether the answer depends on data, not on sizes.
    """
    if not has_example:
        way_out = (
            "Pass example_inputs to fxamp.convert: decisions on sizes, and on inputs' data, are then made from them."
        )
    elif data:
        way_out = (
            "The decision depends on data. Write it with torch.where, move it out of forward, or convert the "
            "submodules on both sides of it."
        )
    else:
        way_out = "Move the decision out of forward, or convert the submodules on both sides of it."
    return CaptureError(f"{user_line()}: {what} decides the control flow, which a graph cannot hold. {way_out}")
