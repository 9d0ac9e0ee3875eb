"""The inputs of a graph behind those of a call: what runs before it gives, as `beforehand.py` found."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.capture.inputs import CONSTANTS
from fxamp.capture.objects import FUNCTIONS
from fxamp.capture.recomputed import Recomputed, check_plain
from fxamp.capture.unseen import outside_of_the_call
from fxamp.errors import OptionError

FIXED = (*CONSTANTS, int, float, complex, *FUNCTIONS)
"""What is the same at every call."""


class CannotRunBefore(Exception):
    """What a function does, or is given, that the graph would not repeat if it ran before it."""


class _Writes(CannotRunBefore):
    """Of a write: it is done."""


class Value(NamedTuple):
    """An argument that hangs on inputs: its place among those that do."""

    place: int


class Held(NamedTuple):
    """An argument that the model holds: a module, or the attribute of one."""

    path: str
    name: str | None


class Further(NamedTuple):
    """The type of a further input: of a tensor, or a number's class."""

    kind: Any
    dimensions: int | None = None


class Result(NamedTuple):
    """What a function gives: its form, and its leaves, of which those that are further inputs stand for their types."""

    form: pytree.TreeSpec
    leaves: tuple[Any, ...]


class Call(NamedTuple):
    function: Callable[..., Any]
    form: pytree.TreeSpec  # of (args, kwargs)
    arguments: tuple[Any, ...]
    values: Recomputed
    result: Result


class FurtherInputs:
    """The further inputs of a graph, for each call."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls

    def of(self, module: nn.Module, inputs: list[Any]) -> list[Any] | None:
        """All inputs of the graph, None where the graph does not hold for what the functions give.

        Args:
            module: the model.
            inputs: of the call.

        Raises:
            OptionError: a function has written into one, which it did not in the call that was captured.
        """
        found = list(inputs)
        for call in self._calls:
            try:
                made, result = run_call(call, module, found)
            except _Writes as error:  # who runs it once more would write twice
                raise OptionError(
                    f"{error}, in this call and not in the one that was captured, and was run before the graph. Pass "
                    "capture='dynamo' to fxamp.convert, or let it write into a copy."
                ) from None
            except Exception:  # no data, or it is for the model's own forward to fail
                return None
            if result != call.result:
                return None
            found += made
        return found


def run_call(call: Call, module: nn.Module, inputs: list[Any], is_first: bool = False) -> tuple[list[Any], Result]:
    """The further inputs that a function gives, and its result.

    Args:
        is_first: it is to be found out what the function does: it is given copies.

    Raises:
        CannotRunBefore: it is none that may run beforehand.
        Exception: what the function raises, or an input has no data.
    """
    values = next(call.values.of(inputs))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    check_plain(tensors)
    if any(value.requires_grad or is_functorch_wrapped_tensor(value) for value in tensors):
        raise CannotRunBefore(f"{call.function} is given a tensor that requires a gradient")
    if is_first:
        values = pytree.tree_map_only(torch.Tensor, torch.clone, values)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
    flat = [_filled(argument, values, module) for argument in call.arguments]
    versions = [value._version for value in tensors]
    args, kwargs = pytree.tree_unflatten(flat, call.form)
    before, form = pytree.tree_flatten((args, kwargs))  # a list of numbers is one value
    with outside_of_the_call(), torch.no_grad(), _Watched(tensors):
        given = call.function(*args, **kwargs)
    now, form_now = pytree.tree_flatten((args, kwargs))
    is_same = form_now == form and all(one is other for one, other in zip(now, before, strict=True))
    if not is_same or versions != [value._version for value in tensors]:
        raise _Writes(f"{call.function.__qualname__} writes into what it is given")
    leaves, form = pytree.tree_flatten(given)
    memory = {_memory(value) for value in tensors}
    kinds = tuple(_kind_of(leaf, memory) for leaf in leaves)
    made = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if isinstance(kind, Further)]
    return made, Result(form, kinds)


def _filled(argument: Any, values: Sequence[Any], module: nn.Module) -> Any:
    if isinstance(argument, Value):
        return values[argument.place]
    if isinstance(argument, Held):
        owner = ir.module_at(module, argument.path)
        return owner if argument.name is None else vars(owner)[argument.name]
    return argument


def _kind_of(leaf: Any, memory: set[int]) -> Any:
    """What stands for a leaf of a result."""
    if type(leaf) is torch.Tensor:
        if leaf.requires_grad or is_functorch_wrapped_tensor(leaf) or _memory(leaf) in memory:
            raise CannotRunBefore("a function that runs before the graph gives a tensor that is not its own")
        return Further(leaf.dtype, leaf.dim())
    if type(leaf) in (int, float):
        return Further(type(leaf))
    if not isinstance(leaf, FIXED):
        raise CannotRunBefore(f"a function that runs before the graph gives a {type(leaf).__qualname__}")
    return leaf


def _memory(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


class _Watched(TorchFunctionMode):
    """Lets torch's functions see what a function is given, and what they have made of that, and no other tensor."""

    def __init__(self, given: list[Any]) -> None:
        super().__init__()
        self._known = {id(value): value for value in given}

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs or {})):
            if isinstance(value, torch.Tensor) and id(value) not in self._known:
                raise CannotRunBefore("a function that runs before the graph reads a tensor that it is not given")
        made = function(*args, **(kwargs or {}))
        self._known.update((id(value), value) for value in pytree.tree_leaves(made) if isinstance(value, torch.Tensor))
        return made
