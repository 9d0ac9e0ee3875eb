"""Fake CUDA tensors on a torch without CUDA: shapes, dtypes and autocast's CUDA rules, and nothing is computed.

A torch built without CUDA refuses fake CUDA tensors in two places, and both are opened here, once per process:
its table of device guards has no entry for CUDA, and autograd asks an accelerator description whether CUDA was
built in. Call `install()` before the first backward of the process: autograd starts its device threads there.

Source: c10/core/impl/DeviceGuardImplInterface.h, aten/src/ATen/detail/CUDAHooksInterface.h (torch 2.11 to 2.13).
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor

_CUDA_INDEX = 1  # c10::DeviceType::CUDA
_IS_BUILT = 2  # position of isBuilt() among the virtual functions of AcceleratorHooksInterface
_IS_AVAILABLE = 4
_TABLE_SIZE = 96  # entries copied of that table; more than it has is harmless
_HEADER = 2  # words before the first virtual function (Itanium ABI: offset to top, type information)


@functools.cache
def install() -> None:
    """Make fake CUDA tensors usable; does nothing where torch sees a GPU."""
    if torch.cuda.is_available():
        return
    _give_cuda_a_guard()
    _say_cuda_is_built()
    _give_cuda_its_fused_norm()
    torch.backends.cudnn.enabled = False  # in a build with CUDA, which would ask the driver for the device's properties
    fake_tensor.init_gpu_context = lambda *args: None  # type: ignore[assignment]


def _give_cuda_its_fused_norm() -> None:
    """Register rms_norm's kernel for CUDA, never to be run: with it torch takes the op and its backward whole.

    Source: `_fused_rms_norm` in native_functions.yaml and derivatives.yaml (torch 2.11 to 2.13).
    """

    def kernel(*args: Any) -> Any:
        raise NotImplementedError("fake tensors are computed by nobody")

    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_fused_rms_norm", kernel, "CUDA")
    _keep_for_ever(library)


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))


def _keep_for_ever(memory: Any) -> None:
    """Torch's threads read it until the process is gone, later than Python frees its own objects."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


# C functions that ignore what they are given. A Python callback would be called from autograd's threads, also when
# the interpreter is gone.
_ZERO = _address(ctypes.CDLL(None).sched_yield)
_ONE = _address(ctypes.pythonapi.Py_IsInitialized)


def _give_cuda_a_guard() -> None:
    """Put a guard that says "no devices" in CUDA's place; torch then puts its own do-nothing guard there."""
    registry = (ctypes.c_void_p * 32).in_dll(_library("libc10.so"), "_ZN3c104impl26device_guard_impl_registryE")
    if registry[_CUDA_INDEX]:
        return
    table = (ctypes.c_void_p * 64)(*[_ZERO] * 64)
    guard = (ctypes.c_void_p * 2)(ctypes.addressof(table), 0)
    _keep_for_ever(table)
    _keep_for_ever(guard)
    registry[_CUDA_INDEX] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()
    if registry[_CUDA_INDEX] == ctypes.addressof(guard):
        registry[_CUDA_INDEX] = None
        raise RuntimeError(f"torch {torch.__version__} does not accept fake CUDA tensors in a build without CUDA")


def _say_cuda_is_built() -> None:
    """Give the description of CUDA a table of functions in which isBuilt() is true and isAvailable() is false."""
    find = _library("libtorch_cpu.so")["_ZN2at6detail12getCUDAHooksEv"]
    find.restype = ctypes.c_void_p
    hooks = (ctypes.c_void_p * 1).from_address(find())
    start = int(hooks[0] or 0) - _HEADER * ctypes.sizeof(ctypes.c_void_p)
    old = (ctypes.c_void_p * (_TABLE_SIZE + _HEADER)).from_address(start)
    table = (ctypes.c_void_p * (_TABLE_SIZE + _HEADER))(*old)
    table[_HEADER + _IS_BUILT] = _ONE
    table[_HEADER + _IS_AVAILABLE] = _ZERO
    _keep_for_ever(table)
    hooks[0] = ctypes.addressof(table) + _HEADER * ctypes.sizeof(ctypes.c_void_p)


@contextlib.contextmanager
def autocast(dtype: torch.dtype) -> Iterator[None]:
    """torch.autocast("cuda", dtype), which switches itself off where no GPU is seen."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
