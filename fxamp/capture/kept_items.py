"""Items of containers that forward sets: `self.heads[i] = x`, `self.losses.append(x)`, `self.seen["middle"] = x`.

A graph sets them at the end of a call, as it sets attributes. What they held before must not matter to forward: it is
traced once more with things in their places that cannot be read.
"""

import collections
import contextlib
import dataclasses
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from torch import fx, nn
from torch.utils import _pytree as pytree

from fxamp.capture.leaves import TABLES
from fxamp.capture.objects import MISSING, walk
from fxamp.capture.snapshots import Elements
from fxamp.capture.traces import Attribute
from fxamp.errors import CaptureError
from fxamp.paths import module_at

_KINDS = (list, dict, collections.OrderedDict, collections.defaultdict)


@dataclasses.dataclass(frozen=True)
class Item:
    """An item of a list or a dictionary that is an attribute of a module of a model.

    Attributes:
        path: of the module.
        name: of the attribute.
        key: or the place in the list; behind its end for what is appended.
    """

    path: str
    name: str
    key: Any

    @property
    def title(self) -> str:
        return f"{self.path}.{self.name}[{self.key!r}]".lstrip(".")

    def put(self, root: nn.Module, value: Any) -> None:
        """Set it."""
        held = self._container(root)
        if isinstance(held, list) and self.key >= len(held):
            held.append(value)
        else:
            held[self.key] = value

    def put_back(self, root: nn.Module, value: Any) -> None:
        """Make it what `held_in` gave: set, or not there."""
        held = self._container(root)
        if value is not MISSING:
            self.put(root, value)
        elif isinstance(held, list):
            del held[self.key :]
        else:
            held.pop(self.key, None)

    def held_in(self, root: nn.Module) -> Any:
        """What it holds; MISSING where there is none."""
        held = self._container(root)
        if isinstance(held, list):
            return held[self.key] if self.key < len(held) else MISSING
        return held.get(self.key, MISSING)

    def _container(self, root: nn.Module) -> Any:
        return module_at(root, self.path).__dict__[self.name]


Kept = Attribute | Item


def items_set(held: Any, before: Any) -> dict[Any, Any] | None:
    """The items of a list or a dictionary that forward has set to values of its own, by their keys.

    Args:
        held: what it holds now.
        before: a copy of what it held.

    Returns:
        None where forward has done anything else to it, or nothing.
    """
    if type(held) not in _KINDS or len(held) < len(before):
        return None
    now, old = (dict(enumerate(each)) if isinstance(held, list) else each for each in (held, before))
    found = {key: value for key, value in now.items() if old.get(key, MISSING) is not value}
    is_plain = all(type(key) in (str, int) for key in found) and all(map(operator.is_, now, old))
    return found if found and is_plain and all(map(_is_traced, found.values())) else None


def _is_traced(value: Any) -> bool:
    """Whether it is a value of the trace, or a structure of such values alone."""
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(issubclass(type(leaf), fx.Proxy) for leaf in leaves)


def is_inside(container: Any, value: Any) -> bool:
    """Whether a container stands in another one, or in an object."""
    return value is not container and any(part is container for part in walk(value))


def without(container: Any, keys: Sequence[Any]) -> Any:
    """A copy of a list or a dictionary, in which of some items stands only whether they are None."""
    if isinstance(container, list):
        return [each is None if place in keys else each for place, each in enumerate(container)]
    if isinstance(container, dict):
        return {key: each is None if key in keys else each for key, each in container.items()}
    return container


class _Unread:
    """Stands where an item is that forward is to overwrite without a look at it."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return _Unread
        raise _read()

    def __bool__(self) -> NoReturn:
        raise _read()

    def __eq__(self, other: object) -> NoReturn:
        raise _read()

    __hash__ = object.__hash__


def _read() -> CaptureError:
    return CaptureError("forward reads what an item holds that it overwrites")


def is_held(root: nn.Module, item: Item) -> bool:
    """Whether there is something but None in its place."""
    value = item.held_in(root)
    return value is not MISSING and value is not None


@contextlib.contextmanager
def unreadable(root: nn.Module, items: Iterable[Item]) -> Iterator[None]:
    """Context: in the places of these items stands what cannot be read."""
    before = [(item, item.held_in(root)) for item in items]
    try:
        for item, _ in before:
            item.put(root, _Unread())
        yield
    finally:
        for item, value in before:
            item.put_back(root, value)


@contextlib.contextmanager
def containers_kept(*models: nn.Module) -> Iterator[None]:
    """Context: afterwards the lists and dictionaries that are attributes of modules hold what they held."""
    modules = (module for model in models for module in model.modules())
    attributes = (value for module in modules for name, value in vars(module).items() if name not in TABLES)
    before = [Elements(value) for value in attributes if type(value) in _KINDS]
    try:
        yield
    finally:
        for each in before:
            each.put_back()
