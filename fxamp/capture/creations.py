"""Calls that make tensors out of nothing, or out of traced sizes, become nodes."""

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import grad_mode
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils._device import _device_constructors

from fxamp.capture.identity import may_be_compared_by_identity
from fxamp.capture.locations import asker, user_line
from fxamp.errors import CaptureError
from fxamp.function_modes import default_device
from fxamp.patched import patched


class Creations(TorchFunctionMode):
    """Turn calls that make tensors, or that take traced sizes, into nodes."""

    def __init__(self, tracer: Any) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recording = self.tracer.is_recording
        if recording and func is torch._C._set_grad_enabled:
            is_on = bool(*args)  # a traced flag must be decided now
            if is_on and not _is_way_out(sys._getframe(1)):
                self._switch_on()
            return func(is_on)
        if recording and not kinds and (func in _CREATORS or holds_proxy((args, kwargs))):
            return self.tracer.create_proxy("call_function", func, args, kwargs)
        if recording and func in _RANDOM and not holds_proxy((args, kwargs)):
            return self.tracer.create_proxy("call_function", func, args, kwargs)
        if recording and _is_made_anywhere(func, kwargs):
            self.tracer.device.note()  # a constant of the graph
        if recording and not holds_proxy((args, kwargs)) and holds_tensor((args, kwargs)):
            return self._on_tensors(func, args, kwargs)
        return func(*args, **kwargs)

    def _switch_on(self) -> None:
        """Gradients are on in a trace as it is, so that a region that switches them on leaves no node behind."""
        self.tracer.grad_mode = self.tracer.gradients_outside
        if not self.tracer.gradients_outside:
            raise CaptureError(
                f"{user_line()}: forward switches gradients on (torch.enable_grad) in a call without them, which a "
                "graph cannot hold"
            )

    def _on_tensors(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call on tensors of the model's own, reached around `getattr`: in a loop over parameters, in a list.

        Run now it would happen once, to the user's tensors, and its result would be frozen; so it becomes a node.
        """
        name = getattr(func, "__name__", "")
        field = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        if (field or name) in _OF_ONE and self.tracer.holds_others(args):
            raise CaptureError(
                f"{user_line()}: forward asks for {field or name} of a tensor that is another at each call"
            )
        if field:
            if field in _VIEWS:
                return self.tracer.create_proxy("call_function", getattr, (args[0], field), {})
            if field in ("data", "grad"):
                raise CaptureError(f"{user_line()}: forward reads .{field} of a tensor, which no graph holds")
            if field == "requires_grad":
                self.tracer.note_attribute(args[0], field)
            if field == "dtype" and not may_be_compared_by_identity(asker(2)):
                return self.tracer.create_proxy("call_function", getattr, (args[0], field), {})
            if field in _OF_DTYPES:
                return self._of_what_they_stand_for(func, args, kwargs)
            return func(*args, **kwargs)
        if name in _OF_DTYPES:
            return self._of_what_they_stand_for(func, args, kwargs)
        if name in _QUESTIONS:
            return func(*args, **kwargs)
        if name in _NUMBERS_OF:
            raise CaptureError(
                f"{user_line()}: Python reads the numbers of a tensor ({name}), which a graph would freeze"
            )
        if is_tensor_method_or_property(func):
            return self.tracer.create_proxy("call_method", name, args, kwargs)
        return self.tracer.create_proxy("call_function", func, args, kwargs)

    def _of_what_they_stand_for(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A question about dtypes: a parameter that is stored low answers as the float32 one it stands for."""
        args, kwargs = fx.node.map_aggregate((args, kwargs), self.tracer.values.fake)
        with self.tracer.values.aside():
            return func(*args, **kwargs)


def _is_way_out(frame: types.FrameType | None) -> bool:
    """Whether torch's own region switches gradients to what they were before it."""
    while frame is not None and frame.f_code.co_filename == grad_mode.__file__:
        if frame.f_code.co_name == "__exit__":
            return True
        frame = frame.f_back
    return False


# What follows from dtypes; fields that are tensors; what is asked of a tensor but its numbers; and what reads those.
_OF_DTYPES = frozenset({"dtype", "itemsize", "nbytes", "element_size", "result_type"})
_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
_QUESTIONS = frozenset(
    """size dim numel nelement ndimension stride storage_offset element_size is_contiguous is_floating_point is_complex
    is_signed get_device type __len__ __repr__ __format__ __hash__ is_tensor data_ptr untyped_storage
    __deepcopy__ __reduce_ex__ is_pinned is_shared is_set_to has_names is_inference is_conj is_neg is_same_size
    is_storage result_type can_cast promote_types broadcast_shapes""".split()
)
# What is other for another tensor of the same type.
_OF_ONE = frozenset(
    """storage_offset __repr__ __format__ __hash__ data_ptr untyped_storage __deepcopy__ __reduce_ex__ is_pinned
    is_shared is_set_to is_inference is_conj is_neg grad_fn is_leaf _version retains_grad output_nr _base name names
    """.split()
)
_NUMBERS_OF = frozenset(
    """item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __contains__ is_nonzero equal allclose
    __array__""".split()
)


def holds_tensor(arguments: Any) -> bool:
    """Whether a real tensor is among the arguments."""
    return _holds(arguments, lambda value: isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor))


def holds_proxy(arguments: Any) -> bool:
    """Whether a traced value is among the arguments."""
    return _holds(arguments, lambda value: isinstance(value, fx.Proxy))


def _holds(arguments: Any, is_one: Callable[[Any], bool]) -> bool:
    found = False

    def look(value: Any) -> Any:
        nonlocal found
        found = found or is_one(value)
        return value

    fx.node.map_aggregate(arguments, look)
    return found


def _is_made_anywhere(function: Any, kwargs: Any) -> bool:
    """Whether a call makes a tensor on the default device."""
    is_function = isinstance(function, types.BuiltinFunctionType | types.FunctionType)
    return is_function and function in _device_constructors() and kwargs.get("device") is None


class DefaultDevice:
    """What a trace leaves to the default device of the call.

    Attributes:
        asked: the device that it was, where the graph makes a tensor there or forward asks for it; else None.
    """

    def __init__(self) -> None:
        self._outside = default_device()
        self.asked: torch.device | None = None

    def note(self) -> None:
        """The graph is for this default device."""
        self.asked = self._outside

    def given(self, kind: str, function: Any, kwargs: Any) -> Any:
        """`with torch.device("cuda"): torch.zeros(3)` in forward: the node says what the region says.

        Raises:
            CaptureError: a module that stays whole is called in such a region.
        """
        if kind == "call_module" and default_device() != self._outside:
            raise CaptureError(f"{user_line()}: {function!r} stays whole and is called inside `with device:`")
        if not _is_made_anywhere(function, kwargs):
            return kwargs
        if (device := default_device()) != self._outside:
            return {**kwargs, "device": device}
        self.note()
        return kwargs


@contextlib.contextmanager
def traced_sizes(tracer: Any) -> Iterator[None]:
    """`torch.zeros(batch, 4, dtype=x.dtype)`: torch's own parser takes no traced sizes beside traced dtypes."""
    original = {function.__name__: function for function in _CREATORS if function.__module__ == "torch"}
    original = {name: function for name, function in original.items() if getattr(torch, name, None) is function}
    with patched(*((torch, name, _taking_proxies(tracer, function)) for name, function in original.items())):
        yield


def _taking_proxies(tracer: Any, function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if tracer.is_recording and holds_proxy((args, kwargs)):
            return tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def variables_made() -> Iterator[None]:
    """`Variable(x)`, as older code makes tensors, takes no proxies: it is `x.detach()`."""
    kind: Any = type(torch.autograd.Variable)
    outer = vars(kind).get("__call__", type.__call__)

    def call(variable: Any, *args: Any, **kwargs: Any) -> Any:
        if not args or not issubclass(type(args[0]), fx.Proxy):
            return outer(variable, *args, **kwargs)
        made = args[0].detach()
        return made.requires_grad_() if kwargs.get("requires_grad", (*args, False)[1]) else made

    with patched((kind, "__call__", call)):
        yield


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
