"""What forward sets the first time it is called, and not again: transformers' heads set `config.problem_type`, its base
models the hooks that collect hidden states."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from fxamp.capture.elements import base_of
from fxamp.capture.objects import MISSING
from fxamp.paths import module_at


@dataclasses.dataclass(frozen=True)
class Table:
    """A dictionary of a module: its attributes ("__dict__"), or one of torch's among them; a view has its own."""

    path: str
    name: str

    def of(self, root: nn.Module) -> dict[Any, Any]:
        attributes = module_at(root, self.path).__dict__
        return attributes if self.name == "__dict__" else attributes[self.name]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What one trace of forward put into dictionaries, such as the attributes of `self.config`, or those of hooks.

    Attributes:
        parts: (dictionary, key, value before, value after), in the order in which they were put there.
        refusal: what the user is told where forward does so at every call.
    """

    parts: tuple[tuple[dict[Any, Any] | Table, Any, Any, Any], ...]
    refusal: str

    def make(self, root: nn.Module) -> None:
        """Put them there, as the call of a model does that the graph is for."""
        for holder, name, _, after in self.parts:
            _put(_held(holder, root), name, after)

    def undo(self, root: nn.Module) -> None:
        """Put back what was there before."""
        for holder, name, before, _ in self.parts:
            _put(_held(holder, root), name, before)

    @contextlib.contextmanager
    def made(self, root: nn.Module) -> Iterator[None]:
        self.make(root)
        try:
            yield
        finally:
            self.undo(root)


def _held(holder: dict[Any, Any] | Table, root: nn.Module) -> dict[Any, Any]:
    return holder.of(root) if isinstance(holder, Table) else holder


def _put(holder: dict[Any, Any], name: Any, value: Any) -> None:
    """Write into a dictionary, whatever its own class does then."""
    kind = base_of(holder)
    if value is MISSING:
        kind.pop(holder, name, None)
    else:
        kind.__setitem__(holder, name, value)


def all_of(one: Settings | None, other: Settings | None) -> Settings | None:
    """The settings of one trace, found in two ways."""
    if one is None or other is None:
        return one or other
    return Settings((*one.parts, *other.parts), one.refusal)
