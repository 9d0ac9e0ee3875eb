"""Torch-function modes: default devices are such modes, and torch.export has some of its own."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.utils._device import DeviceContext

_OF_TRACES = ("torch.fx.", "torch.export.", "torch._export.")
_HOST = torch.device("cpu")


def default_device() -> torch.device:
    """Where `torch.zeros(3)` is made at present: `torch.set_default_device` or `with device:` may say so."""
    regions = _device_contexts()
    return regions[-1].device if regions else _HOST


def is_default_device(device: torch.device | None) -> bool:
    """Whether it is what `default_device` would give; None: any is.

    Dynamo, which traces the question, cannot ask: it is told so.
    """
    return device is None or torch.compiler.is_compiling() or device == default_device()


def _device_contexts() -> list[DeviceContext]:
    return [mode for mode in _modes() if isinstance(mode, DeviceContext)]


def _modes() -> list[Any]:
    return [_get_function_stack_at(place) for place in range(_len_torch_function_stack())]


@contextlib.contextmanager
def no_overrides() -> Iterator[None]:
    """Torch-function modes and subclasses see nothing; tensors are made on the default device all the same."""
    regions = _device_contexts()
    if not regions:
        with torch._C.DisableTorchFunction():
            yield
        return
    with _replaced_by(regions), torch._C.DisableTorchFunctionSubclass():
        yield


@contextlib.contextmanager
def no_export() -> Iterator[None]:
    """torch.export would write down each switch of the gradient mode, of which its modes are told."""
    with _replaced_by([mode for mode in _modes() if not type(mode).__module__.startswith(_OF_TRACES)]):
        yield


@contextlib.contextmanager
def _replaced_by(modes: list[Any]) -> Iterator[None]:
    before = _modes()
    try:
        _replace(modes)
        yield
    finally:
        _replace(before)


def _replace(modes: list[Any]) -> None:
    for _ in range(_len_torch_function_stack()):
        _pop_torch_function_stack()
    for mode in modes:
        _push_on_torch_function_stack(mode)
