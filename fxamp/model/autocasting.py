"""Which autocast a converted model runs under: none; and what of it runs as it is written, under its own."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxamp.dtypes import AUTOCAST_KINDS

running = threading.local()
"""view: the innermost that is called; is_on: whether autocast was switched on around the innermost forward that runs as
it is written; has_gradients: whether gradients were on around the outermost one."""


def outside_autocast(run: Callable[..., Any], *args: Any) -> Any:
    """A converted model inside an autocast region makes its own casts, and only those.

    It turns the switches themselves: a region of `torch.autocast` costs as much as a few launches, and a forward that
    runs as it is written comes here for each of its parts.
    """
    on = [device for device in AUTOCAST_KINDS if torch.is_autocast_enabled(device)]
    if not on:
        return run(*args)
    if torch.compiler.is_compiling():  # Dynamo knows regions
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return run(*args)
    for device in on:
        torch.set_autocast_enabled(device, False)
    try:
        return run(*args)
    finally:
        for device in on:
            torch.set_autocast_enabled(device, True)


@contextlib.contextmanager
def autocast_around(device: str, low: torch.dtype, is_on: bool) -> Iterator[None]:
    """torch.autocast around a forward that runs as it is written, off for one that an override denies; noted, for
    forward may switch it off, and gradients, too."""
    before, had_gradients = getattr(running, "is_on", True), getattr(running, "has_gradients", False)
    running.is_on, running.has_gradients = is_on, had_gradients or torch.is_grad_enabled()
    try:
        with torch.autocast(device, dtype=low, enabled=is_on):
            yield
    finally:
        running.is_on, running.has_gradients = before, had_gradients
