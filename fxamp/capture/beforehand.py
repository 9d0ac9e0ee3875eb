"""Functions of the model that look into its inputs alone, in ways that a graph cannot hold: they run before it.

    for t, h, w in grid.tolist():            # as often, and as far, as the data says
        positions.append(torch.arange(h * w).view(h, w) ...)
    return torch.cat(positions)

Such a function is called as it is written, with the inputs of each call; the tensors that it gives are further inputs
of the graph. So is a tensor whose length the data decides, where Python asks for that.

1. All that it is given hangs on inputs alone, is a constant, or is a module or what a module of the model holds.
2. It reads no other tensor: a weight may be stored low, and what it reads before the graph runs may be of another call.
3. It changes nothing: no argument, no attribute, no random generator.
4. What it gives are tensors of their own memory, numbers and constants, in containers. The graph holds for calls in
   which those have the same types, and are equal where they are no tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.capture.computed import sources, together
from fxamp.capture.inputs import CONSTANTS
from fxamp.capture.objects import FUNCTIONS
from fxamp.capture.recomputed import Recomputed, check_plain
from fxamp.capture.sizes import VARYING
from fxamp.capture.traces import State
from fxamp.capture.unseen import containers_in, outside_of_the_call, refill, unseen
from fxamp.errors import OptionError
from fxamp.fakes import Fakes

_FIXED = (*CONSTANTS, int, float, complex, *FUNCTIONS)


class CannotRunBefore(Exception):
    """What a function does, or is given, that the graph would not repeat if it ran before it."""


class _Writes(CannotRunBefore):
    """Of a write: it is done."""


class _Value(NamedTuple):
    """An argument that hangs on inputs: its place among those that do."""

    place: int


class _Held(NamedTuple):
    """An argument that the model holds: a module, or the attribute of one."""

    path: str
    name: str | None


class _Further(NamedTuple):
    """The type of a further input: of a tensor, or a number's class."""

    kind: Any
    dimensions: int | None = None


class Result(NamedTuple):
    """What a function gives: its form, and its leaves, of which those that are further inputs stand for their types."""

    form: pytree.TreeSpec
    leaves: tuple[Any, ...]


class _Call(NamedTuple):
    function: Callable[..., Any]
    form: pytree.TreeSpec  # of (args, kwargs)
    arguments: tuple[Any, ...]
    values: Recomputed | None
    result: Result


class Beforehand:
    """The functions that one trace leaves out.

    Args:
        root: the model.
        example: the inputs of one call, to which those that are found are added; None where there are none.
        again: what the functions gave when the graph was captured for a call whose data is not known by now.
        made: the further inputs of that.
        fakes: of the model's tensors.
        attribute: what a `get_attr` node reads.
    """

    def __init__(
        self,
        root: nn.Module,
        example: list[Any] | None,
        again: Sequence[Result] | None,
        made: Sequence[Any],
        fakes: Fakes,
        attribute: Callable[[fx.Node], Any],
    ) -> None:
        self._root, self._example, self._again, self._made = root, example, again, iter(made)
        self._fakes, self._attribute = fakes, attribute
        self._calls: list[_Call] = []
        self._held: dict[int, _Held] = {}

    def call(
        self, function: Callable[..., Any], args: Any, kwargs: Any, further: Callable[[Any], fx.Proxy], graph: fx.Graph
    ) -> Any:
        """What a function gives, with proxies in the place of tensors.

        Args:
            further: makes a further input.
            graph: of the trace.

        Raises:
            CannotRunBefore: it is none that may run beforehand.
        """
        name = getattr(function, "__qualname__", str(function))
        if self._example is None or any(hasattr(value, VARYING) for value in self._example):
            raise CannotRunBefore(f"{name} looks into the data of inputs, which is not known")
        flat, form = pytree.tree_flatten((args, kwargs))
        nodes = [leaf.node for leaf in flat if _is_proxy(leaf)]
        places = iter(range(len(nodes)))
        arguments = tuple(_Value(next(places)) if _is_proxy(leaf) else self._argument(leaf, name) for leaf in flat)
        call = _Call(function, form, arguments, self._recomputed(nodes, name, graph), Result(form, ()))
        made, result = self._run(call, name) if self._again is None else self._made_before()
        self._calls.append(call._replace(result=result))
        inputs = iter(made)
        filled = [further(next(inputs)) if isinstance(leaf, _Further) else leaf for leaf in result.leaves]
        return pytree.tree_unflatten(filled, result.form)

    def _made_before(self) -> tuple[list[Any], Result]:
        assert self._again is not None
        result = self._again[len(self._calls)]
        return [next(self._made) for leaf in result.leaves if isinstance(leaf, _Further)], result

    def _recomputed(self, nodes: list[fx.Node], name: str, graph: fx.Graph) -> Recomputed | None:
        if not nodes:
            return None
        whole = graph.create_node("call_function", together, tuple(nodes), {})
        try:
            found = sources(whole, from_inputs=True)
            if found is None:
                raise CannotRunBefore(f"{name} is given what does not hang on inputs alone")
            return Recomputed([whole], found, self._fakes.in_mode(FakeTensorMode()), self._attribute)
        finally:
            graph.erase_node(whole)

    def _run(self, call: _Call, name: str) -> tuple[list[Any], Result]:
        """Run it for the call that is captured, on copies, and put back what it changes."""
        assert self._example is not None
        before, generator = State(self._root), torch.get_rng_state()
        contents = containers_in([vars(module) for module in self._root.modules()])
        try:
            with unseen(self._root):
                given = _run(call, self._root, self._example, is_first=True)
                is_same = torch.equal(generator, torch.get_rng_state())
        except CannotRunBefore:
            raise
        except Exception as error:  # it may be for the call to raise it
            raise CannotRunBefore(f"{name} cannot run before the graph: {type(error).__name__}: {error}") from error
        finally:
            changes = list(before.changes())
            before.restore()
            is_refilled = [refill(container, elements) for container, elements in contents]
        if changes or any(is_refilled) or not is_same:
            raise CannotRunBefore(f"{name} changes the model, or draws random numbers")
        return given

    def _argument(self, value: Any, name: str) -> Any:
        if isinstance(value, _FIXED):
            return value
        if not self._held:
            for path, module in self._root.named_modules():
                for key, held in vars(module).items():
                    self._held.setdefault(id(held), _Held(path, key))
            self._held.update((id(module), _Held(path, None)) for path, module in self._root.named_modules())
        if isinstance(value, torch.Tensor) or id(value) not in self._held:
            raise CannotRunBefore(f"{name} is given a {type(value).__qualname__} that is neither input nor constant")
        return self._held[id(value)]

    def results(self) -> tuple[Result, ...]:
        """What each of them gave."""
        return tuple(call.result for call in self._calls)

    def trial(self) -> "FurtherInputs | None":
        """What runs them again; None where there are none."""
        return FurtherInputs(self._calls) if self._calls else None


class FurtherInputs:
    """The further inputs of a graph, for each call."""

    def __init__(self, calls: list[_Call]) -> None:
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
                made, result = _run(call, module, found)
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


def _run(call: _Call, module: nn.Module, inputs: list[Any], is_first: bool = False) -> tuple[list[Any], Result]:
    """The further inputs that a function gives, and its result.

    Args:
        is_first: it is to be found out what the function does: it is given copies.

    Raises:
        CannotRunBefore: it is none that may run beforehand.
        Exception: what the function raises, or an input has no data.
    """
    values = [] if call.values is None else next(call.values.of(inputs))
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
    with outside_of_the_call(), torch.no_grad(), _Watched(tensors):
        given = call.function(*args, **kwargs)
    now, form = pytree.tree_flatten((args, kwargs))
    is_same = form == call.form and all(one is other for one, other in zip(now, flat, strict=True))
    if not is_same or versions != [value._version for value in tensors]:
        raise _Writes(f"{call.function.__qualname__} writes into what it is given")
    leaves, form = pytree.tree_flatten(given)
    memory = {_memory(value) for value in tensors}
    kinds = tuple(_kind_of(leaf, memory) for leaf in leaves)
    made = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if isinstance(kind, _Further)]
    return made, Result(form, kinds)


def _is_proxy(value: Any) -> bool:
    return issubclass(type(value), fx.Proxy)


def _filled(argument: Any, values: Sequence[Any], module: nn.Module) -> Any:
    if isinstance(argument, _Value):
        return values[argument.place]
    if isinstance(argument, _Held):
        owner = ir.module_at(module, argument.path)
        return owner if argument.name is None else vars(owner)[argument.name]
    return argument


def _kind_of(leaf: Any, memory: set[int]) -> Any:
    """What stands for a leaf of a result."""
    if type(leaf) is torch.Tensor:
        if leaf.requires_grad or is_functorch_wrapped_tensor(leaf) or _memory(leaf) in memory:
            raise CannotRunBefore("a function that runs before the graph gives a tensor that is not its own")
        return _Further(leaf.dtype, leaf.dim())
    if type(leaf) in (int, float):
        return _Further(type(leaf))
    if not isinstance(leaf, _FIXED):
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
