"""Methods by which a model is used when it is trained, where its weights are stored low (O2, O3).

`generate` of transformers calls an encoder by itself, `sample` of a diffusion model its network: parts as they are,
with low weights, beside float32 values. They run as under torch.autocast there.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxamp.dtypes import autocast_kind, device_of
from fxamp.ir import ENGINE

NAMES = ("generate", "sample")


def under_autocast(base: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Those methods of a user's class, by name, as they are to run."""
    found = {name: inspect.getattr_static(base, name, None) for name in NAMES}
    return {name: _under_autocast(method) for name, method in found.items() if inspect.isfunction(method)}


def _under_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        engine = self.__dict__.get(ENGINE)
        if engine is None or engine.options.opt_level == "O1":
            return method(self, *args, **kwargs)
        with torch.autocast(autocast_kind(device_of(self)), engine.options.low):
            return method(self, *args, **kwargs)

    return called
