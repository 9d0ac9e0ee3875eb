"""The command line: see what a conversion decides, without writing a script."""

from fxamp.cli.program import main

__all__ = ["main"]
