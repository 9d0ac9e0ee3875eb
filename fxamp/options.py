"""The arguments of convert(): what they may be, checked before anything is touched."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fxamp.converted import engine_of
from fxamp.dtypes import resolve_dtype
from fxamp.errors import OptionError, nearest
from fxamp.ir import Colour
from fxamp.lists import OpLists
from fxamp.passes.rules import LEVELS, Level

OPT_LEVELS = ("O0", "O1", "O2", "O3")
CAPTURES = ("auto", "symbolic", "dynamo")
PADS = ("auto", "always")


@dataclasses.dataclass(frozen=True)
class Options:
    """What convert() was asked for, checked; it pickles with the converted model."""

    low: torch.dtype
    opt_level: str
    level: Level
    lists: OpLists
    overrides: Mapping[str, Colour]
    pad_to: int
    pad: str
    capture: str
    output_dtype: torch.dtype | None
    plan: Any = None
    ranges: Any = None


def check_model(model: Any) -> None:
    """Raise an OptionError for what cannot be converted."""
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"model is a {type(model).__qualname__}, not an nn.Module. Pass the module itself, not a function, "
            "an optimizer or an output."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise OptionError("model is a scripted module (torch.jit). Convert the nn.Module it was scripted from.")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise OptionError(
            f"model is wrapped in {type(model).__name__}. Convert first and wrap after: "
            f"{type(model).__name__}(fxamp.convert(model))."
        )
    if type(model).__name__ == "OptimizedModule":
        raise OptionError("model is compiled. Convert first and compile after: torch.compile(fxamp.convert(model)).")
    tensors = [*model.parameters(), *model.buffers()]
    if engine_of(model) is None and not any(t.is_floating_point() for t in tensors):
        raise OptionError(f"{type(model).__qualname__} has no floating-point parameters: there is nothing to convert.")
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            raise OptionError(
                f"convert() was called inside torch.autocast({kind!r}). Call it outside: a converted model needs no "
                "autocast."
            )


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def check_options(
    device: torch.device,
    dtype: Any = None,
    opt_level: Any = "O1",
    level: Any = "balanced",
    lists: Any = None,
    overrides: Any = None,
    pad_to: Any = 8,
    pad: Any = "auto",
    capture: Any = "auto",
    output_dtype: Any = torch.float32,
) -> Options:
    """The arguments of convert(), checked."""
    if isinstance(opt_level, str) and opt_level.startswith("0"):
        raise OptionError(f"opt_level={opt_level!r} starts with a zero. Allowed, with the letter O: {OPT_LEVELS}.")
    _choose("opt_level", opt_level, OPT_LEVELS)
    _choose("level", level, LEVELS)
    _choose("capture", capture, CAPTURES)
    _choose("pad", pad, PADS)
    if capture == "dynamo" and opt_level in ("O2", "O3"):
        raise OptionError(f"capture='dynamo' does not go with opt_level={opt_level!r} yet. Use 'symbolic', or O1.")
    if pad_to is not None and (isinstance(pad_to, bool) or not isinstance(pad_to, int) or pad_to < 0):
        raise OptionError(f"pad_to={pad_to!r} is not allowed. Give a positive integer, or 0 or None for no padding.")
    if lists is not None and not isinstance(lists, OpLists):
        raise OptionError(
            f"lists is a {type(lists).__qualname__}. Give fxamp.OpLists, "
            "such as OpLists.default().override(deny=['exp'])."
        )
    if output_dtype is not None and not (isinstance(output_dtype, torch.dtype) and output_dtype.is_floating_point):
        raise OptionError(f"output_dtype={output_dtype!r} is not allowed. Give a floating torch dtype, or None.")
    return Options(
        low=resolve_dtype(dtype, device),
        opt_level=opt_level,
        level=level,
        lists=lists if lists is not None else OpLists.default().with_environment(),
        overrides=_check_overrides(overrides),
        pad_to=pad_to or 0,
        pad=pad,
        capture=capture,
        output_dtype=output_dtype,
    )


def _choose(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(
            f"{name}={value!r} is not allowed. Allowed: {', '.join(allowed)}.{nearest(str(value), allowed)}"
        )


def _check_overrides(overrides: Any) -> dict[str, Colour]:
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise OptionError(
            f"overrides is a {type(overrides).__qualname__}. Give a dict such as {{'encoder.layer.3': 'deny'}}."
        )
    for key, colour in overrides.items():
        _choose(f"overrides[{key!r}]", colour, ("allow", "infer", "deny", "clear"))
    return dict(overrides)
