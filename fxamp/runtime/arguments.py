"""Checks of arguments that several of the runtime's functions and classes take."""

import functools
import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from fxamp.errors import OptionError, nearest

DEVICES = ("cpu", "cuda", "hpu", "mps", "mtia", "xla", "xpu")  # for the hint


def is_finite(value: object) -> bool:
    """Whether a value is a number that a float holds; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def number_in(value: Any) -> Any:
    """What numpy's scalars and tensors of one element hold, as Python's number; any other value itself."""
    is_scalar = type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0
    return value.item() if is_scalar or (isinstance(value, torch.Tensor) and value.numel() == 1) else value


def checked_flag(name: str, value: Any) -> bool:
    """A flag as a bool; None is off (as argparse gives it), and 1, 0 and those of numpy and torch count as flags.

    Raises:
        OptionError: anything else, such as the text "no", which Python takes for True.
    """
    plain = number_in(value)
    if plain is None or (isinstance(plain, int) and plain in (0, 1)):
        return bool(plain)
    raise OptionError(f"{name}={value!r} must be True or False.")


def checked_device(device: Any) -> torch.device | None:
    """A device, of which this machine need not have one; None stays None.

    Raises:
        OptionError: no device's name.
    """
    if device is None:
        return None
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise OptionError(
            f"device={device!r} is no device: give torch.device('cpu'), 'cuda', 'cuda:1' or None."
            + (nearest(device.split(":")[0], DEVICES) if isinstance(device, str) else "")
        ) from None


def checked_group(group: Any) -> Any:
    """A group of ranks, or None.

    Raises:
        OptionError: another object; says what it is, and where groups come from.
    """
    if group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return group
    raise OptionError(
        f"process_group is a {type(group).__name__}; give what torch.distributed.new_group() or mesh.get_group() "
        "returns, torch.distributed.group.WORLD, or None where ranks share no gradients."
    )


def check_names(called: str, options: Iterable[str], known: Iterable[str], hint: str = "") -> None:
    """Refuse keywords that a function has not.

        check_names("scaler_for()", ["max_skip"], ["max_skips"])    # raises

    Raises:
        OptionError: names the keyword, and the nearest that there is.
    """
    known = list(known)
    for name in options:
        if name not in known:
            raise OptionError(
                f"{name} is no option of {called}. Allowed: {', '.join(known)}.{nearest(name, known)}{hint}"
            )


def check_needs_no_closure(optimizer: Any, called: str) -> None:
    """Refuse an optimizer that re-evaluates the model, where nothing says how.

    Raises:
        OptionError: names the optimizer, and how it is stepped.
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # of one with masters
    if _needs_closure(type(inner)):  # type: ignore[arg-type]  # classes are hashable
        raise OptionError(
            f"{called}: {type(inner).__name__} re-evaluates the model, so its step needs a closure: "
            "scaler.step(optimizer, closure=evaluate), where evaluate() zeroes gradients, calls backward() of the "
            "scaled loss and returns the loss."
        )


@functools.cache
def _needs_closure(kind: type) -> bool:
    step = getattr(kind, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if step is not None else None
    return closure is not None and closure.default is inspect.Parameter.empty


def refuse_containers(outputs: Any) -> None:
    """Refuse to scale what torch's scaler would walk through without an error: texts, dicts, sets and arrays.

    Raises:
        OptionError: says what to give.
    """
    if isinstance(outputs, str | bytes | Mapping | set | frozenset):
        values = "list(outputs.values())" if isinstance(outputs, Mapping) else "a list of the tensors"
        raise OptionError(f"scale() was given a {type(outputs).__name__}; give it one loss, or {values}.")
    if type(outputs).__module__ == "numpy":
        raise OptionError(
            f"scale() was given numpy's {type(outputs).__name__}, which has no gradient; give it the loss."
        )
    if isinstance(outputs, list | tuple):
        for each in outputs:
            refuse_containers(each)
