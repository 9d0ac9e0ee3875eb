"""The float32 master of a low-precision parameter: where it is kept, how it stays true to the parameter.

A master hangs on its Parameter as the attribute `_fxamp_master`. So it lives as long as the parameter,
survives a new optimizer, is pickled with the model, and is not shared by `copy.deepcopy`, which drops
attributes.
"""

import torch

from fxamp.dtypes import LOW_DTYPES, dtype_name
from fxamp.errors import OptionError
from fxamp.runtime.distributed import local

MASTER = "_fxamp_master"
VERSION = "_fxamp_master_version"


def master_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The float32 value of a low-precision parameter, or None if it has no master.

    A parameter written by someone else since the last step wins over its master, element by element.
    """
    master: torch.Tensor | None = getattr(parameter, MASTER, None)
    if master is not None and getattr(parameter, VERSION, None) != parameter._version:
        reconcile_(parameter)
    return master


def set_master(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Give a low-precision parameter an exact float32 value: the master takes it, the parameter its rounding.

    For a parameter without a master (already float32, or no master-weight optimizer) it is a plain copy.

    Raises:
        OptionError: the shapes differ.
    """
    if value.shape != parameter.shape:
        raise OptionError(
            f"set_master() got a value of shape {tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}."
        )
    with torch.no_grad():
        parameter.copy_(value)
        master: torch.Tensor | None = getattr(parameter, MASTER, None)
        if master is not None:
            master.copy_(value)
            remember_version(parameter)


def ensure_master(parameter: torch.Tensor) -> torch.Tensor:
    """The master of a low-precision parameter, made by widening it if there is none."""
    master = master_of(parameter)
    if master is None:
        master = parameter.detach().float()
        attach_master(parameter, master)
    return master


def attach_master(parameter: torch.Tensor, master: torch.Tensor) -> None:
    """Make `master` (float32, same shape) the parameter's master; it is not copied."""
    if master.dtype != torch.float32 or master.shape != parameter.shape:
        raise OptionError(
            f"a master is float32 of shape {tuple(parameter.shape)}, got {dtype_name(master.dtype)} of "
            f"{tuple(master.shape)}."
        )
    setattr(parameter, MASTER, master)
    remember_version(parameter)


def detach_master(parameter: torch.Tensor) -> None:
    """Forget a parameter's master."""
    for name in (MASTER, VERSION):
        if hasattr(parameter, name):
            delattr(parameter, name)


def remember_version(parameter: torch.Tensor) -> None:
    """Note that parameter and master agree now."""
    setattr(parameter, VERSION, parameter._version)


def round_into(parameters: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
    """Give parameters the rounding of their masters, in one multi-tensor copy."""
    if parameters:
        torch._foreach_copy_([local(p.detach()) for p in parameters], [local(m) for m in masters])
    for parameter in parameters:
        remember_version(parameter)


def reconcile_(parameter: torch.Tensor) -> None:
    """Bring a master up to date with a parameter that was written directly.

    Where the parameter still is the master's rounding the master keeps its low bits, elsewhere it takes the
    parameter's value.
    """
    with torch.no_grad():
        master: torch.Tensor = getattr(parameter, MASTER)
        is_rounding = master.to(parameter.dtype) == parameter
        master.copy_(torch.where(is_rounding, master, parameter.float()))
    remember_version(parameter)


def is_low(parameter: torch.Tensor) -> bool:
    """Whether a parameter is float16 or bfloat16."""
    return parameter.dtype in LOW_DTYPES
