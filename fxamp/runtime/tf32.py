"""TF32: a choice of the process, made in one place and reported, never made for the user.

TF32 rounds the inputs of float32 matrix multiplications and convolutions to 10 bits of mantissa on Ampere and
later GPUs. It is a switch of the whole process and cannot be used for a part of a network.
"""

import dataclasses
import logging

import torch

from fxamp.errors import OptionError

log = logging.getLogger("fxamp")

FIRST_CAPABILITY = (8, 0)  # Ampere


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

    def __str__(self) -> str:
        words = {True: "on", False: "off"}
        has = "" if self.is_supported else " (this device has no TF32)"
        return f"TF32: matmul {words[self.matmul]}, convolution {words[self.convolution]}{has}"


def tf32_state() -> Tf32:
    """What torch's switches say now; changes nothing."""
    supported = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FIRST_CAPABILITY
    matmul = torch.backends.cuda.matmul.fp32_precision == "tf32"
    convolution = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return Tf32(matmul, convolution, supported)


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
    # The older switches: after its newer setters torch refuses its older getters, which others call.
    torch.backends.cuda.matmul.allow_tf32 = wanted.matmul
    torch.backends.cudnn.allow_tf32 = wanted.convolution
    log.info("%s (before: %s)", tf32_state(), before)
    return before
