"""Calls that make tensors out of nothing, or out of traced sizes, become nodes."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode


class Creations(TorchFunctionMode):
    """Turn calls that make tensors, or that take traced sizes, into nodes."""

    def __init__(self, tracer: Any) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recording = self.tracer._recording and not self.tracer.evaluating
        if recording and not types and (func in _CREATORS or holds_proxy((args, kwargs))):
            return self.tracer.create_proxy("call_function", func, args, kwargs)
        if recording and func in _RANDOM and not holds_proxy((args, kwargs)):
            return self.tracer.create_proxy("call_function", func, args, kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def traced_sizes(tracer: Any) -> Iterator[None]:
    """`torch.zeros(batch, 4, dtype=x.dtype)`: torch's own parser takes no traced sizes beside traced dtypes."""
    original = {function.__name__: function for function in _CREATORS if function.__module__ == "torch"}
    original = {name: function for name, function in original.items() if getattr(torch, name, None) is function}
    for name, function in original.items():
        setattr(torch, name, _taking_proxies(tracer, function))
    try:
        yield
    finally:
        for name, function in original.items():
            setattr(torch, name, function)


def _taking_proxies(tracer: Any, function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if tracer._recording and not tracer.evaluating and holds_proxy((args, kwargs)):
            return tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return call


_RANDOM = frozenset(
    {torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, torch.normal, torch.multinomial}
)
_CREATORS = _RANDOM | frozenset(
    {
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.empty, torch.zeros, torch.ones, torch.full),
        *(torch.arange, torch.linspace, torch.logspace, torch.eye, torch.tensor, torch.tril_indices),
        *(torch.triu_indices, torch.hann_window, torch.hamming_window, torch.empty_strided),
    }
)


def holds_proxy(arguments: Any) -> bool:
    found = False

    def look(value: Any) -> Any:
        nonlocal found
        found = found or isinstance(value, fx.Proxy)
        return value

    fx.node.map_aggregate(arguments, look)
    return found
