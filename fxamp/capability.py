"""What an op is on a device, one kernel or several: asked of torch, never guessed."""

import contextlib
import functools
import warnings
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


# Recurrent ops on a sequence: the blocks in the rows of their weights, and how they are called.
_RECURRENT: dict[str, tuple[int, Callable[..., Any]]] = {
    "gru": (3, torch.gru),
    "lstm": (4, lambda x, state, *others: torch.lstm(x, (state, state), *others)),
    "rnn_relu": (1, torch.rnn_relu),
    "rnn_tanh": (1, torch.rnn_tanh),
}


@functools.cache
def is_fused_recurrent(op: str, dtype: torch.dtype, device: str) -> bool:
    """Whether a device has a kernel for a whole recurrent layer, rather than several for each step of its sequence.

    cuDNN takes bfloat16 from its version 9.13 on (pytorch/pytorch#164411). Asked with a layer of 8 units, on CUDA
    devices only; other devices are taken to have what they need.

    Args:
        op: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        device: type of device, as torch.device.type.
    """
    if device != "cuda" or not torch.cuda.is_available():
        return True
    return not ops_of_recurrent(op, dtype, device).isdisjoint(("_cudnn_rnn", "miopen_rnn"))


def ops_of_recurrent(op: str, dtype: torch.dtype, device: str) -> set[str]:
    """Names of the ops that a small recurrent layer runs on a device."""
    gates, call = _RECURRENT[op]
    seen = _Names()
    with (
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        torch.inference_mode(False),
        torch.no_grad(),
        _without_autocast(device),
        warnings.catch_warnings(action="ignore"),  # that the weights do not lie in one piece
        seen,
    ):
        x = torch.zeros(1, 1, 8, dtype=dtype, device=device)
        weights = [x.new_zeros(shape) for shape in ((gates * 8, 8), (gates * 8, 8), (gates * 8,), (gates * 8,))]
        call(x, x, weights, True, 1, 0.0, False, False, False)
    return seen.found


@functools.cache
def autocast_runs_lstm(low: torch.dtype, device: str) -> bool:
    """Whether torch.autocast runs a low LSTM on a device.

    On a CPU it hands LSTMs to oneDNN, which has no kernel for low ones where the CPU lacks AVX-512, and raises a
    RuntimeError. Without autocast torch computes a low LSTM itself there. Other devices are taken to run it.

    Args:
        device: type of device, as torch.device.type.
    """
    if device != "cpu":
        return True
    with _disable_current_modes(), temporarily_clear_interpreter_stack(), torch.no_grad(), torch.autocast("cpu", low):
        x = torch.zeros(1, 1, 8, device="cpu")
        weights = [x.new_zeros(shape) for shape in ((32, 8), (32, 8), (32,), (32,))]
        try:
            torch.lstm(x, (x, x), weights, True, 1, 0.0, False, False, False)
        except RuntimeError:
            return False
    return True


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


class _Names(TorchDispatchMode):
    """Collects the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))
