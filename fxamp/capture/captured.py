"""What every capture gives: one graph, and the conditions under which it may be used."""

import dataclasses
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.capture.inputs import CallSpec
from fxamp.capture.reads import Place
from fxamp.capture.state import Cell


@dataclasses.dataclass
class Captured:
    """A graph of one model's forward.

    Attributes:
        root: the module the graph's paths start from.
        graph: torch-level graph; placeholders stand for the inputs of `spec`, in order.
        spec: the call structure the graph is valid for.
        training: (module path, flag) for every training flag that was read; the graph is valid while they hold.
        decisions: the user's source lines where Python used the value of a traced shape; the graph is then valid
            for the example's shapes only.
        constants: tensors that belong to no module, by the name that `get_attr` nodes use.
        example: the inputs the graph was captured with, None when it was captured without.
        method: which capture made it.
        state: the Python state that was read; the graph is valid while it is as it was.
        live: numbers of modules that the graph reads at each call.
        grad_mode: what torch.is_grad_enabled() was where the model asked, None where it did not.
        output_tree: how the graph's flat outputs become what forward returns; None: they are that already.
    """

    root: nn.Module
    graph: fx.Graph
    spec: CallSpec
    training: tuple[tuple[str, bool], ...] = ()
    decisions: tuple[str, ...] = ()
    constants: dict[str, Any] = dataclasses.field(default_factory=dict)
    example: list[Any] | None = None
    method: str = "symbolic"
    output_tree: pytree.TreeSpec | None = None
    state: tuple[Cell, ...] = ()
    live: frozenset[Place] = frozenset()
    grad_mode: bool | None = None

    def text(self) -> str:
        """The graph as Python code."""
        return str(self.graph.python_code("self").src)

    def weight(self, node: fx.Node) -> Any:
        """The tensor a weight node of the graph stands for, None where it cannot be found."""
        path = str(node.meta.get(ir.WEIGHT_PATH, node.target))
        return self.constants.get(path, ir.attribute(self.root, path))

    def forget_values(self) -> None:
        """Drop fake values and data: types stand in the marks, and fakes would keep whole models alive."""
        for node in self.graph.nodes:
            if ir.GUESS in node.meta:
                node.meta[ir.GUESSED] = True
            for key in ("val", ir.GUESS, "example_value", "grapharg"):
                node.meta.pop(key, None)
        if self.example is not None:
            self.example = [_without_data(value) for value in self.example]


def _without_data(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value
