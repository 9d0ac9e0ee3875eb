"""Run one command of the command line: its exit code, and what is said where it fails."""

import argparse
import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, TextIO

from fxamp.cli.parser import parser
from fxamp.cli.targets import failure, is_of_print
from fxamp.cli.types import INTERRUPTED, OK, WRONG
from fxamp.errors import FxampError, FxampWarning
from fxamp.logs import configure_logging

log = logging.getLogger("fxamp")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    code = OK
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path of the user's may hold what its encoding does not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            configure_logging()
            code = _run(parser().parse_args(arguments))
        _flush()  # where the disk is full, it shows here and not when Python ends
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        _drop_stdout()
    except OSError as error:
        _drop_stdout()
        print(f"fxamp: standard output cannot be written: {error.strerror or error}.", file=sys.stderr)
        return WRONG
    return code


def _run(chosen: argparse.Namespace) -> int:
    """The exit code of one command; whatever it raises is told in a sentence, but for trouble with standard output."""
    try:
        with _prints_of_the_target_aside(chosen):
            return int(chosen.run(chosen))
    except FxampError as error:
        return _wrong(str(error))
    except KeyboardInterrupt:
        print("fxamp: interrupted; no file is half-written", file=sys.stderr)
        return INTERRUPTED
    except (Exception, SystemExit) as error:  # the user's code: a sys.exit(0) of its own is no success of the command
        if isinstance(error, OSError) and is_of_print(error):
            raise
        return _wrong(f"{chosen.command} {failure(error)}")


def _prints_of_the_target_aside(chosen: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """Where the command prints for programs, to `chosen.stdout`, what the target's code prints goes to stderr."""
    chosen.stdout = sys.stdout
    is_for_programs = chosen.json or getattr(chosen, "sarif", False)
    if is_for_programs and hasattr(chosen, "target") and sys.stdout is not None:
        return contextlib.redirect_stdout(sys.stderr)
    return contextlib.nullcontext()


def _wrong(text: str) -> int:
    """Say why a command could not do its work, behind what it printed; called where the error is handled."""
    with contextlib.suppress(OSError):
        _flush()
    log.debug("the traceback:", exc_info=True)
    print(f"fxamp: {text}", file=sys.stderr)
    return WRONG


def _flush() -> None:
    if sys.stdout is not None:  # it is closed (`>&-`)
        sys.stdout.flush()


def _drop_stdout() -> None:
    """What is still to be written goes nowhere, so that Python does not fail on it when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning of fxamp's as a sentence; no line of a program led to it."""
    if issubclass(category, FxampWarning):
        print(f"fxamp: warning: {message}", file=sys.stderr)
    else:
        print(warnings.formatwarning(message, category, filename, lineno), end="", file=sys.stderr)
