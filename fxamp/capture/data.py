"""What Python asks of the data of forward's inputs: asked again of each call's, before its graph is chosen.

    if mask.all():          # nothing is hidden: this way needs no mask
        mask = None

A graph holds for the calls that answer alike. That costs what it costs in eager, which waits for a GPU's answer, too.
What layers have computed is not asked: that would run them twice.

transformers asks only where nothing traces or records it (`isinstance(mask, torch.fx.Proxy)`). So it is told that
nothing traces it, where what it asks then can be answered. Calls that are recorded, whose data nobody may wait for,
have graphs of their own.
"""

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx

from fxamp.capture.computed import Forms, computed, item_at
from fxamp.capture.recomputed import Recomputed, check_plain
from fxamp.capture.sizes import is_made_up
from fxamp.capture.unseen import outside_of_the_call
from fxamp.fakes import UNKNOWN, Fakes
from fxamp.recorded import is_recorded

MOST_QUESTIONS = 4
"""So many differing questions one graph may ask: each doubles the graphs that there may be."""


MOST_NUMBERS = 256
"""So many in all where they are about single numbers: how long each part of a sequence is, which all are alike in."""


class LeftOut(NamedTuple):
    """What of forward runs before the graph.

    Attributes:
        functions: of the model, which look into inputs alone.
        closes: whether what the data decides the sizes of does, where it hangs on inputs alone.
    """

    functions: tuple[FunctionType, ...] = ()
    closes: bool = False

    @property
    def codes(self) -> frozenset[CodeType]:
        """The code of the functions, as long as none is called in a trace."""
        return frozenset(function.__code__ for function in self.functions)


NOTHING_LEFT_OUT = LeftOut()


class Answers(NamedTuple):
    """What the data of a captured call said, for whoever captures it again: of its inputs nothing but types is kept.

    Attributes:
        questions: the answers, one by one.
        results: what was run before the graph gave, whose tensors stand among the inputs; None for what may not run
            there, as running it has shown.
        left_out: what that was.
        is_recorded: whether the graph is for calls that are recorded (`fxamp.recorded`), or for others; None for all.
    """

    questions: tuple[bool, ...] = ()
    results: tuple[Any, ...] = ()
    left_out: LeftOut = NOTHING_LEFT_OUT
    is_recorded: bool | None = None


class _Question(NamedTuple):
    node: fx.Node
    sources: list[fx.Node]  # the inputs, sizes and dtypes that it is computed of
    answer: bool


class DataQuestions:
    """The questions of one trace.

    Args:
        example: the inputs of one call; None where there are none.
        again: what was answered where the graph was captured for a call whose data is not known by now.
        may_hide: whether forward may be told that it is not traced.
    """

    def __init__(self, example: list[Any] | None, again: Answers | None = None, may_hide: bool = True) -> None:
        self._again = None if again is None else again.questions
        self._example = None if is_made_up(example) else example
        self._asked: dict[str, _Question] = {}
        self.forms = Forms()
        self._asks_if_traced = False
        self._is_for_recorded: bool | None
        if again is not None:
            self._is_for_recorded = again.is_recorded
        elif is_recorded():
            self._is_for_recorded = True
        else:
            self._is_for_recorded = False if may_hide and self._example is not None else None

    def hides_trace(self) -> bool:
        """Whether forward, which asks, is told that it is not traced."""
        self._asks_if_traced = True
        return self._is_for_recorded is False

    @property
    def is_for_recorded(self) -> bool | None:
        """Whether the graph is for calls that are recorded, or for others; None for all."""
        return self._is_for_recorded if self._asks_if_traced else None

    def answer(self, node: fx.Node, sources: list[fx.Node]) -> Any:
        """True or False for the call that is captured; UNKNOWN where its data does not tell."""
        if self._example is None:
            return UNKNOWN
        form = self.forms.of(node)
        if form not in self._asked:
            if len(self._asked) >= (MOST_NUMBERS if _is_of_numbers(node) else MOST_QUESTIONS):
                return UNKNOWN
            held = self._ask(node, sources) if self._again is None else self._again[len(self._asked)]
            if held is UNKNOWN:
                return UNKNOWN
            self._asked[form] = _Question(node, sources, held)
        return self._asked[form].answer

    def _ask(self, node: fx.Node, sources: list[fx.Node]) -> Any:
        given = dict(zip(node.graph.find_nodes(op="placeholder"), self._example or (), strict=True))
        known = {each: given[each] if each in given else each.meta["val"] for each in sources}
        try:
            check_plain(list(known.values()))
            with outside_of_the_call(), torch.no_grad():
                return bool(computed(node, known))
        except Exception:  # it has no data; inside of vmap
            return UNKNOWN

    def answers(self) -> tuple[bool, ...]:
        """What was answered."""
        return tuple(question.answer for question in self._asked.values())

    def trial(self, fakes: Fakes, attribute: Callable[[fx.Node], Any]) -> "DataTrial | None":
        """What asks once more; None where nothing was asked.

        Args:
            fakes: of the model's tensors.
            attribute: what a `get_attr` node reads.
        """
        return DataTrial(list(self._asked.values()), fakes, attribute) if self._asked else None


def _is_of_numbers(node: fx.Node) -> bool:
    """Whether it compares items of lists."""
    return bool(node.all_input_nodes) and all(given.target is item_at for given in node.all_input_nodes)


class DataTrial:
    """Whether a call's inputs answer as those did that a graph was captured with.

    Args:
        questions: asked again in their order.
        fakes, attribute: see `Recomputed`.
    """

    def __init__(self, questions: list[_Question], fakes: Fakes, attribute: Callable[[fx.Node], Any]) -> None:
        sources = dict.fromkeys(each for question in questions for each in question.sources)
        self._again = Recomputed([question.node for question in questions], list(sources), fakes, attribute)
        self._answers = [question.answer for question in questions]

    def __call__(self, inputs: list[Any]) -> bool:
        try:
            return all(
                bool(found) is answer for found, answer in zip(self._again.of(inputs), self._answers, strict=True)
            )
        except Exception:  # it has no data, or forward fails on it and is to say so itself
            return False
