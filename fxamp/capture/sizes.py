"""For which sizes of its inputs a graph holds whose model decides on sizes: asked of torch's symbolic shapes.

    if x.shape[1] > self.most:     # decided in one way for the call that was captured
        x = x[:, : self.most]

A graph with such a decision holds for the sizes of that call, and for all others with which every such question has the
answer that it had. The nodes that a question hangs on are run once more on fake tensors of symbolic sizes, and the
conditions under which the answers come are what torch.compile would guard.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fxamp.fakes import Fakes

log = logging.getLogger("fxamp")


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


@dataclasses.dataclass(frozen=True)
class SizeGuard:
    """Whether a graph holds for the sizes of a call's tensors, and for its numbers, which must be equal.

    Args:
        condition: of the tensors, by name: {"t0": ..., "t1": ...}.
        numbers: (position, value) of the inputs that are none.
    """

    condition: Callable[[dict[str, torch.Tensor]], bool]
    numbers: tuple[tuple[int, Any], ...]

    def __call__(self, inputs: list[Any]) -> bool:
        if any(inputs[position] != value for position, value in self.numbers):
            return False
        try:
            return self.condition({f"t{place}": value for place, value in enumerate(inputs) if _is_tensor(value)})
        except ArithmeticError:  # forward divides by what is 0 for these sizes, and is to say so itself
            return False


def size_guard(
    graph: fx.Graph,
    decisions: tuple[Decision, ...],
    example: list[Any],
    make_fakes: Callable[[FakeTensorMode], Fakes],
    attribute: Callable[[fx.Node], Any],
) -> SizeGuard | None:
    """The condition under which every decision is what it was for the example; None where it cannot be told.

    Args:
        graph: as it was captured.
        make_fakes: fakes of the model's tensors in a mode.
        attribute: what a `get_attr` node reads.
    """
    if any(decision.node is None for decision in decisions):
        return None
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.source import LocalSource  # takes a second to import, as what is behind it does
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, ShapeEnv

    environment = ShapeEnv()
    try:
        mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
        fakes = make_fakes(mode)
        inputs = [_symbolic(value, LocalSource(f"t{place}"), mode) for place, value in enumerate(example)]
        with torch.no_grad(), enable_python_dispatcher():  # some of torch 2.11's own forms take sizes for numbers
            _decide_again(graph, decisions, fakes, inputs, attribute)
        named = [(value, LocalSource(f"t{place}")) for place, value in enumerate(inputs) if _is_tensor(value)]
        conditions = environment.produce_guards(
            [value for value, _ in named], [source for _, source in named], ignore_static=False
        )
        # The fakes lie in memory without gaps, so what is said of strides says nothing.
        of_sizes = [f"({text})" for text in conditions if ".stride()" not in text and ".storage_offset()" not in text]
        condition = eval(f"lambda L: {' and '.join(of_sizes) or True}", dict(SYMPY_INTERP))
        numbers = tuple((place, value) for place, value in enumerate(example) if not _is_tensor(value))
        guard = SizeGuard(condition, numbers)
        return guard if guard(example) else None
    except Exception as error:  # whatever torch's symbolic shapes do not know: the sizes of the example are known
        log.debug("sizes are not generalised: %s: %s", type(error).__name__, error)
        return None


def _symbolic(value: Any, source: Any, mode: FakeTensorMode) -> Any:
    """A fake tensor of the same rank, dtype and device, whose sizes may be any; anything else as it is."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    if not _is_tensor(value):
        return value
    twin = torch.empty(value.shape, dtype=value.dtype, device="meta")
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * value.dim())
    made = mode.from_tensor(twin, source=source, symbolic_context=context)
    with mode:
        return torch.empty(made.shape, dtype=value.dtype, device=value.device)


def _decide_again(
    graph: fx.Graph,
    decisions: tuple[Decision, ...],
    fakes: Fakes,
    inputs: list[Any],
    attribute: Callable[[fx.Node], Any],
) -> None:
    asked: dict[fx.Node, Any] = {decision.node: decision.answer for decision in decisions if decision.node is not None}
    needed = set(asked)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    given = iter(inputs)
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node in needed:
            values[node] = fakes.of(attribute(node)) if node.op == "get_attr" else fakes.run(node, values.__getitem__)
        if node in asked and _answer(values[node]) != asked[node]:
            raise RuntimeError(f"{node.name} is {values[node]}, and was {asked[node]}")


def _answer(value: Any) -> Any:
    """The answer for the example, which torch notes as a condition where it hangs on sizes."""
    if _is_tensor(value):
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


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
