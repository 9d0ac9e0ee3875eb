"""Which inputs and weights of a graph lie in the same memory: a write into one of them changes the others."""

import dataclasses
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxamp import ir
from fxamp.capture.captured import Captured
from fxamp.fakes import MEMORY, memory_of
from fxamp.inplace import mutated
from fxamp.paths import kept_in

# They write into their statistics, which nothing reads low.
_STATISTICS = frozenset({"batch_norm", "instance_norm"})

Place = tuple[Any, Any]  # a container, None for the inputs of a call, and the key in it


@dataclasses.dataclass(frozen=True)
class Memory:
    """Which float tensors share memory, for a graph that writes into one of its inputs or weights.

    Attributes:
        tensors: what the graph reads: the place of an input, the path of a weight, or a constant of the graph.
        groups: for each of them the first one that lies in the same memory.
    """

    tensors: tuple[int | str | torch.Tensor, ...]
    groups: tuple[int, ...]
    _places: "weakref.WeakKeyDictionary[nn.Module, list[Place]]" = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary, repr=False, compare=False
    )

    def holds(self, module: nn.Module, inputs: Sequence[Any]) -> bool:
        """Whether those share memory now that did, and no others."""
        if (places := self._places.get(module)) is None:
            places = self._places[module] = [_place(module, each) for each in self.tensors]
        try:
            found = [(inputs if entries is None else entries)[key] for entries, key in places]
        except KeyError:  # a weight is gone
            return False
        return groups_of(found) == self.groups

    def forget(self, module: nn.Module) -> None:
        """Look anew for the module's weights: its parts are other objects than they were."""
        self._places.pop(module, None)


def memory_between(captured: Captured) -> Memory | None:
    """What a captured graph's inputs and weights share now, None where that makes no difference to it."""
    graph = captured.graph
    if captured.example is None or not _writes_outside(graph):
        return None
    inputs, weights = (graph.find_nodes(op=op) for op in ("placeholder", "get_attr"))
    values: dict[int | str, Any] = dict(enumerate(captured.example))
    values |= {str(node.target): captured.weight(node) for node in weights}
    floats = {key: value for key, value in values.items() if is_float(value)}
    note_memory([*inputs, *weights], [*captured.example, *map(captured.weight, weights)])
    tensors = tuple(captured.constants.get(str(key), key) for key in floats)
    return Memory(tensors, groups_of(floats.values()))


def note_memory(nodes: Iterable[fx.Node], values: Iterable[Any]) -> None:
    """Note on inputs and weights which of them lie in the same memory; `values` are what they give in one call."""
    for node, group in zip(nodes, groups_of(values), strict=True):
        node.meta[MEMORY] = group


def groups_of(values: Iterable[Any]) -> tuple[int, ...]:
    """For each value, the place of the first one that lies in the same memory."""
    first: dict[object, int] = {}
    return tuple(first.setdefault(memory_of(value), place) for place, value in enumerate(values))


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _writes_outside(graph: fx.Graph) -> bool:
    """Whether a node of the model may write into the memory of a float input or weight."""
    outside = {memory_of(value) for value in (node.meta.get("val") for node in _outside(graph)) if is_float(value)}
    written = (
        target
        for node in graph.nodes
        if ir.mark(node).op not in _STATISTICS
        for target in mutated(node)
        if ir.mark(target).role == ""
    )
    return any("val" not in node.meta or memory_of(node.meta["val"]) in outside for node in written)


def _outside(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]


def _place(module: Any, tensor: int | str | torch.Tensor) -> Place:
    """Where a tensor of a graph stands in a model at each call."""
    if isinstance(tensor, torch.Tensor):
        return [tensor], 0
    if isinstance(tensor, int):
        return None, tensor
    return kept_in(module, tensor)
