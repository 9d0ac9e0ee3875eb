"""The attributes of modules that forward sets while it is traced, by the thread that traces."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import fx, nn

from fxamp.capture.objects import is_library
from fxamp.capture.traces import Attribute, Change, State, restore, snapshot
from fxamp.errors import CaptureError
from fxamp.module_hooks import has_hooks
from fxamp.patched import patched


class Assignments:
    """What one trace of forward sets.

    What a module holds in the end does not tell: another thread that runs it may be setting the same attribute.

    Args:
        before: what the model held until now.
        is_paused: whether what happens now is no part of the model's forward.
    """

    def __init__(self, before: State, is_paused: Callable[[], bool]) -> None:
        self.before = before
        self._root = before.root
        self._own = {id(module) for module in before.root.modules()}
        self._is_paused = is_paused
        self._values: dict[tuple[int, str], Any] = {}
        self._made: dict[int, nn.Module] = {}  # in forward
        self._outside: dict[int, tuple[nn.Module, Any, str]] = {}  # of the model's tree: module, what it held, name

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is set.

        Raises:
            CaptureError: an attribute of a module that is no part of the model's tree; it is as it was.
        """
        original_init: Any = nn.Module.__init__
        original_set: Any = nn.Module.__setattr__

        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if not self._is_paused() and "_modules" not in module.__dict__:  # else it was made before
                self._made[id(module)] = module
            original_init(module, *args, **kwargs)

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            if not self._is_paused():
                self._note(module, name, value)
            original_set(module, name, value)

        try:
            with patched((nn.Module, "__init__", init), (nn.Module, "__setattr__", set_attribute)):
                yield
        finally:
            for module, before, _ in self._outside.values():
                restore(module, before)
        for module, _, name in self._outside.values():
            raise CaptureError(
                f"forward sets attribute {name!r} of a {type(module).__qualname__} that is no part of the model's tree "
                "(it stands in a list, in a global, or is the model before conversion). Register it as a submodule, or "
                "return the value."
            )

    def _note(self, module: nn.Module, name: str, value: Any) -> None:
        if id(module) in self._own or self.is_made(module):
            self._values[id(module), name] = value
        else:
            self._outside.setdefault(id(module), (module, snapshot(module), name))

    @property
    def are_any(self) -> bool:
        """Whether forward has set an attribute by now."""
        return bool(self._values or self._outside)

    def is_made(self, module: nn.Module) -> bool:
        """Whether forward has made the module itself, which therefore holds nothing from before."""
        return id(module) in self._made

    def has(self, module: nn.Module, name: str) -> bool:
        """Whether forward has set an attribute, or replaced a buffer, by now."""
        return (id(module), name) in self._values

    def value(self, module: nn.Module, name: str) -> Any:
        """What forward has set it to."""
        return self._values[id(module), name]

    def check_whole(self, module: nn.Module, path: str) -> None:
        """Check that a module which a graph is to call as a whole is as it will be then: as it was before forward.

        Raises:
            CaptureError: forward has set something in it, which it may put back behind the call.
        """
        for change in self.before.changes(module):
            raise _too_late(change.title, path)

    def to_be_set(self) -> list[tuple[Attribute, Any]]:
        """The attributes that the graph of a whole forward is to set, and to what; `before` takes note of them."""
        once = self.before.set_once()
        changes = self._among(change for change in self.before.changes() if change not in once)
        self.before.taken = frozenset(change.attribute for change in changes if change.attribute)
        return [(change.attribute, change.new) for change in changes if change.attribute]

    def unchanged(self) -> Iterator[tuple[nn.Module, str, Any]]:
        """Attributes that forward has set, and that hold what they held: module, name, what that is.

        A graph does not set them, which is right as long as they hold it before a call.
        """
        changed = {(change.path, change.name) for change in self.before.changes()}
        for path, module in self._root.named_modules():
            held = self.before.attributes_of(module)
            for name in [name for name in held if self.has(module, name) and (path, name) not in changed]:
                yield module, name, held[name]

    def check_unread(self, graph: fx.Graph, titles: Sequence[str]) -> None:
        """Check that nothing which runs as a whole may read what the graph is to set behind it.

        Raises:
            CaptureError: a module that is called as a whole may read one of them, before the graph has set any.
        """
        for node in graph.find_nodes(op="call_module") if titles else ():
            module = self._root.get_submodule(str(node.target))
            if has_hooks(module) or not is_library(type(module)):
                raise _too_late(titles[0], str(node.target))

    def _among(self, changes: Iterable[Change]) -> list[Change]:
        """Those changes that forward has made by setting an attribute, to what it was set to."""
        return [
            dataclasses.replace(change, new=self.value(module, change.name))
            for change in changes
            if change.attribute and self.has(module := self._root.get_submodule(change.path), change.name)
        ]


def _too_late(title: str, path: str) -> CaptureError:
    return CaptureError(
        f"forward sets attribute {title!r} and calls {path!r}, which may read it: it stays whole, for its hooks or the "
        "state it keeps, while a graph sets attributes at the end of a call. Pass the value as an argument."
    )
