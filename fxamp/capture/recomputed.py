"""What hangs on the inputs of a call alone, for other calls: computed once more, of their inputs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxamp.capture.computed import computed
from fxamp.capture.sizes import MOST_SIZES, Sizes
from fxamp.capture.unseen import outside_of_the_call
from fxamp.fakes import Fakes


class Recomputed:
    """What nodes give that hang on inputs alone.

    Args:
        nodes: they are copied: passes change the graph.
        sources: the inputs, sizes and dtypes that they are computed of.
        fakes: of the model's tensors.
        attribute: what a `get_attr` node reads.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        sources: Sequence[fx.Node],
        fakes: Fakes,
        attribute: Callable[[fx.Node], Any],
    ) -> None:
        whole = nodes[0].graph
        sizes = [each for each in sources if each.op != "placeholder" and not each.meta.get("static")]
        graph = fx.Graph()
        copies = {node: graph.node_copy(node) for node in whole.find_nodes(op="placeholder")}
        self._inputs = list(copies.values())
        copies.update((each, graph.placeholder(each.name)) for each in sources if each not in copies)
        self._constants = {copies[each]: each.meta["val"] for each in sources if each.meta.get("static")}
        self._sizes = [copies[each] for each in sizes]
        self._nodes = [_copied(node, graph, copies) for node in nodes]
        for node in graph.nodes:
            node.meta.clear()  # fakes would keep whole models alive
        self._sizes_again = Sizes(whole, sizes, fakes, attribute)
        self._known: dict[tuple[Any, ...], dict[fx.Node, Any]] = {}

    def of(self, inputs: Sequence[Any], with_gradients: bool = False) -> Iterator[Any]:
        """What the nodes give for a call, one by one.

        Args:
            with_gradients: values show whether they require a gradient.

        Raises:
            Exception: an input has no data (or is no plain tensor), or forward itself fails on it.
        """
        check_plain(inputs)
        with outside_of_the_call(), torch.no_grad():
            known = {**self._constants, **self._sizes_for(inputs), **dict(zip(self._inputs, inputs, strict=True))}
        for node in self._nodes:
            with outside_of_the_call(), torch.set_grad_enabled(with_gradients):
                value = computed(node, known)
            yield value

    def _sizes_for(self, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
        """The sizes for such inputs, which are tried where they were not met before."""
        if not self._sizes:
            return {}
        key = tuple(tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in inputs)
        if key not in self._known:
            if len(self._known) >= MOST_SIZES:
                self._known.clear()
            self._known[key] = {
                self._sizes[place]: value
                for place, value in self._sizes_again.of(*self._sizes_again.on_fakes(list(inputs)))
            }
        return self._known[key]


def check_plain(values: Sequence[Any]) -> None:
    """Raise a TypeError for a tensor that is none of torch's own: torch.export would note that its data was asked."""
    for value in values:
        if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, nn.Parameter):
            raise TypeError(f"a {type(value).__qualname__} is not asked")


def _copied(node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    if node not in copies:
        copies[node] = graph.node_copy(node, lambda given: _copied(given, graph, copies))
    return copies[node]
