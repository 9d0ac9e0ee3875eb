"""Models that convert() gave back as they were, and why: what asks about such a model answers, and does not raise."""

import contextlib
import logging
import weakref
from typing import Any

from torch import nn

from fxamp.errors import OptionError
from fxamp.ir import ENGINE
from fxamp.lists.environment import disabled_by

log = logging.getLogger("fxamp")

_left: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()
_said: set[str] = set()


def leave(model: nn.Module, reason: str) -> nn.Module:
    """The model, remembered as one that convert() was asked to leave as it is."""
    log.info("%s: the model is left as it is", reason)
    with contextlib.suppress(TypeError):  # a class may not be hashable
        _left[model] = reason
    return model


def why_left(model: Any) -> str | None:
    """Why a model that is not converted is meant to be so ("FXAMP_DISABLE=1", "opt_level='O0'"), None where it is not.

    While FXAMP_DISABLE is set this is every model.
    """
    if not isinstance(model, nn.Module):
        return None
    with contextlib.suppress(TypeError):
        if model in _left:
            return _left[model]
    return disabled_by()


def not_converted(model: Any) -> OptionError:
    """The error for a model without graphs; of a wrapper (DDP, torch.compile) it names the converted model inside."""
    kind = type(model).__qualname__
    inside = model.named_modules() if isinstance(model, nn.Module) else ()
    path = next((path for path, module in inside if ENGINE in module.__dict__), None)
    if path is None:
        return OptionError(f"this {kind} was not converted: fxamp.convert(model) returns the converted model.")
    return OptionError(f"this {kind} was not converted, the model inside it was: give it, as model.{path}.")


def check_left(model: Any, instead: str) -> None:
    """Warn, once for each question, that a model left as it is has no graph to ask.

    Args:
        instead: what the answer is then, as the end of a sentence: "find_nan looks at nothing".

    Raises:
        OptionError: the model is not one that convert() left as it is.
    """
    reason = why_left(model)
    if reason is None:
        raise not_converted(model)
    text = f"{reason}: the model runs as it is written, so {instead}."
    if text not in _said:
        _said.add(text)
        log.warning(text)
