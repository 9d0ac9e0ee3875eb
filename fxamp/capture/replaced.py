"""Functions of torch's that somebody may replace: `F.scaled_dot_product_attention = mine`, for good or for a while.

A graph calls what it met in the trace. It is for calls in which the names by which torch and the user find that stand
for the same functions, and those that were replaced by then still are.
"""

import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from fxamp.capture.locations import is_library_function, user_line
from fxamp.capture.objects import Scope, frozen, is_library
from fxamp.capture.refusals import for_python
from fxamp.capture.state import Cell
from fxamp.errors import CaptureError

_PLACES: tuple[dict[str, Any], ...] = (vars(functional), vars(torch))
_NOTHING = Scope(frozenset(), {})


def cells_of_functions(root: nn.Module, graph: fx.Graph) -> Iterator[Cell]:
    """What torch's names of the functions that a graph calls stand for, and those that were replaced before it."""
    names = _called_by(root, graph)
    for place in _FUNCTIONS:
        for name in sorted(place.replaced() | names & place.space.keys()):
            title = f"the function {place.space['__name__']}.{name}"
            yield Cell(name, frozen(place[name], _NOTHING), None, place, title, frozenset())


def check_called_as_itself(target: Any) -> None:
    """Refuse a function of torch's whose name stands for another one, which calls it: by the name it says who it is to
    the values of a trace (`handle_torch_function`).

    Raises:
        CaptureError: so it is.
    """
    is_users = isinstance(target, types.FunctionType) and not is_library_function(target)
    if is_users and any(target is value for space in _PLACES for value in space.values()):
        text = f"{user_line()}: {target.__qualname__} stands in the place of a function of torch's, and calls it"
        raise for_python(CaptureError(text))  # Dynamo's graphs call it by its name, too


def _called_by(root: nn.Module, graph: fx.Graph) -> set[str]:
    """Names of functions that a graph calls, or that the forwards of layers name which it holds as wholes."""
    names = {getattr(node.target, "__name__", "") for node in graph.nodes if node.op == "call_function"}
    for path in {str(node.target) for node in graph.nodes if node.op == "call_module"}:
        forward = inspect.getattr_static(type(root.get_submodule(path)), "forward", None)
        names |= set(forward.__code__.co_names) if isinstance(forward, types.FunctionType) else set()
    return {name for name in names if any(callable(space.get(name)) for space in _PLACES)}


def _is_replaced(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        return not is_library_function(value)
    return not isinstance(value, (type, types.ModuleType)) and callable(value) and not is_library(type(value))


class _Functions:
    """A namespace of torch's, for who asks what its names stand for.

    What this package has put there for a while, as its counter does, stands for torch's own.
    """

    def __init__(self, space: dict[str, Any]) -> None:
        self.space = space
        self._own = {name: value for name, value in space.items() if not _is_replaced(value)}

    def get(self, name: str, default: Any = None) -> Any:
        value, own = self.space.get(name, default), self._own.get(name)
        return own if value is not own and is_ours(value) else value

    __getitem__ = get

    def replaced(self) -> set[str]:
        """Names that stand for functions of the user's."""
        others = ((name, value) for name, value in self.space.items() if value is not self._own.get(name))
        return {name for name, value in others if not name.startswith("_") and _is_replaced(value)}


def is_ours(function: Any) -> bool:
    """Whether a function is one of this package's."""
    return str(getattr(function, "__module__", "")).partition(".")[0] == "fxamp"


_FUNCTIONS = tuple(map(_Functions, _PLACES))
