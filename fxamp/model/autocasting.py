"""Which autocast a converted model runs under: none."""

from collections.abc import Callable
from typing import Any

import torch


def outside_autocast(run: Callable[..., Any], *args: Any) -> Any:
    """A converted model inside an autocast region makes its own casts, and only those."""
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return run(*args)
    return run(*args)
