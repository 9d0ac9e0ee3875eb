"""Functions that a trace must not enter: custom `autograd.Function`s are one node, checkpoints are marked.

`MyFunction.apply` has its own backward, which tracing its forward would lose. `torch.utils.checkpoint.checkpoint` is
entered, and every node made inside is marked with the region, so that the region is recomputed as in eager.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction, _SingleLevelFunction
from torch.utils import checkpoint as torch_checkpoint

from fxamp.capture.creations import holds_proxy
from fxamp.capture.recompute import Region
from fxamp.patched import patched

_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(torch_checkpoint, f"{_GENERATOR}_impl"):  # since torch 2.14, where the other only calls it
    _GENERATOR += "_impl"
Enter = Callable[[Region], "contextlib.AbstractContextManager[None]"]


@contextlib.contextmanager
def whole_functions(call: Callable[..., Any], enter: Enter) -> Iterator[None]:
    """Custom functions and checkpoints called with proxies go to the tracer.

    Args:
        call: makes a node: (function, args, kwargs) -> proxy.
        enter: a context in which every node belongs to a checkpointed region.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not holds_proxy((args, kwargs)):
            return _APPLY.__get__(None, cls)(*args, **kwargs)
        if cls is torch_checkpoint.CheckpointFunction:
            function, preserve, *inputs = args
            with enter(Region({"use_reentrant": True, "preserve_rng_state": preserve})):
                return function(*inputs)
        return call(_as_function(cls), args, kwargs)

    utils = torch._functorch.utils
    unwrap, regions = utils.unwrap_dead_wrappers, getattr(torch_checkpoint, _GENERATOR)

    def unwrapped(args: Any) -> Any:
        return args if holds_proxy(args) else unwrap(args)

    places = (utils, "unwrap_dead_wrappers", unwrapped), (torch_checkpoint, _GENERATOR, _generator(regions, enter))
    with patched(*places, *_applied_by(apply)):
        yield


# In what `Function.apply` ends; since torch 2.14 that is `Function.apply` itself.
_APPLY: Any = inspect.getattr_static(torch._C._FunctionBase, "apply")
_IS_APPLY_OF_C = vars(Function)["apply"] is _APPLY
_NO_SETUP = Function.setup_context


def _applied_by(apply: Callable[..., Any]) -> list[tuple[Any, str, Any]]:
    """What makes `MyFunction.apply` this function, and one that was bound before (`swish = Swish.apply`)."""
    if not _IS_APPLY_OF_C:
        return [(_SingleLevelFunction, "apply", classmethod(apply))]
    return [(Function, "apply", classmethod(apply)), (type(Function), "__getattribute__", _look_ups_of(apply))]


def _look_ups_of(apply: Callable[..., Any]) -> Callable[[Any, str], Any]:
    """How attributes of a function's class are looked up, so that a bound `apply` of C's does what this function does.

    C's looks up `_backward_cls`, turns gradients off, and calls `forward`, and `setup_context` where a class has one.
    """
    outside = threading.local()

    def look_up(cls: Any, attribute: str) -> Any:
        found = type.__getattribute__(cls, attribute)
        if attribute == "_backward_cls":
            outside.has_gradients = torch.is_grad_enabled()
        if attribute == "setup_context" and found is not _NO_SETUP:
            return lambda ctx, inputs, output: None if holds_proxy(output) else found(ctx, inputs, output)
        if attribute != "forward" or not vars(outside):
            return found  # also of a forward that is called by itself
        has_gradients = vars(outside).pop("has_gradients")

        def forward(*args: Any) -> Any:
            if not holds_proxy(args):
                return found(*args)
            inputs = args[1:] if isinstance(args[0], BackwardCFunction) else args
            with torch.set_grad_enabled(has_gradients):
                return apply(cls, *inputs)

        return forward

    return look_up


def _as_function(cls: Any) -> Callable[..., Any]:
    """`cls.apply` under the name and module of the class: a graph cannot name torch's bound method."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    function.__self__ = cls  # type: ignore[attr-defined]
    return named_like(function, cls)


def named_like(function: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """A function of a graph under the name and module of a user's function or class, or of the class of an object.

    Of what is torch's own the module is this one: torch.fx writes what is torch's by its name, which is the original.
    In the place of a lambda its nodes have its own name: torch.fx would write the lambda's text.
    """
    named = original if hasattr(original, "__qualname__") else type(original)
    function.__name__ = named.__name__ if named.__name__.isidentifier() else function.__name__
    function.__qualname__ = named.__qualname__
    if named.__module__.partition(".")[0] != "torch":
        function.__module__ = named.__module__
    return function


def _generator(original: Callable[..., Any], enter: Enter) -> Callable[..., Any]:
    """torch's own generator around a checkpointed function, which marks the nodes made in between."""
    signature = inspect.signature(original)
    defaults = {name: each.default for name, each in signature.parameters.items() if each.default is not each.empty}

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not holds_proxy((args, kwargs)):
            yield from original(*args, **kwargs)
            return
        given = signature.bind(*args, **kwargs).arguments
        options = {name: given[name] for name in defaults if name in given and given[name] != defaults[name]}
        with enter(Region({"use_reentrant": False, **options})):
            yield

    return generator
