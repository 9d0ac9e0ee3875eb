"""The values of a trace's nodes for its example, as fake tensors."""

import builtins
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from fxamp import ir
from fxamp.capture.guesses import guess, known_or_guessed
from fxamp.capture.inputs import misfit
from fxamp.capture.locations import user_line
from fxamp.capture.open_sizes import OpenSizes
from fxamp.capture.promotion import low_operands, widen
from fxamp.draws import draw
from fxamp.errors import CaptureError, FxampError
from fxamp.fake_limits import is_a_limit, is_foreign
from fxamp.fakes import UNKNOWN, Fakes
from fxamp.inplace import run_and_note_writes
from fxamp.leaf_fakes import holds_container

_isinstance = isinstance  # before any trace asks in its place


class FakeValues:
    """Runs the nodes of one trace on fake values, aside from what is traced.

    Args:
        example: the inputs of one call; None: known is what follows from the dtypes and devices of weights alone.
        fakes: makes and runs them.
    """

    def __init__(self, example: list[Any] | None, fakes: Fakes) -> None:
        self._example = example
        self._fakes = fakes
        self._open: OpenSizes | None = None
        self._is_running = False
        self._thread = threading.get_ident()

    @property
    def is_running(self) -> bool:
        """Whether what happens now is no part of forward: torch runs for the tracer itself, or in another thread."""
        return self._is_running or threading.get_ident() != self._thread

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Run torch without recording anything; torch's own many questions go to Python directly."""
        was, self._is_running = self._is_running, True
        asked, builtins.isinstance = builtins.isinstance, _isinstance
        try:
            yield
        finally:
            self._is_running, builtins.isinstance = was, asked

    def fake(self, value: Any) -> Any:
        with self.aside():
            return self._fakes.of(value)

    def is_fake(self, tensor: torch.Tensor) -> bool:
        return self._fakes.made(tensor)

    def of(self, node: fx.Node) -> Any:
        """What the node gives for the example; UNKNOWN where that cannot be told.

        Raises:
            OptionError: the example's values do not fit the operation.
        """
        if (self._example is None and not node.meta["static"]) or node.target is draw:
            return UNKNOWN
        if any("val" not in given.meta for given in node.all_input_nodes):
            return UNKNOWN if self._example is None else self._of_open(node)
        try:
            return self.run(node)
        except FxampError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError) as error:
            if operands := low_operands(node):  # an op that does not promote: torch.autocast takes the widest dtype
                widen(node, operands, self.run)
                return self.of(node)
            if isinstance(error, DynamicOutputShapeException | DataDependentOutputException):
                return self._of_open(node)
            if self._example is None or is_a_limit(error) or is_foreign(node.target):
                return UNKNOWN
            raise misfit(user_line(), ir.target_name(node) or str(node.target), error, self._example) from None

    def _of_open(self, node: fx.Node) -> Any:
        """What a node gives whose operands have sizes that the data decides, or that is the first to give such."""
        if _writes_unseen(node):
            return UNKNOWN
        with self.aside():
            if self._open is None:
                self._open = OpenSizes(self._fakes)
            return self._open.closed(node)

    @property
    def has_open(self) -> bool:
        """Whether there are any whose sizes the data decides."""
        return self._open is not None

    def of_data(self, node: fx.Node) -> fx.Node:
        """A node that gives the same, of the numbers that sizes are which the data decides; the node itself if none."""
        return node if self._open is None else self._open.of_data(node)

    def run(self, node: fx.Node) -> Any:
        """What the node gives for its operands' values, or guesses; which of them it writes is marked."""
        values = {given: known_or_guessed(given) for given in node.all_input_nodes}
        with self.aside():
            return run_and_note_writes(node, values, self._fakes.run)

    def guess(self, node: fx.Node) -> Any:
        """A value of the right rank and dtype for a node whose value is not known; UNKNOWN where there is none.

        Raises:
            CaptureError: whether it writes a list or dictionary cannot be seen.
        """
        if _writes_unseen(node):
            raise CaptureError(
                f"{user_line()}: {node.target!r} stays whole (hooks on it, or boundaries=) and is given a list or "
                "dictionary, and what it adds to or changes there cannot be seen where sizes depend on data"
            )
        with self.aside():
            return guess(node, self._fakes)


def _writes_unseen(node: fx.Node) -> bool:
    """Whether a module may write a list or dictionary that it is given."""
    return node.op == "call_module" and holds_container((*node.args, *node.kwargs.values()))
