"""A model that its own parts hold: `child.parent` is the model that was converted, not what convert() returned.

Both share parameters, buffers and parts, so what is read there is right while it is the same in both. It is watched in
the converted model, and refused where the two differ.
"""

from typing import Any

from torch import nn

from fxamp.capture.objects import MISSING, SCALARS, is_other_self
from fxamp.errors import OptionError


def check_agrees(module: nn.Module, root: nn.Module, name: str) -> None:
    """Check that what is read of a model's other self is what the model itself has.

    Raises:
        OptionError: it is not.
    """
    there, here = _held(module, name), _held(root, name)
    if not _differ(there, here):
        return
    raise OptionError(
        f"forward reads {name!r} of {type(root).__qualname__} through a reference that one of its parts keeps to it. "
        f"That leads to the model before conversion, where it is {_words(there)}; of the converted model it is "
        f"{_words(here)}. Set it on both (eval() and train() too), or let the part keep what it needs, not the model."
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
