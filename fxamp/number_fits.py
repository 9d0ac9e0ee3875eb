"""Whether the numbers that a graph reads at each call still fit the low dtype as they did when it was made.

A fill value of 0 becomes -1e9, an epsilon of 1 becomes 1e-9: beyond what float16 holds, and below it. Numbers of
modules that have changed between calls, and those that forward is given, are values of the graph; the rules decide on
them as on literals, by what they were at its capture, so a graph is for numbers that fit as those did.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from fxamp.passes.literals import ASKED, NumberFit, computed_of, number_fit
from fxamp.paths import module_at


class NumberFits:
    """A condition of a graph.

    Args:
        graph: the rewritten one; the rules marked the numbers that they asked about.
        low: the dtype they were compared with.
    """

    def __init__(self, graph: fx.Graph, low: torch.dtype) -> None:
        asked = [node for node in graph.nodes if ASKED in node.meta]
        leaves, self._compute = _computation(asked)
        inputs = graph.find_nodes(op="placeholder")
        self._given = [inputs.index(node) for node in leaves if node.op == "placeholder"]
        self._places = [str(node.target).rpartition(".") for node in leaves if node.op == "get_attr"]
        self._is_added = [bool(node.meta[ASKED]) for node in asked]
        self._low = low
        self._fits = [
            number_fit(node.meta["val"], low, is_added) for node, is_added in zip(asked, self._is_added, strict=True)
        ]
        self._seen: tuple[list[Any], bool] | None = None  # numbers, and whether the graph is for them

    def __bool__(self) -> bool:
        """Whether there is anything to ask."""
        return bool(self._fits)

    def __call__(self, module: nn.Module, inputs: list[Any]) -> bool:
        """Whether the graph may run. A comparison, where the numbers are as before."""
        numbers = self._numbers(module, inputs)
        seen = self._seen
        if seen is None or seen[0] != numbers:
            seen = self._seen = (numbers, self._fit(numbers))
        return seen[1]

    def holds(self, module: nn.Module, inputs: list[Any]) -> bool:
        """The same, and nothing is remembered: Dynamo comes through here."""
        return self._fit(self._numbers(module, inputs))

    def _numbers(self, module: nn.Module, inputs: list[Any]) -> list[Any]:
        read = [getattr(module_at(module, owner), name) for owner, _, name in self._places]
        return [*[inputs[at] for at in self._given], *read]

    def _fit(self, numbers: list[Any]) -> bool:
        found = self._compute(*numbers)
        now: list[NumberFit] = [
            number_fit(value, self._low, is_added) for value, is_added in zip(found, self._is_added, strict=True)
        ]
        return now == self._fits


def _computation(asked: list[fx.Node]) -> tuple[list[fx.Node], Callable[..., tuple[float, ...]]]:
    """What the numbers are computed of, arguments first, and a function that computes them of it."""
    needed = computed_of(asked)
    order = [node for node in asked[0].graph.nodes if node in needed] if asked else []
    leaves = [node for kind in ("placeholder", "get_attr") for node in order if node.op == kind]
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"number_{at}") for at, node in enumerate(leaves)}
    for node in order:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in asked))
    return leaves, fx.GraphModule(nn.Module(), graph).forward
