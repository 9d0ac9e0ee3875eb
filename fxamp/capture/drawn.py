"""Random numbers that forward draws and does not use: nodes that draw at each call."""

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from fxamp.draws import DRAWS, draw
from fxamp.errors import CaptureError
from fxamp.opnames import canonical_name
from fxamp.patched import patched

# What each comparison with a number that is not above what can be drawn gives.
_CERTAIN: dict[Any, bool] = {operator.lt: False, operator.ge: True}


@contextlib.contextmanager
def drawn_at_each_call(tracer: Any) -> Iterator[None]:
    """Calls of `random.uniform` and its like become nodes; a use of what they give is an error."""
    found = {name: sys.modules[name] for name in DRAWS if name in sys.modules}

    def drawing(module: str, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*bounds: Any, **kwargs: Any) -> Any:
            is_plain = not kwargs and len(bounds) in (0, 2) and all(type(bound) in (int, float) for bound in bounds)
            if not (tracer.is_recording and is_plain):
                return original(*bounds, **kwargs)
            return tracer.create_proxy("call_function", draw, (module, name, *bounds), {})

        return call

    places = [(module, each, name) for name, module in found.items() for each in DRAWS[name]]
    with patched(*((module, each, drawing(name, each, getattr(module, each))) for module, each, name in places)):
        yield


def whatever_is_drawn(node: fx.Node) -> bool | None:
    """What a node that takes a drawn number gives for any number; None where it takes none.

    Raises:
        CaptureError: it hangs on the number.
    """
    drawn = [given for given in node.all_input_nodes if given.target is draw]
    if not drawn:
        return None
    if node.target in _CERTAIN and type(limit := node.args[1]) in (int, float):
        low, high = drawn[0].args[2:] or (0.0, 1.0)
        if limit <= low <= high:  # type: ignore[operator]
            return _CERTAIN[node.target]
    raise frozen(drawn[0])


# What a number of [0, 1) gives beside a limit: whether it is below one that is not above 0, or not below 1.
_UNIFORM: dict[Any, Callable[[float], bool | None]] = {
    operator.lt: lambda limit: False if limit <= 0 else True if limit >= 1 else None,
    operator.ge: lambda limit: True if limit <= 0 else False if limit >= 1 else None,
}


def whatever_torch_draws(node: fx.Node) -> bool | None:
    """What a comparison of `torch.rand([])` gives for any number; None where it hangs on the number, or is of more."""
    if node.target not in _UNIFORM or getattr(node.meta.get("val"), "ndim", None) != 0:
        return None
    drawn, limit = node.args
    if not isinstance(drawn, fx.Node) or canonical_name(drawn.target) != "rand" or not set(drawn.kwargs) <= {"device"}:
        return None
    return _UNIFORM[node.target](limit) if isinstance(limit, (int, float)) else None


def frozen(node: fx.Node) -> CaptureError:
    """The error for a drawn number that forward uses, which names the line that draws it."""
    source = "Python's random module" if node.args[0] == "random" else "numpy.random"
    return CaptureError(
        f"{node.meta['source']}: forward draws from {source}, which a graph would freeze to one value. "
        "Use torch's random functions, or draw the number outside and pass it in."
    )
