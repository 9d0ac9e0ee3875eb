"""For which sizes of its inputs a graph holds whose model decides on sizes.

    if x.shape[1] > self.most:     # decided in one way for the call that was captured
        x = x[:, : self.most]

A graph with such a decision holds for the sizes of that call, and for all others with which every such question has the
answer that it had. The nodes that a question hangs on are run once more on fake tensors: of the sizes in question,
once for each (`SizeTrial`), or, for torch.compile, which must know without running anything, of symbolic sizes
(`SizeGuard`): the conditions under which the answers come are what torch.compile would guard. They take seconds to
find where sizes go through many layers, and minutes where windows are cut out of images of any size. A trial that has
met several sizes looks for them too, and gives up where that takes long.
"""

import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxamp import ir
from fxamp.capture.on_meta import OnMeta, is_plain
from fxamp.capture.open_sizes import OpenRun
from fxamp.capture.size_guards import VARYING, SizeGuard, empty_like, is_tensor, of_any_size, symbolically
from fxamp.capture.unseen import outside_of_the_call
from fxamp.fakes import Fakes
from fxamp.opnames import canonical_name

log = logging.getLogger("fxamp")

MOST_SIZES = 4096
"""So many sizes a trial remembers its answers for."""

TRIALS_BEFORE_GUARD = 16
"""So many sizes are tried before a condition on them is looked for, the example's own among them."""

MOST_TRIALS = 32
"""A condition may take the time of so many trials to find, or a second: of language models it takes that of 5 to 20."""


class Decision(NamedTuple):
    """What Python asked of a size.

    Attributes:
        line: of the user's code.
        node: what gives the answer; None where it is not one value (Python went through a tensor's rows, say).
        answer: for the call that was captured; of a tensor it is the number of its dimensions.
    """

    line: str
    node: fx.Node | None = None
    answer: Any = None


class Sizes:
    """What a graph's nodes give that hangs on sizes, for other sizes.

    Args:
        graph: as captured; what `nodes` do not hang on is left out, and the rest copied: passes change the graph.
        nodes: what is looked at.
        fakes: of the model's tensors.
        attribute: what a `get_attr` node reads.
    """

    def __init__(
        self, graph: fx.Graph, nodes: Sequence[fx.Node], fakes: Fakes, attribute: Callable[[fx.Node], Any]
    ) -> None:
        needed = set(nodes)
        for node in reversed(graph.nodes):
            if node in needed:
                needed.update(given for given in node.all_input_nodes if given not in _stand_ins(node))
        self._graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if node.op == "placeholder" or node in needed:
                instead = _stand_ins(node)
                copies[node] = self._graph.node_copy(node, functools.partial(_copy_of, copies, instead))
                copies[node].meta.clear()  # fakes would keep whole models alive
        self._places = {copies[node]: place for place, node in enumerate(nodes)}
        inputs = graph.find_nodes(op="placeholder")
        self.read = [place for place, node in enumerate(inputs) if node in needed]
        self.has_open = any(ir.GUESS in node.meta for node in copies)
        self.is_told_on_meta = not self.has_open and all(
            node.op in ("placeholder", "get_attr") or is_plain(node) for node in self._graph.nodes
        )
        self._fakes, self._attribute = fakes, attribute

    def on_fakes(self, inputs: list[Any]) -> tuple[FakeTensorMode, list[Any]]:
        """Fake tensors of such sizes, and their mode, in which sizes stay open where the data decides on some."""
        mode = FakeTensorMode(shape_env=ShapeEnv() if self.has_open else None, allow_non_fake_inputs=True)
        with mode:
            return mode, [empty_like(value, value.shape) if is_tensor(value) else value for value in inputs]

    def on_meta(self, inputs: list[Any]) -> tuple[None, list[Any]]:
        """Meta tensors of such sizes."""
        return None, [value.new_empty(value.shape, device="meta") if is_tensor(value) else value for value in inputs]

    def of(self, mode: FakeTensorMode | None, inputs: list[Any], until: float = math.inf) -> Iterator[tuple[int, Any]]:
        """(place among the nodes, what that gives), as soon as it is known.

        Args:
            mode: of the inputs' fake tensors; None: they are meta tensors.
            until: a time, of `time.monotonic()`.

        Raises:
            TimeoutError: it is later than that.
            Exception: what torch raises for such inputs.
        """
        fakes = OnMeta(self._fakes) if mode is None else OpenRun(self._fakes, mode)
        given = iter(inputs)
        values: dict[fx.Node, Any] = {}
        for node in self._graph.nodes:
            if time.monotonic() > until:
                raise TimeoutError("it takes too long")
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = fakes.of(self._attribute(node))
            else:
                values[node] = fakes.run(node, values.__getitem__)
            if node in self._places:
                yield self._places[node], values[node]


def _copy_of(copies: dict[fx.Node, fx.Node], instead: dict[fx.Node, fx.Node], given: fx.Node) -> fx.Node:
    return copies[instead.get(given, given)]


def _stand_ins(node: fx.Node) -> dict[fx.Node, fx.Node]:
    """The operand of `x.masked_scatter(mask, source)` that says nothing of the result's sizes, and what stands for it:
    behind it may lie a model of its own."""
    if canonical_name(node.target) != "masked_scatter" or len(node.args) != 3:
        return {}
    whole, mask, source = node.args
    is_apart = isinstance(whole, fx.Node) and isinstance(source, fx.Node) and source not in (whole, mask)
    return {source: whole} if is_apart else {}  # type: ignore[dict-item]


class AnswersDiffer(RuntimeError):
    """A question about sizes has another answer than it had."""


class SizeQuestions(Sizes):
    """What a graph's model asked of sizes, to be asked again for other sizes.

    Args:
        decisions: each with the node that gives the answer.
        graph, fakes, attribute: see `Sizes`.
    """

    def __init__(
        self, graph: fx.Graph, decisions: tuple[Decision, ...], fakes: Fakes, attribute: Callable[[fx.Node], Any]
    ) -> None:
        asked = {decision.node: decision.answer for decision in decisions if decision.node is not None}
        super().__init__(graph, list(asked), fakes, attribute)
        self._answers = list(asked.values())

    def ask(self, mode: FakeTensorMode | None, inputs: list[Any], until: float = math.inf) -> None:
        """Ask once more.

        Args:
            mode: of the inputs' fake tensors; None: they are meta tensors.
            until: see `of`.

        Raises:
            AnswersDiffer: an answer is another one.
            TimeoutError, Exception: see `of`.
        """
        for place, value in self.of(mode, inputs, until):
            if _answer(value) != self._answers[place]:
                raise AnswersDiffer(f"a size is {value}, and was {self._answers[place]}")


class SizeTrial:
    """Whether a graph holds for the sizes of a call's tensors, and for those of its numbers that a question hangs on.

    Sizes that were not met before are tried: it takes the time of the shape propagation of what decides. Behind some
    such trials a condition is looked for that answers at once.
    """

    def __init__(self, questions: SizeQuestions, example: list[Any]) -> None:
        self._questions = questions
        self._numbers = [place for place in questions.read if not is_tensor(example[place])]
        self._known: dict[Any, bool] = {}
        self._guard: SizeGuard | None = None
        self._tried = 0

    def __call__(self, inputs: list[Any]) -> bool:
        sizes = tuple(tuple(value.shape) for value in inputs if is_tensor(value))
        if not all(type(size) is int for shape in sizes for size in shape):  # a jagged tensor's
            return False
        if self._guard is not None and self._guard(inputs):
            return True
        key = sizes, *((type(inputs[place]), inputs[place]) for place in self._numbers)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MOST_SIZES:
                self._known.clear()
            found = self._known[key] = self._try(inputs)
        return found

    def _try(self, inputs: list[Any]) -> bool:
        began = time.monotonic()
        questions = self._questions
        with outside_of_the_call(), torch.no_grad():
            try:
                if not (questions.is_told_on_meta and self._holds_on_meta(inputs)):
                    questions.ask(*questions.on_fakes(inputs))
            except Exception as error:  # for such sizes forward may fail, and is to say so itself
                log.debug("the graph does not hold for these sizes: %s: %s", type(error).__name__, error)
                return False
            self._tried += 1
            if self._tried == TRIALS_BEFORE_GUARD:
                self._guard = size_guard(self._questions, list(map(of_any_size, inputs)), latest(began))
        return True

    def _holds_on_meta(self, inputs: list[Any]) -> bool:
        """Whether meta tensors tell that the graph holds; fakes have the last word where they do not.

        Raises:
            AnswersDiffer: it does not.
        """
        try:
            self._questions.ask(*self._questions.on_meta(inputs))
        except AnswersDiffer:
            raise
        except Exception as error:
            log.debug("sizes are not told on meta tensors: %s: %s", type(error).__name__, error)
            return False
        return True


def latest(began: float) -> float:
    """Until when a condition may be looked for behind a trial that began then: times of `time.monotonic()`."""
    now = time.monotonic()
    return now + max(1.0, MOST_TRIALS * (now - began))


def varying_sizes(inputs: list[Any]) -> frozenset[tuple[int, int]]:
    """(position, dimension) of the sizes that vary."""
    return frozenset((place, dim) for place, value in enumerate(inputs) for dim in getattr(value, VARYING, ()))


def is_made_up(example: list[Any] | None) -> bool:
    """Whether an example stands for all of varying sizes: it has no data that could be asked."""
    return any(hasattr(value, VARYING) for value in example or ())


def size_trial(questions: SizeQuestions, example: list[Any]) -> SizeTrial | None:
    """What tells for which other sizes a graph holds; None where not even the example's can be told."""
    trial = SizeTrial(questions, example)
    return trial if trial(example) else None


def size_guard(questions: SizeQuestions, example: list[Any], until: float = math.inf) -> SizeGuard | None:
    """The condition on varying sizes under which every decision is what it was for the example; None where it cannot be
    told, or not before `until`, a time of `time.monotonic()`."""
    found = symbolically(lambda mode, inputs: questions.ask(mode, inputs, until), example)
    return None if found is None else found[0]


def _answer(value: Any) -> Any:
    """The answer for the example, which torch notes as a condition where it hangs on sizes."""
    if is_tensor(value):
        return value.dim()
    if isinstance(value, torch.SymBool):
        return bool(value)
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, torch.SymFloat):
        return float(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map(_answer, value))
    return value
