"""TF32: a choice of the process, made in one place and reported, never made for the user.

TF32 rounds the inputs of float32 matrix multiplications and convolutions to 10 bits of mantissa on Ampere and
later GPUs. It is a switch of the whole process and cannot be used for a part of a network.
"""

import dataclasses
import logging
from typing import Any

import torch

from fxamp.errors import OptionError
from fxamp.logs import configure_logging

log = logging.getLogger("fxamp")

FIRST_CAPABILITY = (8, 0)  # Ampere


_CUDNN: tuple[Any, ...] = (torch.backends.cudnn.conv, torch.backends.cudnn.rnn)  # type: ignore[attr-defined]
_NEWER: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, *_CUDNN)  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class Tf32:
    """Where TF32 is on.

    Attributes:
        matmul: matrix multiplications; off in torch by default.
        convolution: cuDNN convolutions and RNNs; on in torch by default.
        is_supported: whether the current GPU has TF32.
    """

    matmul: bool
    convolution: bool
    is_supported: bool
    _matmul_precision: str | None = dataclasses.field(default=None, repr=False, compare=False)
    """torch.get_float32_matmul_precision(); None where it raises, after the newer switches were set."""
    _switches: tuple[str, ...] = dataclasses.field(default=(), repr=False, compare=False)
    """`fp32_precision` of each of _NEWER."""

    def __str__(self) -> str:
        words = {True: "on", False: "off"}
        has = "" if self.is_supported else " (this device has no TF32)"
        return f"TF32: matmul {words[self.matmul]}, convolution {words[self.convolution]}{has}"


def tf32_state() -> Tf32:
    """What torch's switches say now; changes nothing."""
    supported = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FIRST_CAPABILITY
    matmul = torch.backends.cuda.matmul.fp32_precision == "tf32"
    convolution = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return Tf32(matmul, convolution, supported, _matmul_precision(), tuple(switch.fp32_precision for switch in _NEWER))


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def set_tf32(enabled: bool | Tf32 = True) -> Tf32:
    """Switch TF32 for matrix multiplications and convolutions, and log it.

        before = fxamp.set_tf32()
        ...
        fxamp.set_tf32(before)

    On is NVIDIA's and torch's recommendation unless the network needs full float32 precision: it speeds up
    what mixed precision leaves in float32, at typically negligible loss of accuracy.

    Args:
        enabled: False switches it off; a state that this or `tf32_state` gave sets each switch to what it was.
            Both switches are the process's, and have no effect without a GPU that has TF32.

    Returns:
        The state before the call, to be able to go back.

    Raises:
        OptionError: something else than a bool or such a state.

    Source: "What Every User Should Know About Mixed Precision Training in PyTorch", section on picking the
    right approach.
    """
    if not isinstance(enabled, bool | Tf32):
        raise OptionError(f"enabled={enabled!r} must be True, False or what set_tf32() and tf32_state() return.")
    before = tf32_state()
    wanted = enabled if isinstance(enabled, Tf32) else Tf32(enabled, enabled, before.is_supported)
    _switch(wanted, before)
    if wanted._switches:
        _put_back(wanted)
    configure_logging()
    log.info("%s (before: %s)", tf32_state(), before)
    return before


def _switch(wanted: Tf32, before: Tf32) -> None:
    # The older switches: after its newer setters torch refuses its older getters, which others call.
    if wanted.matmul is not before.matmul:  # "medium" stays where TF32 is only switched on
        torch.backends.cuda.matmul.allow_tf32 = wanted.matmul
        if before._matmul_precision is not None and _matmul_precision() is None:
            torch.set_float32_matmul_precision("highest")  # was "high" or "medium", for oneDNN's switch too
    torch.backends.cudnn.allow_tf32 = wanted.convolution
    if not wanted.convolution:
        for switch in _CUDNN:
            if switch.fp32_precision == "tf32":  # from torch.backends.fp32_precision, which the older one leaves on
                switch.fp32_precision = "ieee"


def _put_back(wanted: Tf32) -> None:
    """Each switch to what it was: one of several that the older setters move together, or "medium"."""
    if wanted._matmul_precision is not None and wanted._matmul_precision != _matmul_precision():
        torch.set_float32_matmul_precision(wanted._matmul_precision)
    for switch, was in zip(_NEWER, wanted._switches, strict=True):
        if switch.fp32_precision != was:
            switch.fp32_precision = "none"  # where it only follows the switch above it
        if switch.fp32_precision != was:
            switch.fp32_precision = was
