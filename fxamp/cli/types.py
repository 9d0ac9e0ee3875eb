"""What the command line's options take, and its exit codes."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

OK, LIMIT, WRONG, INTERRUPTED = 0, 1, 2, 130
"""All is well; what was asked for does not hold; the command could not do its work; Control-C."""


def path(text: str) -> str:
    """A path."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return text


def new_file(text: str) -> str:
    """A path where a file may be: told before a long run, not behind it."""
    found = Path(path(text))
    if found.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a directory")
    if not found.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {str(found.parent)!r}")
    return text


def number(kind: type, least: float, most: float = math.inf) -> Callable[[str], Any]:
    """An argument that is a finite number from `least` to `most`."""

    def read(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most or value == math.inf:
            allowed = f"from {least} to {most}" if most < math.inf else f"{least} or more"
            allowed += ", and finite" if value == math.inf else ""
            raise argparse.ArgumentTypeError(f"{text} is not {allowed}")
        return value

    read.__name__ = kind.__name__  # argparse: "invalid int value"
    return read
