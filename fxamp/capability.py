"""Which conversions an op makes by itself on a device: asked of torch, on tensors without data, never guessed."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# Ops that are one kernel on some devices and conversions around a kernel on others, as they are called on low values.
_CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: F.softmax(x, -1, dtype=torch.float32),
    "log_softmax": lambda x: F.log_softmax(x, -1, dtype=torch.float32),
    "rms_norm": lambda x: F.rms_norm(x, (8,), x[0], 1e-6),
}


@functools.cache
def conversions_inside(op: str, low: torch.dtype, device: str) -> int:
    """How many conversions an op makes of low values in forward.

        conversions_inside("log_softmax", torch.float16, "cuda") == 0    # its kernel reads float16
        conversions_inside("log_softmax", torch.bfloat16, "cuda") == 1   # torch 2.11 to 2.13

    Args:
        op: "softmax" or "log_softmax" with dtype=torch.float32, or "rms_norm".
        device: type of device, as torch.device.type.
    """
    with _disable_current_modes(), temporarily_clear_interpreter_stack(), FakeTensorMode():
        x = torch.empty(4, 8, dtype=low, device=device)
        with torch.no_grad(), _without_autocast(device), _Conversions() as seen:
            _CALLS[op](x)
    return len(seen.found)


def _without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    has_autocast = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if has_autocast else contextlib.nullcontext()


class _Conversions(TorchDispatchMode):
    """Collects conversions from one floating dtype to another."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype != result.dtype:
            self.found.append(func)
        return result
