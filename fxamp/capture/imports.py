"""Modules that forward imports first: their code runs before the trace, which would leave its own values in them.

    def forward(self, x):
        from solvers import TABLE  # made by torch.tensor() when the module is loaded

A trace that comes to one ends there, the module is loaded, and forward is traced again.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from typing import Any, TypeVar

from fxamp.patched import patched

Result = TypeVar("Result")


class _NotLoaded(BaseException):
    """Ends a trace, past what forward catches of an import that fails."""


class Imports:
    """The modules that the traces of one forward have come to.

    One is loaded once: if that fails, or gives no module of the name, the next trace runs what forward does about it.
    """

    def __init__(self) -> None:
        self._tried: set[str] = set()
        self._asked: str | None = None

    def loaded_before(self, trace: Callable[[], Result]) -> Result:
        """What a trace gives that has loaded no module."""
        while True:
            self._asked = None
            try:
                result = trace()
            except _NotLoaded:
                pass
            except Exception:
                if self._asked is None:
                    raise
            if self._asked is None:
                return result
            self._tried.add(self._asked)
            with contextlib.suppress(Exception):
                importlib.import_module(self._asked)

    @contextlib.contextmanager
    def noted(self, tracer: Any) -> Iterator[None]:
        """Around a trace: it ends where forward loads a module, in this thread."""

        def noting(original: Any) -> Any:
            def exec_module(loader: Any, module: Any) -> None:
                name = module.__name__
                if tracer.is_recording and name not in self._tried:
                    self._asked = name
                    raise _NotLoaded(name)
                original(loader, module)

            return exec_module

        loaders = (SourceFileLoader, SourcelessFileLoader)
        with patched(*((loader, "exec_module", noting(loader.exec_module)) for loader in loaders)):
            yield
