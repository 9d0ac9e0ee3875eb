"""What Python asks of traced values while forward runs, and what is answered: a graph holds while the answers do.

What follows from shapes is answered, and the source line is recorded; what follows from dtypes, devices and numbers of
dimensions is the same at every call of the graph; values that depend on data are never guessed: what hangs on inputs
alone is asked of each call's data.
"""

import contextlib
import operator
from collections.abc import Callable, Collection
from types import CodeType
from typing import Any

import torch
from torch import fx

from fxamp.capture.computed import computed, sources
from fxamp.capture.data import DataQuestions
from fxamp.capture.drawn import whatever_torch_draws
from fxamp.capture.fake_values import FakeValues
from fxamp.capture.further_inputs import CannotRunBefore
from fxamp.capture.guesses import known_or_guessed
from fxamp.capture.left_out import functions_to_leave_out
from fxamp.capture.lengths import counted_by, has_open_length, parts_of_guess
from fxamp.capture.live import LiveNumbers
from fxamp.capture.locations import unfollowable, user_frames, user_line
from fxamp.capture.messages import Messages
from fxamp.capture.proxies import asks_of_autograd
from fxamp.capture.raises import Check, check_asked_for
from fxamp.capture.ranks import LOOSE_RANK
from fxamp.capture.sizes import Decision
from fxamp.checks import require
from fxamp.errors import CaptureError
from fxamp.fakes import UNKNOWN


class Questions:
    """The questions of one trace.

    Args:
        numbers: attributes that are read at each call, unless Python decides on one.
        call: makes a node of a function.
        example: the inputs of one call, by which values are known by their types and sizes; None: they are not.
        values: of the nodes; they are known aside from what is traced.
        of_data: those about the data of inputs.
        run_before: gives what a function gives that runs before the graph.
        functions: the code of the functions of the model that do, or may not.
    """

    def __init__(
        self,
        numbers: LiveNumbers,
        call: Callable[..., fx.Proxy],
        example: list[Any] | None,
        values: FakeValues,
        of_data: DataQuestions,
        run_before: Callable[..., Any],
        functions: Collection[CodeType],
    ) -> None:
        self.decisions: list[Decision] = []
        self.messages = Messages()
        self._numbers = numbers
        self._call = call
        self._has_example = example is not None
        self.of_data = of_data
        self._run_before, self._functions = run_before, functions
        self._closed: dict[str, fx.Proxy | None] = {}
        self.has_hashed = False  # a number: something may have kept it, to find it by its hash
        self._values = values
        self._aside = values.aside
        self._counts: list[tuple[fx.Node, fx.Node | None]] = []  # check of how many items there are, last item

    def decide(self, proxy: fx.Proxy, question: str, of_torch: Callable[[], Check | None] | None = None) -> Any:
        """The Python value of a proxy whose value follows from shapes alone; the decision is recorded.

        What follows from dtypes, devices and numbers of dimensions is the same at every call of the graph. What only
        checks data is asked at each call.

        Args:
            of_torch: gives the check where one of torch's own asks.
        """
        node = proxy.node
        value = known_or_guessed(node) if node.meta.get("static") else node.meta.get("val", UNKNOWN)
        if asks_of_autograd(node):
            raise self.unfollowable(f"Python's {question}() of what autograd or memory layout says", by_example=False)
        if isinstance(value, (bool, int, float, str, torch.dtype, torch.device, torch.Size)) or value is None:
            if not node.meta.get("static"):
                if self._numbers.decide_on(node):
                    self.decisions.append(Decision(user_line(), node, value))
            return value
        check = check_asked_for() if question == "bool" else of_torch() if of_torch is not None else None
        if check is not None:
            self._call(require, (proxy, *check, self.messages.shown_in(check.said)), {})
            return check.way_on
        if (held := self.computed(node)) is not UNKNOWN:
            return held
        if question == "bool" and (certain := whatever_torch_draws(node)) is not None:
            return certain
        if question == "bool" and (held := self._answered_by_data(node)) is not UNKNOWN:
            return held
        raise self.unfollowable(f"Python's {question}() of a traced value", data=isinstance(value, torch.Tensor))

    def computed(self, node: fx.Node, method: str = "item", may_decide: bool = True) -> Any:
        """What Python reads of what constants and sizes alone make; UNKNOWN where anything else decides on it.

        Args:
            method: how a tensor is read.
            may_decide: whether the graph may be for these sizes alone; else they make it UNKNOWN, too.
        """
        numbers = sources(node)
        if numbers is None or any(map(asks_of_autograd, numbers)):
            return UNKNOWN
        sizes = [each for each in numbers if not each.meta.get("static")]
        if sizes and not may_decide:
            return UNKNOWN
        line = user_line()
        self.decisions += (Decision(line, each, each.meta["val"]) for each in sizes if self._numbers.decide_on(each))
        with self._aside():
            made = computed(node, {each: each.meta["val"] for each in numbers})
            return getattr(made, method)() if isinstance(made, torch.Tensor) else made

    def _answered_by_data(self, node: fx.Node) -> Any:
        of_numbers = self._values.of_data(node)
        if of_numbers is not node and functions_to_leave_out(user_frames(), self._functions):
            return UNKNOWN  # with that before the graph, there need not be one for each answer
        node = of_numbers
        found = sources(node, from_inputs=True)
        if found is None or any(map(asks_of_autograd, found)):
            return UNKNOWN
        with self._aside():
            held = self.of_data.answer(node, found)
        if held is not UNKNOWN:
            for each in found:
                if each.op != "placeholder":
                    self._numbers.decide_on(each)
        return held

    def text(self, proxy: fx.Proxy, how: str) -> str:
        """What an f-string makes of a value."""
        value = known_or_guessed(proxy.node)
        may_vary = isinstance(value, torch.Tensor) or (type(value) is int and not proxy.node.meta.get("static"))
        if may_vary and (mark := self.messages.mark(proxy, how)) is not None:
            return mark
        return format(self.decide(proxy, "format"), how)

    def check_messages(self) -> None:
        """Of the texts that no check has said, those that show numbers decide on them.

        Raises:
            CaptureError: one shows a tensor.
        """
        for proxy in self.messages.unsaid():
            self.decide(proxy, "format")

    def state(self) -> tuple[int, int]:
        """How much has been decided by now."""
        return len(self.decisions), len(self.of_data.answers())

    def note(self) -> None:
        """Record a decision whose answer is not one value of the graph."""
        self.decisions.append(Decision(user_line()))

    def decide_on_rank(self, node: fx.Node) -> None:
        """Record that Python knows the number of dimensions, on which sizes decide."""
        self.decisions.append(Decision(user_line(), node, node.meta["val"].dim()))

    def items(self, obj: fx.Proxy) -> list[Any]:
        """What Python goes through: the rows of a tensor, or the items of a tuple."""
        value = obj.node.meta.get("val", UNKNOWN)
        if isinstance(value, torch.Tensor):
            return [obj[i] for i in range(self.size(obj, 0))]  # type: ignore[index]
        if isinstance(value, (tuple, list, torch.Size)):
            self.count_items(obj)
            return [obj[i] for i in range(len(value))]  # type: ignore[index]
        if (many := self.many_of(obj)) is not None:
            return [obj[i] for i in range(many)]  # type: ignore[index]
        if isinstance(held := self.computed(obj.node), list):
            return held
        raise self.unfollowable("iteration over a traced value")

    def many_of(self, obj: fx.Proxy) -> int | None:
        """How many items a value has that the data decides; None where that is not known. A size may decide on it."""
        if (many := parts_of_guess(obj.node)) is not None:
            return many
        counted = counted_by(obj.node)
        if not isinstance(counted, tuple):
            return counted
        tensor, dim = counted
        return self.size(obj.tracer.proxy(tensor), dim) if "val" in tensor.meta else None

    def close_operands(self, proxy: fx.Proxy) -> None:
        """Let a new node read as further inputs what hangs on inputs alone and has sizes that the data decides, where
        it does not hang on inputs alone itself, or counts items: by their sizes graphs are told apart then."""
        node = proxy.node
        opened = [given for given in node.all_input_nodes if "val" not in given.meta]
        if not opened or (node.target not in _COUNTING and sources(node, from_inputs=True) is not None):
            return
        for given in opened:
            if (
                sources(given, from_inputs=True) is not None
                and (closed := self._closed_form(proxy.tracer.proxy(given))) is not None
            ):
                node.replace_input_with(given, closed.node)

    def _closed_form(self, opened: fx.Proxy) -> fx.Proxy | None:
        """A tensor as a further input, None for what is none, or may not be computed before the graph."""
        form = self.of_data.forms.of(opened.node)
        if form not in self._closed:
            self._closed[form] = None
            with contextlib.suppress(CannotRunBefore):
                self._closed[form] = self._run_before(torch.clone, (opened,), {})
        return self._closed[form]

    def size(self, tensor: fx.Proxy, dim: int) -> int:
        """A size of a tensor, on which Python decides."""
        return int(self.decide(self._call(torch.Tensor.size, (tensor, dim), {}), "len"))

    def count_items(self, proxy: fx.Proxy) -> None:
        """Record that Python has counted the items of a tuple."""
        node = proxy.node
        if has_open_length(node):
            self.decide(self._call(len, (proxy,), {}), "len")
        if node.meta.get(LOOSE_RANK) and _has_an_item_for_each_dimension(node):
            self.decide_on_rank(node.all_input_nodes[0])

    def take_for_none(self, proxy: fx.Proxy) -> None:
        """None itself is to stand for this: Python asks for it by `is`, which no proxy can answer.

        Raises:
            CaptureError: autograd gives it, for which another parameter may require a gradient at the next call.
        """
        if any(node.target is torch.autograd.grad for node in proxy.node.all_input_nodes):
            raise self.unfollowable("a None that torch.autograd.grad gives", by_example=False)
        said = f"{user_line()}: this was None when the model was captured, and is none now. Convert the model anew."
        self._call(torch._assert, (self._call(operator.is_, (proxy, None), {}), said), {})

    def take_for_all(self, container: fx.Proxy, items: list[Any]) -> None:
        """These items are to stand for all that a container holds: Python counts them, and goes through them."""
        many = self._call(len, (container,), {})
        said = (
            f"{user_line()}: this held {len(items)} when the model was captured, and holds more or less now. Pass "
            "capture='dynamo', which counts at each call."
        )
        check = self._call(torch._assert, (self._call(operator.eq, (many, len(items)), {}), said), {})
        self._counts.append((check.node, next((item.node for item in reversed(items) if item is not None), None)))

    def forget_needless_counts(self) -> None:
        """Nobody counts items where the last one is not read: `part(x)[0]` is right however many there are."""
        for check, last in self._counts:
            if last is not None and not last.users:
                equal = check.all_input_nodes[0]
                for node in (check, equal, equal.all_input_nodes[0]):
                    node.graph.erase_node(node)

    def unfollowable(self, what: str, data: bool = False, by_example: bool = True) -> CaptureError:
        """The error for a question that has no answer.

        Args:
            by_example: whether there may be one where the inputs of a call are known.
        """
        return unfollowable(what, self._has_example or not by_example, data)


_COUNTING = frozenset({"tolist", "size", "numel", len, torch.Tensor.size})


def _has_an_item_for_each_dimension(node: fx.Node) -> bool:
    """Whether a node gives sizes, strides or the like of a tensor."""
    value, of = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    if not isinstance(value, tuple) or not isinstance(of, torch.Tensor):
        return False
    return len(value) == of.dim() and all(isinstance(item, int | torch.SymInt) for item in value)
