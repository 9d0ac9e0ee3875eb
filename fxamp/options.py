"""The arguments of convert(): what they may be, checked before anything is touched."""

import dataclasses
import functools
import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fxamp.dtypes import AUTOCAST_KINDS, device_of, dtype_name, resolve_dtype
from fxamp.errors import CaptureError, OptionError, nearest
from fxamp.ir import Colour
from fxamp.lists import COLOURS, OpLists
from fxamp.model.engine import Engine
from fxamp.model.views import nested
from fxamp.passes.policy import LEVELS, Level
from fxamp.runtime.masters import MASTER, is_stored_low

log = logging.getLogger("fxamp")

OPT_LEVELS = ("O0", "O1", "O2", "O3")
CAPTURES = ("auto", "symbolic", "dynamo")
PADS = ("auto", "always")
TESTED_TORCH = (2, 11), (2, 13)
"""The oldest and the newest torch (major, minor) that the tests have passed with."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What convert() was asked for, checked; it pickles with the converted model.

    Attributes:
        is_part: of a part of a forward that runs as it is written.
    """

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
    is_part: bool = False


def module_of(model: Any) -> Any:
    """The module that an exported program (torch.export) holds; anything else as it is."""
    is_program = "torch.export" in sys.modules and isinstance(model, torch.export.ExportedProgram)
    return model.module() if is_program else model


def check_model(model: Any) -> None:
    """Raise an OptionError for what cannot be converted."""
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"model is a {type(model).__qualname__}, not an nn.Module. Pass the module itself, not a function, "
            "an optimizer or an output."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise OptionError("model is a scripted module (torch.jit). Convert the nn.Module it was scripted from.")
    if isinstance(model, nn.DataParallel):
        raise OptionError(
            "model is wrapped in DataParallel, which copies the module at every call, and each copy would be captured "
            "anew. Use a process for each GPU: DistributedDataParallel(fxamp.convert(module))."
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise OptionError(
            f"model is wrapped in {type(model).__name__}. Convert first and wrap after: "
            f"{type(model).__name__}(fxamp.convert(model))."
        )
    if type(model).__name__ == "OptimizedModule":
        raise OptionError("model is compiled. Convert first and compile after: torch.compile(fxamp.convert(model)).")
    tensors = [*model.parameters(), *model.buffers()]
    if any(map(is_lazy, tensors)):
        raise OptionError(
            f"{type(model).__qualname__} has lazy modules, whose parameters have no shape yet. Call it once, then "
            "convert it."
        )
    for kind in AUTOCAST_KINDS:
        if torch.is_autocast_enabled(kind):
            raise OptionError(
                f"convert() was called inside torch.autocast({kind!r}). Call it outside: a converted model needs no "
                "autocast."
            )


def say_what_is_inside(model: nn.Module, has_boundaries: bool) -> None:
    """Tell of submodules that were converted before: their plain forwards become parts of this model's.

    A class without a forward, as a LightningModule may be whose training_step calls its parts, is warned about.
    """
    forward: Any = type(model).forward
    if forward is nn.Module.forward and not has_boundaries:
        parts = [name for name, part in model.named_children() if any(True for _ in part.parameters())]
        name = type(model).__qualname__
        remedy = f", such as model.{parts[0]} = fxamp.convert(model.{parts[0]})" if parts else ""
        text = "%s has no forward, so nothing of it is converted: convert the parts that its other methods call%s."
        log.warning(text, name, remedy)
    if paths := nested(model):
        text = "%s holds converted models (%s): in it they run as parts of it, with its options"
        log.info(text, type(model).__qualname__, ", ".join(paths))


def check_stored(model: nn.Module, low: torch.dtype) -> None:
    """Raise an OptionError for parameters that a conversion (O2, O3) lowered, and that have another low dtype now."""
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_stored_low(tensor) and tensor.dtype != low:
            raise OptionError(
                f"{path} was lowered by opt_level O2 or O3 and is {dtype_name(tensor.dtype)} now, and "
                f"{type(model).__qualname__} is to run in {dtype_name(low)}. Convert with "
                f"dtype=torch.{dtype_name(tensor.dtype)}, or build the model anew."
            )


def check_whole(path: str, module: nn.Module) -> None:
    """Raise a CaptureError for a module that is to run as a whole, in float32, and holds parameters that O2 lowered."""
    for name, tensor in module.named_parameters():
        if is_stored_low(tensor) and hasattr(tensor, MASTER):
            raise CaptureError(
                f"{path!r} has hooks (pruning is one), for which a graph runs it as a whole, in float32, and "
                f"opt_level='O2' has stored its {name} in {dtype_name(tensor.dtype)}. Hooks that are there before "
                "convert() leave its parameters in float32; capture='auto' needs no graph around it."
            )


@functools.cache
def warn_of_untested_torch(version: str) -> None:
    """Log a warning, once, for a torch that is newer or older than those this package was tested with."""
    major, minor = map(int, version.split(".")[:2])
    oldest, newest = TESTED_TORCH
    if not oldest <= (major, minor) <= newest:
        log.warning(
            "torch %s: fxamp is tested with torch %d.%d to %d.%d. fxamp.compare(model, converted, inputs) tells "
            "whether the numbers are right with yours",
            version,
            *oldest,
            *newest,
        )


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
    warn_of_untested_torch(torch.__version__)
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


def differing(model: nn.Module, known: Options, asked: Options, names_dtype: bool, stays: bool) -> tuple[str, ...]:
    """The options in which a converted model differs from what convert() is asked for now.

    None of them where all that is asked for is the defaults: `convert(model)` of a converted model means that model.

    Args:
        names_dtype: whether the dtype was asked for; else it is the device's default.
        stays: whether the model stays as it is where none differs, which is told then.

    Raises:
        OptionError: they differ, and the model's parameters are low already (O2, O3).
    """
    names = tuple(field.name for field in dataclasses.fields(Options) if not _same(field.name, known, asked))
    if not names:
        return ()
    name = type(model).__qualname__
    defaults = check_options(device_of(model))
    if not names_dtype and all(_same(field.name, asked, defaults) for field in dataclasses.fields(Options)):
        kept = ", ".join(f"{_ARGUMENTS.get(field, field)}={_shown(known, field)}" for field in names)
        if stays:
            log.info("%s is converted already, with %s, and stays as it is", name, kept)
        return ()
    changes = ", ".join(
        f"{_ARGUMENTS.get(field, field)}={_shown(asked, field)} instead of {_shown(known, field)}" for field in names
    )
    if known.opt_level in ("O2", "O3"):
        raise OptionError(
            f"{name} is converted already, and cannot be converted again with {changes}: "
            f"opt_level={known.opt_level!r} has lowered its parameters. Convert a model that was built anew "
            "(its state_dict() is float32 and loads there)."
        )
    log.info("%s is converted again, with %s", name, changes)
    return names


def check_blocks(model: nn.Module, known: Engine, asked: tuple[str, ...], changed: tuple[str, ...]) -> None:
    """Raise an OptionError where a converted model's boundaries would have to change with it.

    Args:
        asked: paths that `boundaries=` names now.
        changed: the options that differ.
    """
    if known.boundaries and (changed or (asked and set(asked) != set(known.boundaries))):
        different = ", ".join(_ARGUMENTS.get(field, field) for field in changed) or f"boundaries={list(asked)}"
        raise OptionError(
            f"{type(model).__qualname__} is converted already, with boundaries={list(known.boundaries)}, and cannot be "
            f"converted again with another {different}. Convert the original model."
        )


_ARGUMENTS = {"low": "dtype"}
"""Options whose argument of convert() has another name."""


def _same(field: str, one: Options, other: Options) -> bool:
    mine, theirs = getattr(one, field), getattr(other, field)
    if field == "ranges" and mine is not None and theirs is not None:
        return bool(mine.content(one.low) == theirs.content(one.low))
    return mine is theirs or bool(mine == theirs)


def _shown(options: Options, field: str) -> str:
    value = getattr(options, field)
    return repr(value) if isinstance(value, (str, int, torch.dtype, type(None), dict)) else type(value).__name__


def _choose(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
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
        _choose(f"overrides[{key!r}]", colour, COLOURS)
    return dict(overrides)
