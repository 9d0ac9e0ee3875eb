"""Run a model's forward without leaving a trace on it, and tell which attributes it has set."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from fxamp.capture.leaves import TABLES
from fxamp.capture.objects import MISSING
from fxamp.capture.settings import Settings, Table
from fxamp.errors import CaptureError
from fxamp.inplace import mutated
from fxamp.ir import ENGINE
from fxamp.module_hooks import HOOKS, is_traced_hook, recomputed_weights
from fxamp.paths import module_at

# What nn.Module itself keeps there steers torch: `self.eval()` in forward is no value that a graph computes.
_OF_TORCH = frozenset({*nn.Module().__dict__, "forward", ENGINE})


@dataclasses.dataclass(frozen=True)
class Attribute:
    """An attribute of a module of a model that forward sets: a plain one, or a buffer that it replaces.

    Attributes:
        path: of the module.
        is_buffer: whether it is registered as one.
    """

    path: str
    name: str
    is_buffer: bool = False

    @property
    def title(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")

    def put(self, root: nn.Module, value: Any) -> None:
        """Set it; what the class does when it is set was done, and captured, in the trace."""
        self._table(root)[self.name] = value

    def put_back(self, root: nn.Module, value: Any) -> None:
        """Make it what `held_in` gave: set, or not there."""
        if value is MISSING:
            self._table(root).pop(self.name, None)
        else:
            self.put(root, value)

    def held_in(self, root: nn.Module) -> Any:
        """What it holds; MISSING where there is none."""
        return self._table(root).get(self.name, MISSING)

    def _table(self, root: nn.Module) -> dict[str, Any]:
        module = module_at(root, self.path)
        return module._buffers if self.is_buffer else module.__dict__


@dataclasses.dataclass(frozen=True)
class Change:
    """What is other in a module than it was.

    Attributes:
        table: "__dict__", or the name of the dictionary of torch's in it.
        name: the attribute, or the key.
    """

    path: str
    table: str
    name: Any
    old: Any
    new: Any

    @property
    def title(self) -> str:
        name = self.name if isinstance(self.name, str) else self.table  # a hook has a number
        return f"{self.path}.{name}".lstrip(".")

    @property
    def attribute(self) -> Attribute | None:
        """The attribute that a graph can set, None where it is something else."""
        if self.new is MISSING or not isinstance(self.name, str) or isinstance(self.new, nn.Parameter):
            return None
        if self.table == "_buffers" and self.old is not MISSING:
            return Attribute(self.path, self.name, is_buffer=True)
        if self.table == "__dict__" and self.name not in _OF_TORCH:
            return Attribute(self.path, self.name)
        return None

    @property
    def is_traced_hook(self) -> bool:
        """Whether forward has set a hook that is a part of it."""
        return self.table in HOOKS and self.old is MISSING and is_traced_hook(self.new)

    @property
    def is_flag(self) -> bool:
        """Whether forward has noted something as done, such as that its hooks are there."""
        return self.attribute is not None and self.new is True and (self.old is MISSING or self.old is False)


class State:
    """What the modules of a model hold, as it was before forward ran.

    Attributes:
        taken: the attributes that the graph sets as forward does.
        settings: the hooks that are parts of forward, and what it has set with them: perhaps in its first call alone.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        own = [(path, part) for path, part in root.named_modules() if not isinstance(part, torch.jit.ScriptModule)]
        self._before = {id(module): (path, module, snapshot(module)) for path, module in own}
        self.taken: frozenset[Attribute] = frozenset()
        self.settings: Settings | None = None

    def changes(self, within: nn.Module | None = None) -> Iterator[Change]:
        """What forward has set, changed or removed: in the whole model, or within a part of it."""
        parts = self._before if within is None else filter(self._before.__contains__, map(id, within.modules()))
        for path, module, saved in map(self._before.__getitem__, parts):
            yield from _changes(path, module, saved)

    def set_once(self) -> list[Change]:
        """Hooks that are parts of forward, if it has set any, and the flags that it has set with them."""
        changes = list(self.changes())
        has_hooks = any(change.is_traced_hook for change in changes)
        return [change for change in changes if change.is_traced_hook or change.is_flag] if has_hooks else []

    def settings_of(self, changes: list[Change]) -> Settings | None:
        """How these changes are made again."""
        parts = [(Table(change.path, change.table), change.name, change.old, change.new) for change in changes]
        return Settings(tuple(parts), _refusal(changes[0])) if changes else None

    def attributes_of(self, module: nn.Module) -> dict[str, Any]:
        """What a module's attributes held; nothing of one that is not the model's."""
        return self._before[id(module)][2]["__dict__"] if id(module) in self._before else {}

    def held(self) -> Iterator[Any]:
        """What the modules' attributes held."""
        for _, _, saved in self._before.values():
            yield from saved["__dict__"].values()

    def restore(self) -> None:
        for _, module, saved in self._before.values():
            restore(module, saved)


@contextlib.contextmanager
def untouched(state: State) -> Iterator[None]:
    """Restore every attribute of every module on leaving; one that forward has set, and no graph would, is an error.

    What it may have set for its first call alone is noted in the state.

    Raises:
        CaptureError: forward set, changed or removed an attribute; the model is as before.
    """
    changed: list[Change] = []
    try:
        yield
        once = state.set_once()
        state.settings = state.settings_of(once)
        changed = [change for change in state.changes() if change.attribute not in state.taken and change not in once]
    finally:
        state.restore()
    if changed:
        raise CaptureError(_refusal(changed[0]))


def _refusal(change: Change) -> str:
    return (
        f"forward sets attribute {change.title!r}, and a graph holds no such writes. Return the value instead, "
        "write a buffer in place (self.buffer.copy_(value)), or convert the submodules that do the work."
    )


def snapshot(module: nn.Module) -> dict[str, dict[str, Any]]:
    """What a module holds now."""
    dictionaries = {name: value for name, value in module.__dict__.items() if name in TABLES}
    return {"__dict__": dict(module.__dict__), **{name: dict(value) for name, value in dictionaries.items()}}


def _changes(path: str, module: nn.Module, saved: dict[str, dict[str, Any]]) -> Iterator[Change]:
    for table, entries in saved.items():
        now = module.__dict__ if table == "__dict__" else module.__dict__[table]
        for name in [*entries, *(name for name in now if name not in entries)]:
            if name in TABLES or name in recomputed_weights(module):
                continue
            old, new = entries.get(name, MISSING), now.get(name, MISSING)
            change = Change(path, table, name, old, new)
            if old is not new and not _is_same_plain_value(old, new) and not _is_written_in_place(new, change.title):
                yield change


def _is_same_plain_value(old: Any, new: Any) -> bool:
    if type(old) is tuple and type(new) is tuple:
        return len(old) == len(new) and all(map(_is_same_plain_value, old, new))
    return type(old) is type(new) and isinstance(old, (bool, int, float, str)) and old == new


def _is_written_in_place(new: Any, path: str) -> bool:
    """Whether a traced value is the attribute itself after an in-place write (`self.count += 1`)."""
    node = new.node if issubclass(type(new), fx.Proxy) else None
    while isinstance(node, fx.Node):
        if node.op == "get_attr":
            return node.target == path and isinstance(node.meta.get("val"), torch.Tensor)
        node = next(iter(mutated(node)), None)
    return False


def restore(module: nn.Module, saved: dict[str, dict[str, Any]]) -> None:
    """Let it hold that again."""
    for owner in TABLES:
        if owner in saved:
            _put_back(saved["__dict__"][owner], saved[owner])
    _put_back(module.__dict__, saved["__dict__"])


def _put_back(entries: dict[str, Any], before: dict[str, Any]) -> None:
    """Entries as they were; what is as it was is left alone, for other threads may be running the module."""
    for name in [name for name in entries if name not in before]:
        del entries[name]
    for name, value in before.items():
        if entries.get(name, MISSING) is not value:
            entries[name] = value
    if list(entries) != list(before):  # one was taken away and is back at the end
        for name, value in before.items():
            del entries[name]
            entries[name] = value
