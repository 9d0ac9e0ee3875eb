"""Which autocast a converted model runs under: none."""

from collections.abc import Callable
from typing import Any

import torch

from fxamp.dtypes import AUTOCAST_KINDS


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
