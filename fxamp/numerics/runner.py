"""Run one graph node by node, on real values, showing every value to a watcher; weights are read as it is told."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.dtypes import LOW_DTYPES
from fxamp.model.variant import Variant
from fxamp.numerics.exact import exact_weight, has_master
from fxamp.numerics.parts import Turn
from fxamp.paths import attribute_at
from fxamp.tree import every_parameter, without_common_end

Identity = tuple[int, int, tuple[torch.Size, ...]]
"""(the graph's turn in the call, its number in the report, the sizes of what came in)"""


def sizes_of(inputs: Any) -> tuple[torch.Size, ...]:
    """What the identity of a part says of what came in: the sizes of the tensors."""
    return tuple(value.shape for value in inputs if isinstance(value, torch.Tensor) and not value.is_nested)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One graph's turn in a call; a model that Dynamo captured may run several graphs, and one several times.

    Attributes:
        number: of the turn, in order of running.
        graph: number of the graph in `fxamp.report(model)`.
        variant: what runs.
        sizes: of the tensors that come in.
        turn: where forward runs as it is written, the call of a module that is a graph.
        moved: (path of a module, path of the equal one whose weights its graph was given), see `served`.
    """

    number: int
    graph: int
    variant: Variant
    sizes: tuple[torch.Size, ...]
    turn: Turn | None = None
    moved: tuple[str, str] | None = None

    @property
    def identity(self) -> Identity:
        """What it shares with its twin in another run; it has none where that has decided otherwise on its data."""
        return self.number, self.graph, self.sizes

    def model(self, model: nn.Module) -> nn.Module:
        """What it is a graph of: the model, or the module that forward has called."""
        return model if self.turn is None else self.turn.module

    def root(self, model: nn.Module) -> nn.Module:
        """Where the paths in the graph lead from."""
        return self.variant.captured.root if self.variant.again else self.model(model)

    def module_path(self, node: fx.Node) -> str:
        """Dotted path of the innermost module whose forward made the node; equal parts of a model share a graph."""
        path = ir.module_path(node)
        if self.turn is not None:
            return self.turn.path + path.removeprefix(self.variant.blocks[0])
        if self.moved is not None and f"{path}.".startswith(f"{self.moved[0]}."):
            return self.moved[1] + path.removeprefix(self.moved[0])
        return path


def served(variant: Variant, inputs: Sequence[Any], model: nn.Module) -> tuple[str, str] | None:
    """For whom a graph of Dynamo's runs that was made for an equal module: the paths of both, None for itself."""
    nodes = variant.graph.find_nodes(op="placeholder")
    for node, value in zip(nodes, inputs, strict=False):
        path = node.meta.get(ir.WEIGHT_PATH)
        if path is None or not isinstance(value, torch.Tensor) or attribute_at(model, path) is value:
            continue
        for name in (name for name, weight in every_parameter(model) if weight is value):
            mine, other = without_common_end(str(path), name)
            if mine and other:
                return mine, other
    return None


See = Callable[[Part, fx.Node, Any], Any]
"""(part, node, value) -> the value that goes on: what a watcher sees of every node, in order."""
Edge = Callable[[Part, fx.Node, fx.Node, Any], Any]
"""(part, the node read, its reader, value) -> the value that the reader sees."""


class Runner(fx.Interpreter):
    """Runs a graph of `model`, showing every value to `see`.

    Args:
        model: parameters and modules are read from it by path.
        part: the graph.
        see: gets each node and its value, and gives the value that goes on.
        edge: gets (the node read, its reader, the value), and gives the value that the reader sees.
        as_float32: parameters that are low are read as the float32 numbers they stand for, and modules that are
            converted by themselves run as they are written.
        stored_anew: high ops read the masters of parameters that are stored low, and high modules their numbers in
            float32: the graph is one of other options, and a conversion with those would store them so.
        plain_blocks: of those modules the paths of some that do so in any case.
    """

    def __init__(
        self,
        model: nn.Module,
        part: Part,
        see: See,
        edge: Edge | None = None,
        as_float32: bool = False,
        stored_anew: bool = False,
        plain_blocks: Collection[str] = (),
    ) -> None:
        captured = part.variant.captured
        super().__init__(part.root(model), graph=part.variant.graph)
        self.extra_traceback = False
        self.captured = captured
        self.part = part
        self.model = model
        self.see = see
        self.edge = edge
        self.as_float32 = as_float32
        self.stored_anew = stored_anew
        self.plain_blocks = plain_blocks
        self.reads_exactly = as_float32

    def run_node(self, n: fx.Node) -> Any:
        self.reads_exactly = self.as_float32 or (self.stored_anew and ir.mark(n).precision == "high")
        value = super().run_node(n)
        if n.op == "placeholder" and ir.WEIGHT_PATH in n.meta:  # Dynamo runs one graph for several equal modules
            value = self._read(value) if isinstance(value, torch.Tensor) else value
        elif self.stored_anew and (stored := self._widened_weight(n)) is not None:
            value = exact_weight(stored)
        if n.op == "output":
            return value
        return self._see_result(n, value) if ir.TRANSFORMED in n.meta else self.see(self.part, n, value)

    def _see_result(self, node: fx.Node, value: Any) -> Any:
        """Show what a torch.func transform gives; what has a level inside of it cannot be looked at."""
        leaves = pytree.tree_leaves(value)
        if any(isinstance(leaf, torch.Tensor) and is_functorch_wrapped_tensor(leaf) for leaf in leaves):
            return value
        with temporarily_clear_interpreter_stack():
            return self.see(self.part, node, value)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[Any, Any]:
        if self.edge is None or ir.TRANSFORMED in n.meta:
            return super().fetch_args_kwargs_from_env(n)
        edge = self.edge
        read = lambda given: edge(self.part, given, n, self.env[given])  # noqa: E731
        return fx.node.map_arg(n.args, read), fx.node.map_arg(dict(n.kwargs), read)

    def fetch_attr(self, target: str) -> Any:
        if target in self.captured.constants:
            return self.captured.constants[target]
        value = attribute_at(self.module, target)
        return self._read(value) if isinstance(value, torch.Tensor) else value

    def _read(self, weight: torch.Tensor) -> torch.Tensor:
        return exact_weight(weight) if self.as_float32 and weight.dtype in LOW_DTYPES else weight

    def _widened_weight(self, node: fx.Node) -> torch.Tensor | None:
        """The parameter, low with a float32 master, that a high op reads through this cast."""
        mark = ir.mark(node)
        if mark.role != "weight cast" or mark.precision != "high" or node.all_input_nodes[0].op != "get_attr":
            return None
        weight = attribute_at(self.module, str(node.all_input_nodes[0].target))
        return weight if has_master(weight) else None

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.module.get_submodule(str(target))
        if self.as_float32 or any(self.module.get_submodule(path) is module for path in self.plain_blocks):
            for part in module.modules():  # none has weights stored low: neither O2 nor O3 takes such modules
                if ir.ENGINE in part.__dict__:
                    on_leaving(part.__dict__.__setitem__, ir.ENGINE, part.__dict__.pop(ir.ENGINE))
        if self.reads_exactly and (low := _low_tensors(module)):
            exact = {name: exact_weight(tensor) for name, tensor in low.items()}
            return torch.func.functional_call(module, exact, args, kwargs)
        return module(*args, **kwargs)


def run_part(runner: Runner, inputs: Any) -> Any:
    """What the model's forward, or Dynamo, gets from a graph."""
    result, build = runner.run(*inputs), runner.captured.build
    return result if build is None else build(runner.module, result)


_leaving: contextvars.ContextVar[contextlib.ExitStack] = contextvars.ContextVar("what a look has switched")


@contextlib.contextmanager
def switched_back() -> Iterator[None]:
    """On leaving, what runs of a look have switched is as it was."""
    with contextlib.ExitStack() as stack:
        outer = _leaving.set(stack)
        try:
            yield
        finally:
            _leaving.reset(outer)


def on_leaving(call: Callable[..., Any], *args: Any) -> None:
    """Have something called at the end of the look, when a backward that runs parts of it again is over."""
    _leaving.get().callback(call, *args)


def _low_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's low parameters and buffers, by path."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor for name, tensor in named if tensor.dtype in LOW_DTYPES}
