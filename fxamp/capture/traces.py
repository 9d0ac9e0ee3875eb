"""Run a model's forward without leaving a trace on it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from fxamp.capture.leaves import TABLES, recomputed_weights
from fxamp.capture.objects import MISSING
from fxamp.errors import CaptureError
from fxamp.inplace import mutated


@contextlib.contextmanager
def untouched(root: nn.Module) -> Iterator[None]:
    """Restore every attribute of every module on leaving; an attribute that forward sets is an error.

    A graph holds no attribute writes, so a converted model would silently stop making them.

    Raises:
        CaptureError: forward set, changed or removed an attribute; the model is as before.
    """
    own = [(path, module) for path, module in root.named_modules() if not isinstance(module, torch.jit.ScriptModule)]
    before = [(path, module, _snapshot(module)) for path, module in own]
    changed: list[str] = []
    try:
        yield
        changed = [found for path, module, saved in before if (found := _difference(path, module, saved))]
    finally:
        for _, module, saved in before:
            _restore(module, saved)
    if changed:
        raise CaptureError(
            f"forward sets {changed[0]}, and a graph holds no attribute writes. Return the value instead, "
            "write a buffer in place (self.buffer.copy_(value)), or convert the submodules that do the work."
        )


def _snapshot(module: nn.Module) -> dict[str, dict[str, Any]]:
    dictionaries = {name: value for name, value in module.__dict__.items() if name in TABLES}
    return {"__dict__": dict(module.__dict__), **{name: dict(value) for name, value in dictionaries.items()}}


def _difference(path: str, module: nn.Module, saved: dict[str, dict[str, Any]]) -> str:
    for owner, entries in saved.items():
        now = module.__dict__ if owner == "__dict__" else module.__dict__[owner]
        for name in [*entries, *(name for name in now if name not in entries)]:
            if name in TABLES or name in recomputed_weights(module):
                continue
            full = f"{path}.{name if isinstance(name, str) else owner}".lstrip(".")  # a hook has a number
            old, new = entries.get(name, MISSING), now.get(name, MISSING)
            if old is not new and not _is_same_plain_value(old, new) and not _is_written_in_place(new, full):
                return f"attribute {full!r}"
    return ""


def _is_same_plain_value(old: Any, new: Any) -> bool:
    if isinstance(old, (torch.Tensor, fx.Proxy)) or isinstance(new, (torch.Tensor, fx.Proxy)):
        return False
    if type(old) is not type(new) or not isinstance(old, (bool, int, float, str, tuple)):
        return False
    return bool(old == new)


def _is_written_in_place(new: Any, path: str) -> bool:
    """Whether a traced value is the attribute itself after an in-place write (`self.count += 1`)."""
    node = new.node if issubclass(type(new), fx.Proxy) else None
    while isinstance(node, fx.Node):
        if node.op == "get_attr":
            return node.target == path
        node = next(iter(mutated(node)), None)
    return False


def _restore(module: nn.Module, saved: dict[str, dict[str, Any]]) -> None:
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
