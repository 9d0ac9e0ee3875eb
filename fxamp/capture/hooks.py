"""Hooks that a graph leaves to run at each call, and what they may write that forward reads."""

import dis
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from fxamp.capture.functions_of import codes_of, functions_in, globals_of
from fxamp.errors import CaptureError, OptionError
from fxamp.module_hooks import hook_dictionaries, is_traced_hook

log = logging.getLogger("fxamp")

_STORES = frozenset({"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "STORE_DEREF"})


class HookWrites:
    """What one hook can write to.

    Attributes:
        path: of the module that the hook is on.
    """

    def __init__(self, path: str, hook: Any) -> None:
        self.path = path
        self._stored: set[str] = set()
        self._reached: dict[int, Any] = {}
        owner = getattr(hook, "__self__", None)
        self._owner = owner
        for function in functions_in(hook):
            for code in codes_of(function.__code__):
                self._stored |= {str(i.argval) for i in dis.get_instructions(code) if i.opname in _STORES}
                for name in globals_of(code):
                    self._reach(function.__globals__.get(name))
                for name in code.co_names:
                    if owner is not None and name in getattr(owner, "__dict__", {}):
                        self._reach(owner.__dict__[name])
            for cell in function.__closure__ or ():
                self._reach(cell.cell_contents)

    def _reach(self, value: Any) -> None:
        if isinstance(value, (list, dict, set)) or (
            hasattr(value, "__dict__") and not isinstance(value, (type, types.FunctionType, types.ModuleType))
        ):
            self._reached[id(value)] = value

    def is_bound_to(self, model: nn.Module) -> bool:
        """Whether the hook is a method of the model that `model` is a view of: another object, with the same parts."""
        mine, theirs = getattr(self._owner, "_modules", None), model._modules
        return (
            type(self._owner) is type(model) and bool(theirs) and all(mine[n] is m for n, m in theirs.items() if mine)
        )

    def set_on(self, model: nn.Module) -> list[str]:
        """Names of the attributes that the hook assigns to, if it is a method of this very model."""
        return sorted(self._stored) if self._owner is model else []

    def sets(self, name: str) -> bool:
        """Whether the hook assigns to attributes of that name."""
        return name in self._stored

    def touch(self, owner: Any, name: str, value: Any) -> bool:
        """Whether the hook may write the attribute `name` of `owner`, or into the `value` that it holds."""
        is_owner = owner is self._owner or id(owner) in self._reached
        is_container = id(value) in self._reached and not isinstance(value, nn.Module)
        return (is_owner and name in self._stored) or is_container


def warn_of_hooks_on(model: nn.Module) -> None:
    """Log a warning for methods of a model that are hooks on its parts and set attributes: of this model alone, while
    the converted one is another object."""
    found = {hook.path: names for hook in hook_writes(model) if (names := hook.set_on(model))}
    for path, names in found.items():
        log.warning(
            "a hook on %r is a method of the model that is converted, and sets its %s: the converted model is another "
            "object, which does not see that. Let the hook write into a container (self.kept['key'] = ...), or "
            "register it again on the converted model.",
            path,
            ", ".join(names),
        )


def hook_writes(root: nn.Module) -> Iterator[HookWrites]:
    """For every hook that stays a hook, what it can write to."""
    for path, module in root.named_modules():
        if path:
            for hooks in hook_dictionaries(module):
                yield from (HookWrites(path, hook) for hook in hooks.values() if not is_traced_hook(hook))


def check_hook_writes(root: nn.Module, found: Iterable[tuple[Any, str, Any]], title: Callable[[Any, str], str]) -> None:
    """Raise where forward reads what a hook may write: hooks run at each call, and a graph has read it before.

    Args:
        found: what forward has read: owner, name, value.
        title: how a message names it.

    Raises:
        CaptureError: forward reads what a hook may write.
        OptionError: a hook sets an attribute of the original model that forward reads.
    """
    hooks = list(hook_writes(root))
    for owner, name, value in found if hooks else ():
        named = title(owner, name)
        for hook in hooks:
            if owner is root and hook.sets(name) and hook.is_bound_to(root):
                raise OptionError(
                    f"a hook on {hook.path!r} sets {named} of the model it was made for, and the converted model, "
                    f"whose forward reads it, is another object. Let the hook write into a container "
                    f"({named}s['key'] = ...), or register it again on the converted model."
                )
            if hook.touch(owner, name, value):
                raise CaptureError(
                    f"forward reads {named}, and a hook on {hook.path!r} may write it while forward runs, which a "
                    "graph that was captured before cannot see. Return the value from the module that makes it."
                )
