"""What hangs on the inputs of a call alone, for other calls: computed once more, of their inputs."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxamp.capture.computed import computed
from fxamp.capture.size_formulas import SizeFormulas, size_formulas
from fxamp.capture.size_guards import of_any_size
from fxamp.capture.sizes import MOST_SIZES, TRIALS_BEFORE_GUARD, Sizes, latest
from fxamp.capture.unseen import outside_of_the_call
from fxamp.fakes import Fakes


class Copies:
    """Copies of a graph's nodes, which passes change: one of each, for all that read it."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.of: dict[fx.Node, fx.Node] = {}

    def copy(self, node: fx.Node) -> fx.Node:
        """The copy of a node, and of what it reads."""
        if node not in self.of:
            self._keep(node, self.graph.node_copy(node, self.copy))
        return self.of[node]

    def as_input(self, node: fx.Node) -> fx.Node:
        """What stands for a node whose value is told."""
        if node not in self.of:
            self._keep(node, self.graph.placeholder(node.name))
        return self.of[node]

    def _keep(self, node: fx.Node, copy: fx.Node) -> None:
        copy.meta.clear()  # fakes would keep whole models alive
        self.of[node] = copy


class Recomputed:
    """What nodes give that hang on inputs alone.

    Args:
        nodes: they are copied.
        sources: the inputs, sizes and dtypes that they are computed of.
        fakes: of the model's tensors.
        attribute: what a `get_attr` node reads.
        copies: of the same graph's nodes.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        sources: Sequence[fx.Node],
        fakes: Fakes,
        attribute: Callable[[fx.Node], Any],
        copies: Copies | None = None,
    ) -> None:
        copies = copies or Copies()
        whole = nodes[0].graph
        sizes = [each for each in sources if each.op != "placeholder" and not each.meta.get("static")]
        self._inputs = list(map(copies.as_input, whole.find_nodes(op="placeholder")))
        self._constants = {copies.as_input(each): each.meta["val"] for each in sources if each.meta.get("static")}
        self._sizes = list(map(copies.as_input, sizes))
        self._nodes = list(map(copies.copy, nodes))
        self._sizes_again = Sizes(whole, sizes, fakes, attribute)
        self._known: dict[tuple[Any, ...], dict[int, Any]] = {}
        self._formulas: SizeFormulas | None = None
        self._tried = 0

    def of(
        self, inputs: Sequence[Any], with_gradients: bool = False, known: dict[fx.Node, Any] | None = None
    ) -> Iterator[Any]:
        """What the nodes give for a call, one by one.

        Args:
            with_gradients: values show whether they require a gradient.
            known: what is known by now of the call; what is computed is put there.

        Raises:
            Exception: an input has no data (or is no plain tensor), or forward itself fails on it.
        """
        check_plain(inputs)
        known = {} if known is None else known
        known.update(self._constants)
        known.update(zip(self._inputs, inputs, strict=True))
        if not all(map(known.__contains__, self._sizes)):
            with outside_of_the_call(), torch.no_grad():
                known.update((self._sizes[place], value) for place, value in self._sizes_for(list(inputs)).items())
        for node in self._nodes:
            with outside_of_the_call(), torch.set_grad_enabled(with_gradients):
                value = computed(node, known)
            yield value

    def _sizes_for(self, inputs: list[Any]) -> dict[int, Any]:
        """The sizes for such inputs, by their places: tried for each that was not met before, until formulas tell."""
        if self._formulas is not None and (told := self._formulas(inputs)) is not None:
            return told
        read = [inputs[place] for place in self._sizes_again.read]
        key = tuple(tuple(each.shape) if isinstance(each, torch.Tensor) else (type(each), each) for each in read)
        if key not in self._known:
            if len(self._known) >= MOST_SIZES:
                self._known.clear()
            self._known[key] = self._try(inputs)
        return self._known[key]

    def _try(self, inputs: list[Any]) -> dict[int, Any]:
        began = time.monotonic()
        found = dict(self._sizes_again.of(*self._sizes_again.on_fakes(inputs)))
        self._tried += 1
        if self._tried == TRIALS_BEFORE_GUARD:
            formulas = size_formulas(self._sizes_again, list(map(of_any_size, inputs)), latest(began))
            self._formulas = formulas if formulas is not None and formulas(inputs) == found else None
        return found


def check_plain(values: Sequence[Any]) -> None:
    """Raise a TypeError for a tensor that is none of torch's own: torch.export would note that its data was asked."""
    for value in values:
        if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, nn.Parameter):
            raise TypeError(f"a {type(value).__qualname__} is not asked")
