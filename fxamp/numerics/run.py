"""Run a graph node by node, on real values, and look at what flows: nothing of the model or the graph is changed."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.converted import Engine, Variant, engine_of
from fxamp.errors import OptionError

See = Callable[[fx.Node, Any], Any]
"""(node, value) -> the value that goes on: what a watcher sees of every node, in order."""
Edge = Callable[[fx.Node, fx.Node, Any], Any]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a converted model, and the graph it uses."""

    model: nn.Module
    engine: Engine
    variant: Variant
    inputs: list[Any]


def call_of(converted: nn.Module, inputs: Any) -> Call:
    """The graph and the flat inputs of one call.

    Args:
        converted: a converted model.
        inputs: one tensor, a tuple of arguments, (args, kwargs), or a dict of keywords.

    Raises:
        OptionError: not converted, or captured by Dynamo.
    """
    engine = engine_of(converted)
    if engine is None:
        raise OptionError(f"this {type(converted).__qualname__} was not converted: fxamp.convert(model) first.")
    if engine.options.capture == "dynamo":
        raise OptionError(
            "this model was captured by Dynamo, whose graphs cannot be run node by node. Convert its "
            "submodules, or with capture='symbolic'."
        )
    args, kwargs = arguments(inputs)
    variant = engine.capture(converted, args, kwargs)
    flat = pytree.tree_leaves((args, kwargs), is_leaf=lambda value: value is None)
    taken = [value for value, (kind, _) in zip(flat, variant.captured.spec.leaves, strict=True) if kind != "constant"]
    return Call(converted, engine, variant, taken)


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
        variant: the graph.
        see: gets each node and its value, and gives the value that goes on.
        edge: gets (the node read, its reader, the value), and gives the value that the reader sees.
        as_float32: parameters that are stored low (O2, O3) are read as the float32 numbers they stand for.
    """

    def __init__(
        self,
        model: nn.Module,
        variant: Variant,
        see: See,
        edge: Edge | None = None,
        as_float32: bool = False,
    ) -> None:
        super().__init__(model, graph=variant.graph)
        self.extra_traceback = False
        self.captured = variant.captured
        self.see = see
        self.edge = edge
        self.as_float32 = as_float32

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        return value if n.op == "output" else self.see(n, value)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[Any, Any]:
        if self.edge is None:
            return super().fetch_args_kwargs_from_env(n)
        edge = self.edge
        read = lambda given: edge(given, n, self.env[given])  # noqa: E731
        return fx.node.map_arg(n.args, read), fx.node.map_arg(dict(n.kwargs), read)

    def fetch_attr(self, target: str) -> Any:
        if target in self.captured.constants:
            return self.captured.constants[target]
        value = ir.attribute(self.module, target)
        if self.as_float32 and isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
            master = getattr(value, "_fxamp_master", None)
            return value.float() if master is None else master
        return value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.module.get_submodule(str(target))(*args, **kwargs)


def run(
    call: Call, see: See, edge: Edge | None = None, variant: Variant | None = None, as_float32: bool = False
) -> Any:
    """What the call returns, each value shown to `see` on the way; stand in `state_kept`, backward included.

    Args:
        variant: another graph for the same call.
    """
    chosen = variant or call.variant
    runner = Runner(call.model, chosen, see, edge, as_float32)
    result = runner.run(*call.inputs)
    tree = chosen.captured.output_tree
    return result if tree is None else pytree.tree_unflatten(result, tree)


@contextlib.contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Buffers, and torch's random numbers, are afterwards what they were: looking must not train batch norm."""
    saved = {name: value.detach().clone() for name, value in model.named_buffers()}
    devices = sorted({value.device.index or 0 for value in model.parameters() if value.is_cuda})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in model.named_buffers():
                    if name in saved and not torch.equal(value, saved[name]):
                        value.copy_(saved[name])


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
