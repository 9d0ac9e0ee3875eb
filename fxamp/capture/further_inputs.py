"""The inputs of a graph behind those of a call: what runs before it gives, as `beforehand.py` found."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxamp.capture.containers import CONTAINERS
from fxamp.capture.inputs import CONSTANTS
from fxamp.capture.objects import FUNCTIONS
from fxamp.capture.reached import Reached
from fxamp.capture.recomputed import Recomputed, check_plain
from fxamp.capture.unseen import outside_of_the_call
from fxamp.errors import OptionError
from fxamp.fakes import memory_of
from fxamp.opnames import canonical_name
from fxamp.paths import module_at
from fxamp.sparse import kind_of

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
    """An argument that the model holds: modules' paths and attributes, of no name for a module itself."""

    places: tuple[tuple[str, str | None], ...]


class Further(NamedTuple):
    """The type of a further input: what `kind_of` says of a tensor, or a number's class."""

    kind: Any


class Result(NamedTuple):
    """What a function gives: its form, and its leaves, of which those that are further inputs stand for their types."""

    form: pytree.TreeSpec
    leaves: tuple[Any, ...]


class Call(NamedTuple):
    function: Callable[..., Any]
    form: pytree.TreeSpec  # of (args, kwargs)
    arguments: tuple[Any, ...]
    values: Recomputed
    has_gradients: bool  # it is in no region of forward's that switches them off
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
        known: dict[fx.Node, Any] = {}
        for call in self._calls:
            try:
                made, result = run_call(call, module, found, known=known)
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


def run_call(
    call: Call,
    module: nn.Module,
    inputs: list[Any],
    reached: Reached | None = None,
    known: dict[fx.Node, Any] | None = None,
) -> tuple[list[Any], Result]:
    """The further inputs that a function gives, and its result.

    Args:
        reached: it is to be found out what the function does, which reaches this: it is given copies.
        known: see `Recomputed.of`.

    Raises:
        CannotRunBefore: it is none that may run beforehand.
        Exception: what the function raises, or an input has no data.
    """
    values = next(call.values.of(inputs, with_gradients=True, known=known))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    check_plain(tensors)
    if any(value.requires_grad or is_functorch_wrapped_tensor(value) for value in tensors):
        raise CannotRunBefore(f"{call.function} is given a tensor that requires a gradient")
    has_gradients = torch.is_grad_enabled() and call.has_gradients
    if call.function is torch.clone:  # of a tensor whose length the data decides: it can do no harm
        with outside_of_the_call(), torch.set_grad_enabled(has_gradients):
            given = values[0].clone()
    else:
        given, tensors = _given(call, module, values, tensors, has_gradients, reached)
    leaves, form = pytree.tree_flatten(given)
    memory = {memory_of(value) for value in tensors}
    kinds = tuple(_kind_of(leaf, memory) for leaf in leaves)
    made = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if isinstance(kind, Further)]
    return made, Result(form, kinds)


def _given(
    call: Call,
    module: nn.Module,
    values: Sequence[Any],
    tensors: list[torch.Tensor],
    has_gradients: bool,
    reached: Reached | None,
) -> tuple[Any, list[torch.Tensor]]:
    """What a function of the model gives, which is watched meanwhile, and the tensors that it was given."""
    if reached is not None:
        copies = {id(value): _copy_of(value) for value in tensors}
        values = [copies.get(id(value), value) for value in values]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
    versions = [value._version for value in tensors]
    flat = [_filled(argument, values, module) for argument in call.arguments]
    args, kwargs = pytree.tree_unflatten(flat, call.form)
    before, form = pytree.tree_flatten((args, kwargs))  # a list of numbers is one value
    watched = _Watched(tensors)
    with outside_of_the_call(), torch.set_grad_enabled(has_gradients), watched:
        given = call.function(*args, **kwargs)
    now, form_now = pytree.tree_flatten((args, kwargs))
    is_same = form_now == form and all(one is other for one, other in zip(now, before, strict=True))
    if not is_same or versions != [value._version for value in tensors]:
        raise _Writes(f"{call.function.__qualname__} writes into what it is given")
    if watched.refusal is not None:  # the function has caught it
        raise watched.refusal
    if _shares_containers(given, (args, kwargs), reached):
        raise CannotRunBefore(f"{call.function.__qualname__} gives a container that is not its own")
    return given, tensors


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own that answers as the tensor does: of the same strides and attributes."""
    with torch.no_grad():
        if tensor.layout is not torch.strided or not tensor.numel():
            copy = tensor.clone()
        else:
            length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            copy = tensor.as_strided((length,), (1,)).clone().as_strided(tensor.shape, tensor.stride())
    copy.__dict__.update(tensor.__dict__)
    return copy


def _shares_containers(given: Any, arguments: Any, reached: Reached | None) -> bool:
    """Whether a container in a result is there twice, an argument, or reached: who writes into it writes there."""
    found = _containers(given)
    others = {id(each) for each in _containers(arguments)}
    is_reached = reached is not None and any(map(reached.holds, found))
    return is_reached or len({*map(id, found)} - others) < len(found)


def _containers(value: Any) -> list[Any]:
    found: list[Any] = []

    def note(part: Any) -> bool:
        if isinstance(part, CONTAINERS):
            found.append(part)
        return False

    pytree.tree_flatten(value, is_leaf=note)
    return found


def _filled(argument: Any, values: Sequence[Any], module: nn.Module) -> Any:
    if isinstance(argument, Value):
        return values[argument.place]
    if isinstance(argument, Held):
        held = [_held_at(module, *place) for place in argument.places]
        if any(each is not held[0] for each in held):
            raise CannotRunBefore("what is one object where the function was captured is several")
        return held[0]
    return argument


def _held_at(module: nn.Module, path: str, name: str | None) -> Any:
    owner = module_at(module, path)
    return owner if name is None else vars(owner)[name]


def _kind_of(leaf: Any, memory: set[object]) -> Any:
    """What stands for a leaf of a result."""
    if type(leaf) is torch.Tensor:
        if leaf.requires_grad or is_functorch_wrapped_tensor(leaf) or memory_of(leaf) in memory:
            raise CannotRunBefore("a function that runs before the graph gives a tensor that is not its own")
        return Further(kind_of(leaf))
    if type(leaf) in (int, float):
        return Further(type(leaf))
    if not isinstance(leaf, FIXED):
        raise CannotRunBefore(f"a function that runs before the graph gives a {type(leaf).__qualname__}")
    return leaf


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) in (tuple, list):  # as mostly; torch's own way takes five times as long
            yield from _tensors_in(value)
        elif not isinstance(value, FIXED):
            yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


@functools.lru_cache(maxsize=512)
def _draws(function: Callable[..., Any]) -> bool:
    return canonical_name(function) in _DRAWING


class _Watched(TorchFunctionMode):
    """Lets torch's functions see what a function is given, and what they have made of that, and no other tensor."""

    def __init__(self, given: list[Any]) -> None:
        super().__init__()
        self._known = {id(value): value for value in given}
        self.refusal: CannotRunBefore | None = None

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(id(value) not in self._known for value in _tensors_in((*args, *kwargs.values()))):
            self._refuse("reads a tensor that it is not given")
        if _draws(function):
            self._refuse("draws random numbers")
        made = function(*args, **kwargs)
        self._known.update((id(value), value) for value in _tensors_in((made,)))
        return made

    def _refuse(self, what: str) -> None:
        self.refusal = CannotRunBefore(f"a function that runs before the graph {what}")
        raise self.refusal


_DRAWING = frozenset(
    "alpha_dropout bernoulli binomial cauchy dropout dropout1d dropout2d dropout3d exponential feature_alpha_dropout "
    "feature_dropout geometric log_normal multinomial normal poisson rand rand_like randint randint_like randn "
    "randn_like random randperm rrelu uniform".split()
)
