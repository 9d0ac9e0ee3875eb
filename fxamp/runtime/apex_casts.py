"""half_function, float_function, promote_function, register_*: casts that apex.amp makes for a function of the user.

    @amp.float_function
    def energy(x):
        return x.square().sum()         # x is float32 here, also in a converted model

A call's floating tensors are cast as if the function's first line did it. In a converted model this is always so, and
its capture sees casts of the user's own; outside of one they are made while amp is on, from initialize to one that
converts nothing. Names of torch, and classes, go to the op lists instead.
"""

import contextlib
import functools
import importlib
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import fx, nn

from fxamp.dtypes import ARGUMENT_CAST, LOW_DTYPES
from fxamp.errors import OptionError

Kind = Literal["allow", "deny", "infer"]
Function = Callable[..., Any]

# Functions of torch, and classes, registered by the user: colour -> dotted paths.
registry: dict[str, list[str]] = {"allow": [], "deny": [], "infer": []}

_ORIGINAL = "_fxamp_original"


class _Casting:
    """Whether the casts are made now: `low` is the dtype of half functions, None where none are made.

    What is set (amp is on, `disabled` somewhere) holds for the process, and inside `instead` another for the thread
    that is there.
    """

    def __init__(self) -> None:
        self._of_process: torch.dtype | None = None
        self.disabled = 0  # how many with blocks of casts_disabled there are
        self._of_thread = threading.local()

    @property
    def low(self) -> torch.dtype | None:
        here: list[torch.dtype | None] = getattr(self._of_thread, "lows", [])
        return here[-1] if here else None if self.disabled else self._of_process

    @low.setter
    def low(self, low: torch.dtype | None) -> None:
        self._of_process = low

    @contextlib.contextmanager
    def instead(self, low: torch.dtype | None) -> Iterator[None]:
        """Inside, this is `low` in this thread."""
        before: list[torch.dtype | None] = getattr(self._of_thread, "lows", [])
        self._of_thread.lows = [*before, low]
        try:
            yield
        finally:
            self._of_thread.lows = before


casting = _Casting()


def register_half_function(module: Any, name: str) -> None:
    """Run `module.name` in low precision; call it before initialize. `module` may be a class."""
    _register("allow", module, name)


def register_float_function(module: Any, name: str) -> None:
    """Run `module.name` in float32; call it before initialize. `module` may be a class."""
    _register("deny", module, name)


def register_promote_function(module: Any, name: str) -> None:
    """Run `module.name` in the widest precision of its inputs; call it before initialize. `module` may be a class."""
    _register("infer", module, name)


def half_function(function: Function) -> Function:
    """Decorator: the function's floating tensor arguments are cast to low precision, as the module says when.

    What it calls follows the op lists: a softmax inside runs in float32 where those say so.
    """
    return _casts_arguments("allow", function)


def float_function(function: Function) -> Function:
    """Decorator: the function's low-precision arguments are cast to float32, as the module says when.

    As behind `x.float()`, also a GEMM that reads such an argument itself runs in float32.
    """
    return _casts_arguments("deny", function)


def promote_function(function: Function) -> Function:
    """Decorator: the function's floating arguments are cast to the widest precision among them.

    In a converted model an argument is as wide as in the model as written; only what the user cast low is widened.
    """
    return _casts_arguments("infer", function)


@contextlib.contextmanager
def casts_into(low: torch.dtype) -> Iterator[None]:
    """Inside, a model is captured, or run by Dynamo: its registered functions cast, whether amp is on or off.

    Those that another thread calls meanwhile cast as they did.
    """
    with casting.instead(low):
        yield


@contextlib.contextmanager
def casts_disabled(models: list[nn.Module]) -> Iterator[None]:
    """Inside, registered functions cast nothing, in any thread, and these converted models run as they are written."""
    engine = importlib.import_module("fxamp.ir").ENGINE  # looked up when needed, as the converter is
    parts = {id(part): part for model in models for part in model.modules()}
    engines = [(part, part.__dict__.pop(engine)) for part in parts.values() if engine in part.__dict__]
    casting.disabled += 1
    try:
        with casting.instead(None):
            yield
    finally:
        casting.disabled -= 1
        for part, own in engines:
            part.__dict__[engine] = own


# Internals


def _register(kind: Kind, owner: Any, name: str) -> None:
    title = getattr(owner, "__name__", None) or type(owner).__name__
    if not isinstance(name, str):
        raise OptionError(f"a function of {title} is registered by its name, a string, and not by {name!r}.")
    function = getattr(owner, name, None)
    if function is None:
        raise OptionError(f"No function named {name} in module {title}.")
    if not callable(function):
        raise OptionError(f"{title}.{name} is a {type(function).__name__}, not a function.")
    if _is_torchs(owner):
        registry[kind].append(f"{title}.{name}")
        return
    if inspect.isclass(function):
        _casts_arguments(kind, function)
        return
    found = inspect.getattr_static(owner, name)
    if isinstance(found, types.ClassMethodDescriptorType):  # `apply` of an autograd.Function since torch 2.14
        found = classmethod(functools.partial(_call_bound, found))
    is_bound = isinstance(found, staticmethod | classmethod)
    inner = found.__func__ if is_bound else found if inspect.isclass(owner) else function
    wrapped = _casts_arguments(kind, getattr(inner, _ORIGINAL, inner))
    setattr(owner, name, type(found)(wrapped) if is_bound else wrapped)


def _call_bound(method: types.ClassMethodDescriptorType, owner: type, *args: Any, **kwargs: Any) -> Any:
    return method.__get__(None, owner)(*args, **kwargs)


def _is_torchs(owner: Any) -> bool:
    """Whether what stands in a module or class is an op of torch, which the lists know."""
    name = owner.__name__ if isinstance(owner, types.ModuleType) else getattr(owner, "__module__", "")
    return str(name).split(".")[0] == "torch"


def _casts_arguments(kind: Kind, function: Function) -> Function:
    if not callable(function):
        raise OptionError(f"a {type(function).__name__} is no function; a decorator of amp takes one.")
    if inspect.isclass(function) and not issubclass(function, nn.Module | torch.autograd.Function):
        raise OptionError(
            f"{function.__name__} is a class, and neither a torch.nn.Module nor a torch.autograd.Function: it computes "
            "nothing. Give the function that does."
        )
    if inspect.isclass(function):  # what the lists know by its dotted path
        registry[kind].append(f"{function.__module__}.{function.__qualname__}")
        return function

    @functools.wraps(function)
    def casting_function(*args: Any, **kwargs: Any) -> Any:
        low = casting.low
        if low is None:
            return function(*args, **kwargs)
        if kind == "infer" and len(_floating((args, list(kwargs.values())))) < 2:
            return function(*args, **kwargs)
        cast = _lowered if kind == "allow" else _widened if kind == "deny" else _promoted
        return function(*_mapped(cast, low, args), **{key: _mapped(cast, low, kwargs[key]) for key in kwargs})

    setattr(casting_function, _ORIGINAL, function)
    return casting_function


def _mapped(cast: Callable[[Any, torch.dtype], Any], low: torch.dtype, given: Any) -> Any:
    """The same with the floating tensors cast, also those in lists and tuples."""
    if isinstance(given, list | tuple):
        parts = [_mapped(cast, low, part) for part in given]
        return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)
    return given if _dtype(given) not in (torch.float32, *LOW_DTYPES) else cast(given, low)


def _lowered(tensor: Any, low: torch.dtype) -> Any:
    return tensor if _is_real(tensor) and tensor.dtype == low else tensor.to(low, **ARGUMENT_CAST)


def _widened(tensor: Any, low: torch.dtype) -> Any:
    return tensor.float()


def _promoted(tensor: Any, low: torch.dtype) -> Any:
    return tensor.float() if _dtype(tensor) in LOW_DTYPES else tensor


def _floating(given: Any) -> set[torch.dtype]:
    if isinstance(given, list | tuple):
        return {dtype for part in given for dtype in _floating(part)}
    dtype = _dtype(given)
    return {dtype} if dtype in (torch.float32, *LOW_DTYPES) else set()


def _dtype(given: Any) -> torch.dtype | None:
    """The dtype of a tensor, real or traced; None of anything else."""
    if isinstance(given, fx.Proxy):
        value = given.node.meta.get("val")  # none where a trace has no example to tell it
        return value.dtype if isinstance(value, torch.Tensor) else None
    return given.dtype if isinstance(given, torch.Tensor) else None


def _is_real(tensor: Any) -> bool:
    return not isinstance(tensor, fx.Proxy)
