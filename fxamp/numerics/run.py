"""Run a model's graphs node by node, on real values, and look at what flows: nothing of the model is changed."""

import contextlib
import contextvars
import copy
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.dtypes import LOW_DTYPES
from fxamp.engine import Engine, engine_of
from fxamp.errors import CaptureError, OptionError
from fxamp.numerics.exact import exact_weight
from fxamp.numerics.extent import check_not_empty
from fxamp.rebuild import rebuild_variant, reference
from fxamp.unconverted import not_converted
from fxamp.variant import Variant


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One graph's turn in a call; a model that Dynamo captured may run several graphs, and one several times.

    Attributes:
        number: of the turn, in order of running.
        graph: number of the graph in `fxamp.report(model)`.
        variant: what runs.
    """

    number: int
    graph: int
    variant: Variant


See = Callable[[Part, fx.Node, Any], Any]
"""(part, node, value) -> the value that goes on: what a watcher sees of every node, in order."""
Edge = Callable[[Part, fx.Node, fx.Node, Any], Any]
"""(part, the node read, its reader, value) -> the value that the reader sees."""


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a converted model, and what runs it.

    Attributes:
        variant: the graph and `inputs` its flat inputs; None where `dynamo` runs the call.
        dynamo: the model's forward through Dynamo, apart from the one that trains, so that looking adds no graph.
        weights: whose parameters are read: the model itself, or one with the same paths.
    """

    model: nn.Module
    engine: Engine
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weights: nn.Module
    variant: Variant | None = None
    inputs: tuple[Any, ...] = ()
    dynamo: Any = None

    def graph_of(self, variant: Variant) -> int:
        """The number of a graph in the model's report: the one of the same text, in order."""
        if self.dynamo is None:
            return next((n for n, known in enumerate(self.engine.all_variants()) if known is variant), 0)
        titles = [known.before for known in self.engine.all_variants()]
        position = next(n for n, known in enumerate(self.dynamo.variants) if known is variant)
        before = [known.before for known in self.dynamo.variants[:position]].count(variant.before)
        same = [number for number, text in enumerate(titles) if text == variant.before]
        return same[min(before, len(same) - 1)] if same else position

    @property
    def takes_derivatives(self) -> bool:
        """Whether forward asks for gradients itself (forces, a penalty), and so runs with gradients on only."""
        return self.variant is not None and any(map(takes_derivative, self.variant.graph.nodes))


def takes_derivative(node: fx.Node) -> bool:
    """Whether a node is a call of torch.autograd.grad."""
    return node.op == "call_function" and node.target is torch.autograd.grad


_looking: "weakref.WeakKeyDictionary[Engine, Any]" = weakref.WeakKeyDictionary()


def call_of(converted: nn.Module, inputs: Any) -> Call:
    """One call, ready to be run.

    Args:
        converted: a converted model.
        inputs: one tensor, a tuple of arguments, (args, kwargs), or a dict of keywords.

    Raises:
        OptionError: not converted, or the inputs hold no sample.
    """
    engine = engine_of(converted)
    if engine is None:
        raise not_converted(converted)
    args, kwargs = arguments(inputs)
    check_not_empty((args, kwargs), "the inputs are")
    variant = _symbolic(converted, engine, args, kwargs)
    if variant is None:
        return Call(converted, engine, args, kwargs, converted, dynamo=looking_dynamo(engine))
    flat = pytree.tree_leaves((args, kwargs), is_leaf=lambda value: value is None)
    taken = [value for value, (kind, _) in zip(flat, variant.captured.spec.leaves, strict=True) if kind != "constant"]
    return Call(converted, engine, args, kwargs, converted, variant, tuple(taken))


def looking_dynamo(engine: Engine) -> Any:
    """A model's forward through Dynamo, apart from the one that trains."""
    if engine not in _looking:
        _looking[engine] = copy.deepcopy(engine.dynamo)
    return _looking[engine]


def _symbolic(converted: nn.Module, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant | None:
    """The graph of a call, None where Dynamo runs it."""
    if engine.options.capture == "dynamo":
        return None
    try:
        return engine.capture(converted, args, kwargs, is_example=True)
    except CaptureError as error:
        engine.fall_back(converted, error)
        return None


class Rewriter:
    """Other graphs in the place of a call's, each made once.

        run(call, see, rewritten=Rewriter(call, overrides={"exp": "deny"}))

    Args:
        changes: of the options; see `rebuild_variant`.
        plain_blocks: paths of modules, converted by themselves, that now run as they are written, in float32.
    """

    def __init__(self, call: Call, plain_blocks: Collection[str] = (), **changes: Any) -> None:
        self.plain_blocks = plain_blocks
        self.make: Callable[[Variant], Variant] = functools.partial(_rebuilt, call, changes)
        self.made: dict[int, tuple[Variant, Variant]] = {}

    def __call__(self, variant: Variant) -> Variant:
        if id(variant) not in self.made:
            self.made[id(variant)] = variant, self.make(variant)
        return self.made[id(variant)][1]


def _rebuilt(call: Call, changes: dict[str, Any], variant: Variant) -> Variant:
    return rebuild_variant(call.model, call.engine, variant, **changes)


def in_float32(call: Call) -> Rewriter:
    """The same graphs as an fp32 run has them."""
    found = Rewriter(call)
    found.make = functools.partial(reference, call.model, call.engine)
    return found


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as (args, kwargs), in any of the forms that `example_inputs` of convert() may have."""
    if isinstance(inputs, dict):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        if len(inputs) == 2 and isinstance(inputs[0], (tuple, list)) and isinstance(inputs[1], dict):
            return tuple(inputs[0]), dict(inputs[1])
        return tuple(inputs), {}
    return (inputs,), {}


class Runner(fx.Interpreter):
    """Runs a graph of `model`, showing every value to `see`.

    Args:
        model: parameters and modules are read from it by path.
        part: the graph.
        see: gets each node and its value, and gives the value that goes on.
        edge: gets (the node read, its reader, the value), and gives the value that the reader sees.
        as_float32: parameters that are stored low (O2, O3) are read as the float32 numbers they stand for, and
            modules that are converted by themselves run as they are written.
        plain_blocks: of those modules the paths of some that do so in any case.
    """

    def __init__(
        self,
        model: nn.Module,
        part: Part,
        see: See,
        edge: Edge | None = None,
        as_float32: bool = False,
        plain_blocks: Collection[str] = (),
    ) -> None:
        captured = part.variant.captured
        super().__init__(captured.root if part.variant.again else model, graph=part.variant.graph)
        self.extra_traceback = False
        self.captured = captured
        self.part = part
        self.model = model
        self.see = see
        self.edge = edge
        self.as_float32 = as_float32
        self.plain_blocks = plain_blocks

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "placeholder" and ir.WEIGHT_PATH in n.meta:
            other = ir.attribute(self.model, n.meta[ir.WEIGHT_PATH])
            value = other if isinstance(other, torch.Tensor) else value
        return value if n.op == "output" else self.see(self.part, n, value)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[Any, Any]:
        if self.edge is None:
            return super().fetch_args_kwargs_from_env(n)
        edge = self.edge
        read = lambda given: edge(self.part, given, n, self.env[given])  # noqa: E731
        return fx.node.map_arg(n.args, read), fx.node.map_arg(dict(n.kwargs), read)

    def fetch_attr(self, target: str) -> Any:
        if target in self.captured.constants:
            return self.captured.constants[target]
        value = ir.attribute(self.module, target)
        if self.as_float32 and isinstance(value, torch.Tensor) and value.dtype in LOW_DTYPES:
            return exact_weight(value)
        return value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.module.get_submodule(str(target))
        if self.as_float32 or any(self.module.get_submodule(path) is module for path in self.plain_blocks):
            switched = _switched.get()  # none has weights stored low: neither O2 nor O3 takes such modules
            converted = [part for part in module.modules() if ir.ENGINE in part.__dict__]
            switched += [(part, part.__dict__.pop(ir.ENGINE)) for part in converted]
        return module(*args, **kwargs)


def run(
    call: Call,
    see: See,
    edge: Edge | None = None,
    rewritten: Rewriter | None = None,
    as_float32: bool = False,
    runner: type[Runner] = Runner,
) -> Any:
    """What the call returns, each value shown to `see` on the way; stand in `state_kept`, backward included.

    Args:
        rewritten: runs other graphs in the place of the call's.

    Raises:
        OptionError: Dynamo gave up on the model, so that there is no graph.
    """
    numbers = itertools.count()

    def run_graph(variant: Variant, inputs: Any) -> Any:
        chosen = variant if rewritten is None else rewritten(variant)
        part = Part(next(numbers), call.graph_of(variant), chosen)
        plain_blocks = () if rewritten is None else rewritten.plain_blocks
        return run_part(runner(call.weights, part, see, edge, as_float32, plain_blocks), inputs)

    if call.variant is not None:
        return run_graph(call.variant, call.inputs)
    base: Any = type(call.model)._fxamp_base  # type: ignore[attr-defined]
    call.dynamo.watch = run_graph
    try:
        result = call.dynamo(base, call.model, call.args, call.kwargs)
    finally:
        call.dynamo.watch = None
    if next(numbers) == 0:
        raise OptionError(
            f"Dynamo made no graph of this call of {base.__qualname__} (a graph break in a loop, Dynamo switched off, "
            "or a TorchDispatchMode): every op runs as it is written. Convert the submodules it consists of."
        )
    return result


def run_part(runner: Runner, inputs: Any) -> Any:
    """What the model's forward, or Dynamo, gets from a graph."""
    result, tree = runner.run(*inputs), runner.captured.output_tree
    return result if tree is None else pytree.tree_unflatten(result, tree)


_switched: contextvars.ContextVar[list[tuple[nn.Module, Engine]]] = contextvars.ContextVar("blocks as written")


@contextlib.contextmanager
def state_kept(*models: nn.Module) -> Iterator[None]:
    """Buffers, and torch's random numbers, are afterwards what they were: looking must not train batch norm.

    So are blocks that ran as they are written, which they do until a backward that recomputes them is over.
    """
    buffers = {id(value): value for model in models for value in model.buffers()}.values()
    saved = [(value, value.detach().clone()) for value in buffers]
    devices = sorted({value.device.index or 0 for model in models for value in model.parameters() if value.is_cuda})
    with torch.random.fork_rng(devices=devices), _converted_again():
        try:
            yield
        finally:
            for value, before in saved:
                if not torch.equal(value, before):  # by .data: a backward that saved the buffer may still come
                    value.data.copy_(before)


@contextlib.contextmanager
def _converted_again() -> Iterator[None]:
    """On leaving, what ran as it is written has its engine again."""
    switched: list[tuple[nn.Module, Engine]] = []
    outer = _switched.set(switched)
    try:
        yield
    finally:
        for part, engine in switched:
            part.__dict__[ir.ENGINE] = engine
        _switched.reset(outer)


def floats_in(value: Any) -> list[torch.Tensor]:
    """The floating tensors inside a value."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def loss_of(output: Any, loss_fn: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    """The loss of an output; without a loss function the mean of all its floating elements.

    Raises:
        OptionError: the loss function gives no scalar tensor.
    """
    if loss_fn is None:
        parts = [tensor.float().mean() for tensor in floats_in(output)]
        return torch.stack(parts).sum()
    loss = loss_fn(output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise OptionError(f"loss_fn gives {type(loss).__qualname__}, not a scalar tensor. Reduce it: loss.mean().")
    return loss
