"""Facts about the two low-precision dtypes, and the choice between them."""

import itertools

import torch
from torch import nn

from fxamp.errors import OptionError, nearest

LOW_DTYPES = (torch.float16, torch.bfloat16)

NAMES: dict[str, torch.dtype] = {
    "fp16": torch.float16,
    "half": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
"""What users call the two."""

# How the cast of a registered function's argument (`x.to(low, copy=False)`) is told from a conversion the user wrote.
ARGUMENT_CAST = {"copy": False}


_accelerator = torch.accelerator.current_accelerator()

AUTOCAST_KINDS = tuple(dict.fromkeys(("cuda", "cpu", *([_accelerator.type] if _accelerator is not None else []))))
"""The kinds of device whose autocast may be on: a GPU's also where there is none, as for tensors that stand for its."""


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer; of one that has none (a loss), the machine's accelerator."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    found = next((tensor.device for tensor in tensors), None)
    return found or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def autocast_kind(device: torch.device) -> str:
    """The kind of device whose autocast a model on `device` runs under: on the meta device torch has none."""
    return "cpu" if device.type == "meta" else device.type


def dtype_name(dtype: torch.dtype) -> str:
    """Name without the module: dtype_name(torch.float16) == "float16"."""
    return str(dtype).removeprefix("torch.")


def is_inexact(dtype: torch.dtype) -> bool:
    """Whether its numbers are rounded: floating or complex."""
    return dtype.is_floating_point or dtype.is_complex


def resolve_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """The low dtype that `convert(dtype=...)` means on `device`.

    None is torch.autocast's own default for the device (CUDA float16, CPU bfloat16; a model on the meta device, whose
    place is not known yet, is taken as on a CPU); "auto" is bfloat16 where the device computes it natively, not
    emulated, else float16.

    Raises:
        OptionError: anything but torch.float16, torch.bfloat16, one of their `NAMES`, "auto" or None; None where
            torch.autocast does not know the device.
    """
    if dtype is None:
        kind = autocast_kind(device)
        if not torch.amp.is_autocast_available(kind):
            raise OptionError(f"torch.autocast has no default for {kind} devices: name one, dtype=torch.bfloat16.")
        return torch.get_autocast_dtype(kind)
    if dtype == "auto":
        return torch.bfloat16 if has_native_bfloat16(device) else torch.float16
    if isinstance(dtype, str) and dtype in NAMES:
        return NAMES[dtype]
    if dtype in LOW_DTYPES:
        assert isinstance(dtype, torch.dtype)
        return dtype
    if isinstance(dtype, torch.Tensor | tuple | list | dict):
        raise OptionError(f"dtype= was given a {type(dtype).__name__}. Inputs go into example_inputs=.")
    raise OptionError(
        f"dtype={dtype!r} is not a low precision. Allowed: torch.float16, torch.bfloat16, their names "
        f"({', '.join(map(repr, NAMES))}), 'auto' or None (the device's autocast default)."
        + (nearest(dtype, [*NAMES, "auto"]) if isinstance(dtype, str) else "")
    )


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether `device` computes in bfloat16 itself (torch reports emulation as support by default)."""
    if device.type != "cuda":
        return True
    if not torch.cuda.is_available():
        return False
    with torch.cuda.device(device):  # torch tells of the current one
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def smallest_subnormal(dtype: torch.dtype) -> float:
    """Smallest positive number of `dtype`; anything below half of it rounds to zero."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
