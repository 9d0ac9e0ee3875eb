"""Functions that a trace must not enter: custom `autograd.Function`s are one node, checkpoints are marked.

`MyFunction.apply` has its own backward, which tracing its forward would lose. `torch.utils.checkpoint.checkpoint` is
entered, and every node made inside is marked with the region, so that the region is recomputed as in eager.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.utils import checkpoint as torch_checkpoint

from fxamp.capture.creations import holds_proxy
from fxamp.capture.recompute import Region

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
            return super(_SingleLevelFunction, cls).apply(*args, **kwargs)
        if cls is torch_checkpoint.CheckpointFunction:
            function, preserve, *inputs = args
            with enter(Region({"use_reentrant": True, "preserve_rng_state": preserve})):
                return function(*inputs)
        return call(_as_function(cls), args, kwargs)

    utils = torch._functorch.utils
    unwrap, regions = utils.unwrap_dead_wrappers, torch_checkpoint._checkpoint_without_reentrant_generator
    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    utils.unwrap_dead_wrappers = lambda args: args if holds_proxy(args) else unwrap(args)
    torch_checkpoint._checkpoint_without_reentrant_generator = _generator(regions, enter)
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]
        utils.unwrap_dead_wrappers = unwrap
        torch_checkpoint._checkpoint_without_reentrant_generator = regions


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
    signature = inspect.signature(original).parameters
    names = [name for name, parameter in signature.items() if parameter.default is not parameter.empty]

    def generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if not holds_proxy((args, kwargs)):
            yield from original(function, *args, **kwargs)
            return
        given = dict(zip(names, args, strict=False))
        options = {name: value for name, value in given.items() if value != signature[name].default}
        with enter(Region({"use_reentrant": False, **options})):
            yield

    return generator
