"""What Python asks of the data of forward's inputs: asked again of each call's, before its graph is chosen.

    if mask.all():          # nothing is hidden: this way needs no mask
        mask = None

A graph holds for the calls that answer alike. That costs what it costs in eager, which waits for a GPU's answer, too.
What layers have computed is not asked: that would run them twice.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from fxamp.capture.computed import computed
from fxamp.capture.sizes import MOST_SIZES, VARYING, Sizes
from fxamp.capture.unseen import outside_of_the_call
from fxamp.fakes import UNKNOWN, Fakes

MOST_QUESTIONS = 4
"""So many differing questions one graph may ask: each doubles the graphs that there may be."""


class _Question(NamedTuple):
    node: fx.Node
    sources: list[fx.Node]  # the inputs, sizes and dtypes that it is computed of
    answer: bool


class DataQuestions:
    """The questions of one trace.

    Args:
        example: the inputs of one call; None where there are none.
    """

    def __init__(self, example: list[Any] | None) -> None:
        is_sample = any(hasattr(value, VARYING) for value in example or ())  # its data is made up
        self._example = None if is_sample else example
        self._asked: dict[str, _Question] = {}
        self._forms: dict[fx.Node, str] = {}
        self._numbers: dict[str, str] = {}

    def answer(self, node: fx.Node, sources: list[fx.Node]) -> Any:
        """True or False for the call that is captured; UNKNOWN where its data does not tell."""
        if self._example is None:
            return UNKNOWN
        form = self._form(node)
        if form not in self._asked:
            if len(self._asked) >= MOST_QUESTIONS:
                return UNKNOWN
            given = dict(zip(node.graph.find_nodes(op="placeholder"), self._example, strict=True))
            known = {each: given[each] if each in given else each.meta["val"] for each in sources}
            try:
                held = _ask(node, known)
            except Exception:  # it has no data; inside of vmap
                return UNKNOWN
            self._asked[form] = _Question(node, sources, held)
        return self._asked[form].answer

    def _form(self, node: fx.Node) -> str:
        """The same for nodes that compute the same: each layer may ask anew."""
        if node not in self._forms:
            text = f"{node.op}:{node.target}{fx.node.map_arg((node.args, node.kwargs), self._form)!r}"
            self._forms[node] = self._numbers.setdefault(text, f"%{len(self._numbers)}")
        return self._forms[node]

    def trial(self, fakes: Fakes, attribute: Callable[[fx.Node], Any]) -> "DataTrial | None":
        """What asks once more; None where nothing was asked.

        Args:
            fakes: of the model's tensors.
            attribute: what a `get_attr` node reads.
        """
        return DataTrial(list(self._asked.values()), fakes, attribute) if self._asked else None


class DataTrial:
    """Whether a call's inputs answer as those did that a graph was captured with.

    Args:
        questions: their nodes are copied: passes change the graph.
        fakes, attribute: see `DataQuestions.trial`.
    """

    def __init__(self, questions: list[_Question], fakes: Fakes, attribute: Callable[[fx.Node], Any]) -> None:
        whole = questions[0].node.graph
        sources = dict.fromkeys(each for question in questions for each in question.sources)
        sizes = [each for each in sources if each.op != "placeholder" and not each.meta.get("static")]
        graph = fx.Graph()
        copies = {node: graph.node_copy(node) for node in whole.find_nodes(op="placeholder")}
        self._inputs = list(copies.values())
        copies.update((each, graph.placeholder(each.name)) for each in sources if each not in copies)
        self._constants = {copies[each]: each.meta["val"] for each in sources if each.meta.get("static")}
        self._sizes = [copies[each] for each in sizes]
        self._answers = [(_copied(question.node, graph, copies), question.answer) for question in questions]
        for node in graph.nodes:
            node.meta.clear()  # fakes would keep whole models alive
        self._sizes_again = Sizes(whole, sizes, fakes, attribute)
        self._known: dict[tuple[Any, ...], dict[fx.Node, Any]] = {}

    def __call__(self, inputs: list[Any]) -> bool:
        try:
            known = {**self._constants, **self._sizes_for(inputs), **dict(zip(self._inputs, inputs, strict=True))}
            return all(_ask(node, known) is answer for node, answer in self._answers)
        except Exception:  # it has no data, or forward fails on it and is to say so itself
            return False

    def _sizes_for(self, inputs: list[Any]) -> dict[fx.Node, Any]:
        """The sizes for such inputs, which are tried where they were not met before."""
        if not self._sizes:
            return {}
        key = tuple(tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in inputs)
        if key not in self._known:
            if len(self._known) >= MOST_SIZES:
                self._known.clear()
            with outside_of_the_call(), torch.no_grad():
                self._known[key] = {
                    self._sizes[place]: value
                    for place, value in self._sizes_again.of(*self._sizes_again.on_fakes(inputs))
                }
        return self._known[key]


def _ask(node: fx.Node, known: dict[fx.Node, Any]) -> bool:
    for value in known.values():
        if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, nn.Parameter):
            raise TypeError(f"a {type(value).__qualname__} is not asked")  # torch.export would note that it was
    with outside_of_the_call(), torch.no_grad():
        return bool(computed(node, known))


def _copied(node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    if node not in copies:
        copies[node] = graph.node_copy(node, lambda given: _copied(given, graph, copies))
    return copies[node]
