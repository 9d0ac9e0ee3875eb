"""A model that is converted, and trained without its rewritten forward: nothing runs low then, and that is said."""

import logging
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxamp.model.engine import Engine, engine_of
from fxamp.words import listed

log = logging.getLogger("fxamp")

_NAMED = 3
"""Submodules that are named."""
_LOOKS = 100
"""Optimizers' steps at which a model without gradients is looked at, which takes a moment for each parameter."""

_NOT_CALLED = (
    "%s was converted and is trained, but what convert() returned has not been called while gradients were on: methods "
    "that call its submodules (%s) run them as they are, in float32. Call the converted model, or name the submodules "
    "that its methods call in boundaries=, which converts each by itself."
)
_REPLACED = (
    "%s was converted and is trained, but what convert() returned has another forward now (model.forward = ...), which "
    "has not called the converted one while gradients were on: submodules (%s) that it calls run as they are, in "
    "float32. Name those in boundaries=, which converts each by itself."
)

_waiting: list[tuple["weakref.ref[nn.Module]", int]] = []
_hooks: list[Any] = []


def watch_for_a_call(converted: nn.Module) -> None:
    """Warn at an optimizer's step if the model has gradients by then, and was never called while they were on.

        z = vae.encode(x)  # a method that calls submodules runs them as they are, in float32
        loss_fn(vae.decode(z), x).backward()

    A trainer that puts a forward of its own on the model (`model.forward = ...`), which calls its parts, does the same.
    Parameters that a model which was called has too say nothing: those of a converted model inside of a converted one,
    or of a model that was converted twice.
    """
    _waiting.append((weakref.ref(converted), _LOOKS))
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_look))


def _look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _waiting or torch.compiler.is_compiling():
        return
    models = [(model, reference, looks) for reference, looks in _waiting if (model := reference()) is not None]
    called = [model for model, _, _ in models if _is_called(engine_of(model))]
    met = {id(parameter) for model in called for parameter in model.parameters()}
    _waiting.clear()
    for model, reference, looks in models:
        own = list(model.parameters())
        others = [parameter for parameter in own if id(parameter) not in met]
        if any(parameter.grad is not None for parameter in others):
            _warn(model)
        elif len(others) == len(own) and looks > 1:  # what is shared has gradients of the other model later on
            _waiting.append((reference, looks - 1))


def _is_called(engine: Engine | None) -> bool:
    return engine is None or engine.is_trained or any(map(_is_called, engine.blocks.values()))


def _warn(model: nn.Module) -> None:
    parts = [path for path, part in model.named_children() if any(True for _ in part.parameters())]
    text = _REPLACED if "forward" in vars(model) else _NOT_CALLED
    log.warning(text, type(model).__qualname__, listed(parts, _NAMED))
