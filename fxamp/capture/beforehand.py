"""Functions of the model that look into its inputs alone, in ways that a graph cannot hold: they run before it.

    for t, h, w in grid.tolist():            # as often, and as far, as the data says
        positions.append(torch.arange(h * w).view(h, w) ...)
    return torch.cat(positions)

Such a function is called as it is written, with the inputs of each call; the tensors that it gives are further inputs
of the graph. So is a tensor whose length the data decides, where Python asks for that.

1. All that it is given hangs on inputs alone, is a constant, or is a module or what a module of the model holds.
2. It reads no other tensor: a weight may be stored low, and what it reads before the graph runs may be of another call.
3. It changes nothing: no argument, no attribute, no global, no random generator; and forward has set neither an
   attribute nor a global before, which it might read.
4. What it gives are tensors of their own memory, numbers and constants, in containers of their own. The graph holds for
   calls in which those have the same types, and are equal where they are no tensors.
5. Nothing that it is given requires a gradient. It runs in the gradient mode of the place where forward calls it.
"""

import contextlib
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fxamp.capture.computed import sources, together
from fxamp.capture.creations import holds_proxy
from fxamp.capture.further_inputs import (
    FIXED,
    Call,
    CannotRunBefore,
    Further,
    FurtherInputs,
    Held,
    Result,
    Value,
    run_call,
)
from fxamp.capture.reached import (
    Reached,
    draws_random_numbers,
    functions_reached,
    may_take_an_element,
    named_values,
)
from fxamp.capture.recomputed import Copies, Recomputed
from fxamp.capture.sizes import is_made_up
from fxamp.capture.traces import State
from fxamp.fakes import Fakes
from fxamp.randomness import generator_states, moved_since
from fxamp.tree import every_module

if TYPE_CHECKING:
    from fxamp.capture.tracer import SymbolicTracer


class Beforehand:
    """The functions that one trace leaves out.

    Args:
        tracer: whose trace it is.
        root: the model.
        fakes: of the model's tensors.
        again: what the functions gave when the graph was captured for a call whose data is not known by now.
        made: the further inputs of that.
        decide_on: notes that the graph is for the numbers of modules alone that a node hangs on.
        functions: those that are left out.
    """

    def __init__(
        self,
        tracer: "SymbolicTracer",
        root: nn.Module,
        fakes: Fakes,
        again: Sequence[Result | None] | None,
        made: Sequence[Any],
        decide_on: Callable[[fx.Node], Any],
        functions: Sequence[FunctionType],
    ) -> None:
        self._tracer, self._root, self._fakes, self._decide_on = tracer, root, fakes, decide_on
        self._again, self._made = again, iter(made)
        kinds = {type(module) for module in root.modules()} if functions else set()
        self._names, self._functions = functions_reached(functions, kinds)
        self._globals = Reached(self._names, self._functions)
        self._has_gradients = torch.is_grad_enabled()
        self._calls: list[Call] = []
        self._copies = Copies()
        self._results: list[Result | None] = []
        self._held: dict[int, list[tuple[str, str | None]]] = {}

    def leave_out(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a function of the model gives: run before the graph where it may, else traced."""
        with contextlib.suppress(CannotRunBefore):
            return self.run(function, args, kwargs)
        self._tracer.follow(function)
        return function(*args, **kwargs)

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a function gives, with proxies in the place of tensors and numbers.

        Raises:
            CannotRunBefore: it may not run before the graph, or might read what forward has set by now.
        """
        name, example = getattr(function, "__qualname__", str(function)), self._tracer.example
        if not self._tracer.is_recording or not holds_proxy((args, kwargs)):
            raise CannotRunBefore(f"{name} is given nothing that is traced")
        if self._tracer.has_assigned:
            raise CannotRunBefore(f"forward has set an attribute before {name}, which may read it")
        if example is None or is_made_up(example):
            raise CannotRunBefore(f"{name} looks into the data of inputs, which is not known")
        if self._globals.are_changed():
            raise CannotRunBefore(f"forward sets a global before it calls {name}, which may read it")
        with self._tracer.values.aside():
            return self._called(function, args, kwargs, name)

    def _called(self, function: Callable[..., Any], args: Any, kwargs: Any, name: str) -> Any:
        flat, form = pytree.tree_flatten((args, kwargs))
        nodes = [leaf.node for leaf in flat if _is_proxy(leaf)]
        places = iter(range(len(nodes)))
        arguments = tuple(Value(next(places)) if _is_proxy(leaf) else self._argument(leaf, name) for leaf in flat)
        values = self._recomputed(nodes, name)
        call = Call(function, form, arguments, values, torch.is_grad_enabled(), Result(form, ()))
        made, result = self._run_first(call, name) if self._again is None else self._made_before(name)
        self._calls.append(call._replace(result=result))
        inputs = map(self._tracer.further_input, made)
        filled = [next(inputs) if isinstance(leaf, Further) else leaf for leaf in result.leaves]
        return pytree.tree_unflatten(filled, result.form)

    def _run_first(self, call: Call, name: str) -> tuple[list[Any], Result]:
        try:
            made, result = self._run(call, name)
        except CannotRunBefore:
            self._results.append(None)
            raise
        self._results.append(result)
        return made, result

    def _made_before(self, name: str) -> tuple[list[Any], Result]:
        assert self._again is not None
        result = self._again[len(self._results)]
        self._results.append(result)
        if result is None:
            raise CannotRunBefore(f"{name} did not run before the graph when it was first captured")
        return [next(self._made) for leaf in result.leaves if isinstance(leaf, Further)], result

    def _recomputed(self, nodes: list[fx.Node], name: str) -> Recomputed:
        graph = self._tracer.graph
        whole = graph.create_node("call_function", together, tuple(nodes), {})
        try:
            found = sources(whole, from_inputs=True)
            if found is None:
                raise CannotRunBefore(f"{name} is given what does not hang on inputs alone")
            for each in found:
                if each.op != "placeholder":
                    self._decide_on(each)
            fakes = self._fakes.in_mode(FakeTensorMode())
            return Recomputed([whole], found, fakes, self._tracer.held_at, self._copies)
        finally:
            graph.erase_node(whole)

    def _run(self, call: Call, name: str) -> tuple[list[Any], Result]:
        """Run it for the call that is captured, on copies, and put back what it changes."""
        assert self._tracer.example is not None
        is_users = isinstance(call.function, FunctionType)
        names, values = (self._names, [self._root, *self._functions]) if is_users else ([], [])
        if draws_random_numbers(names):
            raise CannotRunBefore(f"{name} draws random numbers")
        before, reached, generators = State(self._root), Reached(names, values), generator_states()
        if may_take_an_element(names, named_values(self._functions, self._root)):
            raise CannotRunBefore(f"{name} may take the next element of an iterator")
        try:
            with reached.kept(), torch.set_grad_enabled(torch.is_grad_enabled() and self._has_gradients):
                given = run_call(call, self._root, self._tracer.example, reached)
                is_changed = reached.are_changed() or bool(moved_since(generators))
        except CannotRunBefore:
            raise
        except Exception as error:  # it may be for the call to raise it
            raise CannotRunBefore(f"{name} cannot run before the graph: {type(error).__name__}: {error}") from error
        finally:
            changes = list(before.changes())
            before.restore()
        if changes or is_changed:
            raise CannotRunBefore(f"{name} changes the model or its file, or draws random numbers")
        return given

    def _argument(self, value: Any, name: str) -> Any:
        if isinstance(value, FIXED):
            return value
        if not self._held:
            for path, module in every_module(self._root):
                self._held.setdefault(id(module), []).append((path, None))
                for key, held in vars(module).items():
                    self._held.setdefault(id(held), []).append((path, key))
        if isinstance(value, torch.Tensor) or id(value) not in self._held:
            raise CannotRunBefore(f"{name} is given a {type(value).__qualname__} that is neither input nor constant")
        return Held(tuple(self._held[id(value)]))

    def results(self) -> tuple[Result | None, ...]:
        """What each of them gave, None for one that was run in vain."""
        return tuple(self._results)

    def trial(self) -> "FurtherInputs | None":
        """What runs them again; None where there are none."""
        return FurtherInputs(self._calls) if self._calls else None


def _is_proxy(value: Any) -> bool:
    return issubclass(type(value), fx.Proxy)
