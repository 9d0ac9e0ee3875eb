"""What forward sets the first time it is called, and not again: transformers' heads set `config.problem_type`."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from fxamp.capture.objects import MISSING


@dataclasses.dataclass(frozen=True)
class Settings:
    """Plain values that one trace of forward put into dictionaries, such as the attributes of `self.config`.

    Attributes:
        parts: (dictionary, key, value before, value after), in the order in which they were put there.
        refusal: what the user is told where forward does so at every call.
    """

    parts: tuple[tuple[dict[Any, Any], Any, Any, Any], ...]
    refusal: str

    def make(self) -> None:
        """Put them there, as the call does that the graph is for."""
        for holder, name, _, after in self.parts:
            dict.__setitem__(holder, name, after)

    def undo(self) -> None:
        """Put back what was there before."""
        for holder, name, before, _ in self.parts:
            if before is MISSING:
                dict.pop(holder, name, None)
            else:
                dict.__setitem__(holder, name, before)

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        self.make()
        try:
            yield
        finally:
            self.undo()
