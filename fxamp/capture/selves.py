"""A model that its own parts hold: `child.parent` is the model that was converted, not what convert() returned.

Both share parameters, buffers and parts, so what is read there is right while it is the same in both. It is watched in
the converted model, and refused where the two differ.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from fxamp.capture.elements import SCALARS
from fxamp.capture.leaves import TABLES
from fxamp.capture.objects import MISSING, is_other_self, walk
from fxamp.capture.reached import named_by
from fxamp.errors import OptionError

log = logging.getLogger("fxamp")


class OtherSelves:
    """The other selves of models that Dynamo captures, which does not say what forward reads of them."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[nn.Module, nn.Module | None] = weakref.WeakKeyDictionary()
        self._said: set[str] = set()

    def check(self, root: nn.Module, forward: Callable[..., Any]) -> None:
        """Warn, once for each name, where a model and what its parts hold of it differ in a number, flag or part.

        Args:
            forward: of the user's class, whose functions may read what the parts hold.
        """
        if root not in self._known:
            self._known[root] = _other_self_of(root, forward)  # once: it looks through the whole model
        other = self._known[root]
        if other is None:
            return
        for name in sorted((other.__dict__.keys() & root.__dict__.keys()) | other._modules.keys()):
            if name in TABLES or name in self._said or not _differ(_held(other, name), _held(root, name)):
                continue
            self._said.add(name)
            log.warning("if %s", _difference(other, root, name))


def _other_self_of(root: nn.Module, forward: Callable[..., Any]) -> nn.Module | None:
    _, held = named_by(forward, root)
    found = (each for value in held for each in walk(value) if isinstance(each, nn.Module))
    return next((each for each in found if is_other_self(each, root)), None)


def check_agrees(module: nn.Module, root: nn.Module, name: str) -> None:
    """Check that what is read of a model's other self is what the model itself has.

    Raises:
        OptionError: it is not.
    """
    if _differ(_held(module, name), _held(root, name)):
        raise OptionError(_difference(module, root, name))


def _difference(module: nn.Module, root: nn.Module, name: str) -> str:
    return (
        f"forward reads {name!r} of {type(root).__qualname__} through a reference to it that a part of it keeps: that "
        f"leads to the model before conversion, where it is {_words(_held(module, name))}; of the converted model it "
        f"is {_words(_held(root, name))}. Set it on both (eval() and train() too), or let the part keep what it needs, "
        "not the model."
    )


def _held(module: nn.Module, name: str) -> Any:
    found = module.__dict__.get(name, MISSING)
    return module.__dict__.get("_modules", {}).get(name, MISSING) if found is MISSING else found


def _differ(there: Any, here: Any) -> bool:
    if there is here:
        return False
    if isinstance(there, nn.Module) and isinstance(here, nn.Module):
        return not is_other_self(there, here)
    if isinstance(there, SCALARS) and isinstance(here, SCALARS):
        return type(there) is not type(here) or there != here
    kinds = (nn.Module, *SCALARS)
    return isinstance(there, kinds) or isinstance(here, kinds) or MISSING in (there, here)


def _words(value: Any) -> str:
    if value is MISSING:
        return "missing"
    return f"another {type(value).__qualname__}" if isinstance(value, nn.Module) else repr(value)
