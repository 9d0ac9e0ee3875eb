"""The graphs of a converted model again, under other options: nothing of the model is changed."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fxamp.capture.inputs import of_each
from fxamp.capture.unseen import no_inference_mode
from fxamp.dtypes import device_of
from fxamp.model.engine import Engine
from fxamp.model.variant import Variant
from fxamp.model.views import plain_tree
from fxamp.sparse import without_numbers

REFERENCE: dict[str, Any] = {
    "overrides": {"*": "deny"},
    "pad_to": 0,
    "opt_level": "O1",
    "plan": None,
    "ranges": None,
    "output_dtype": torch.float32,
}
"""Options of a graph as an fp32 run has it: the same node names, and no cast, pad or packed weight."""


def rebuild_variant(converted: nn.Module, engine: Engine, variant: Variant, **changes: Any) -> Variant:
    """One graph again, captured again and rewritten with these fields of its options changed.

    Raises:
        Exception: what convert() raises for such options.
    """
    captured = variant.captured
    options = dataclasses.replace(engine.options, **changes)
    if variant.again is not None:
        with no_inference_mode(), torch.set_grad_enabled(captured.had_gradients):
            found = variant.again(options)
        found.is_preview = variant.is_preview
        found.captured.forget_values()
        return found
    plain = plain_tree(converted)
    inputs = None if variant.is_preview else of_each(lambda value: with_data(value, plain), captured.example or [])
    with modes_of(variant, plain):
        spec = None if variant.is_preview else captured.spec
        return engine.workshop.build(plain, spec, inputs, options, captured.live, again=captured.answers)


@contextlib.contextmanager
def modes_of(variant: Variant, plain: nn.Module) -> Iterator[None]:
    """The training flags and the grad mode that a graph was captured with; no inference mode."""
    captured = variant.captured
    with training_flags(plain, captured.training), torch.set_grad_enabled(captured.had_gradients):
        yield


def with_data(value: Any, plain: nn.Module) -> Any:
    """A tensor of an example input's type; its numbers are never read."""
    if not isinstance(value, torch.Tensor):
        return value
    return without_numbers(value, device_of(plain))


@contextlib.contextmanager
def training_flags(plain: nn.Module, flags: tuple[tuple[str, bool], ...]) -> Iterator[None]:
    """The training flags a graph was captured with; and no inference mode, as no capture is made in it."""
    modules = [(plain.get_submodule(path), flag) for path, flag in flags]
    saved = [module.training for module, _ in modules]
    for module, flag in modules:
        module.training = flag
    try:
        with no_inference_mode():
            yield
    finally:
        for (module, _), flag in zip(modules, saved, strict=True):
            module.training = flag
