"""Hooks that a graph leaves to run at each call, and what they may write that forward reads."""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from fxamp.capture.hook_writes import HookWrites
from fxamp.errors import CaptureError, OptionError
from fxamp.module_hooks import hook_dictionaries, is_traced_hook

log = logging.getLogger("fxamp")


def warn_of_hooks_on(model: nn.Module) -> None:
    """Log a warning for hooks on a model's parts that hold the model itself, and set attributes of it or read numbers:
    of this model alone, while the converted one is another object."""
    for hook in hook_writes(model):
        if names := hook.set_on(model):
            log.warning(
                "a hook on %r holds the model that is converted, and sets its %s: the converted model is another "
                "object, which does not see that. Let the hook write into a container (self.kept['key'] = "
                "...), or register it again on the converted model.",
                hook.path,
                ", ".join(names),
            )
        elif names := hook.read_from(model):
            log.warning(
                "a hook on %r holds the model that is converted, and reads its %s: the converted model is another "
                "object, and the hook does not see what is set on that. Let the hook read from a container "
                "(self.settings['key']), or register it again on the converted model.",
                hook.path,
                ", ".join(names),
            )


def hook_writes(root: nn.Module) -> Iterator[HookWrites]:
    """For every hook that stays a hook, what it can write to."""
    for path, module in root.named_modules():
        if path:
            for hooks in hook_dictionaries(module):
                yield from (HookWrites(path, hook) for hook in hooks.values() if not is_traced_hook(hook))


def check_hook_writes(
    root: nn.Module,
    found: Iterable[tuple[Any, str, Any]],
    title: Callable[[Any, str], str],
    names: frozenset[str],
) -> None:
    """Raise where forward reads what a hook may write: hooks run at each call, and a graph has read it before.

    Args:
        found: what forward has read: owner, name, value.
        title: how a message names it.
        names: of attributes that the model's functions read.

    Raises:
        CaptureError: forward reads what a hook may write.
        OptionError: a hook sets an attribute of the original model that forward reads.
    """
    hooks = list(hook_writes(root))
    read = list(found) if hooks else []
    for (owner, name, _), hook in itertools.product(read, hooks):
        if owner is root and hook.sets_on_another(root, name):
            named = title(owner, name)
            raise OptionError(
                f"a hook on {hook.path!r} sets {named} of the model it was made for, and the converted model, "
                f"whose forward reads it, is another object. Let the hook write into a container "
                f"({named}s['key'] = ...), or register it again on the converted model."
            )
    for (owner, name, value), hook in itertools.product(read, hooks):
        if hook.touch(owner, name, value, names):
            raise CaptureError(
                f"forward reads {title(owner, name)}, and a hook on {hook.path!r} may write it while forward runs, "
                "which a graph that was captured before cannot see. Return the value from the module that makes it."
            )
