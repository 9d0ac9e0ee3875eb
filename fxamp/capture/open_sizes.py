"""Values whose sizes the data decides, as far as they are known: on fake tensors with sizes that stay open.

    chosen = x[mask]              # (rows, 8): 8 is known
    y = x.new_zeros(x.shape)
    y[mask] = self.fc(chosen)     # as y was
    loss = chosen.square().mean() # a scalar

What does not hang on the data is as certain as where no data decides anything.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.capture.computed import Forms, item_at, sources
from fxamp.capture.ranks import LOOSE_RANK
from fxamp.capture.splits import sizes_of_parts
from fxamp.fakes import UNKNOWN, Fakes, memory_of
from fxamp.inplace import run_and_note_writes
from fxamp.opnames import canonical_name

_OPEN = torch.SymInt, torch.SymFloat, torch.SymBool
# Fakes of sizes that stay open are wrong: rows that are not counted, and batch sizes of floats.
_WRONG = frozenset({torch._pack_padded_sequence})


class OpenRun:
    """Runs nodes where sizes may be open.

    1. `counts.tolist()` and `count.item()` give open numbers: which node gives which is noted. Those that read the same
       of inputs, as each layer may, give the same.
    2. The sizes that `x.split(sizes)` asks for are x's together: so the parts that are put together again are as long.
    3. Attention asks of each size whether it is 0, which changes nothing about what it gives.

    Args:
        fakes: of the model's tensors.
        mode: their mode, which knows open sizes.
    """

    def __init__(self, fakes: Fakes, mode: FakeTensorMode) -> None:
        self._fakes = fakes.in_mode(mode)
        self.of = self._fakes.of
        self._origins: dict[Any, tuple[fx.Node, tuple[int, ...]]] = {}  # of the symbol that stands for a number
        self._forms = Forms()
        self._numbers: dict[str, Any] = {}  # by the form of what reads them of inputs
        self._rest: dict[Any, Any] = {}  # of the symbol for the last of a split's sizes: what the others leave

    def run(self, node: fx.Node, values: Callable[[fx.Node], Any]) -> Any:
        """What a node gives."""
        asked = fx.node.map_arg(sizes_of_parts(node), values)  # one number where that is traced itself
        if isinstance(asked, (list, tuple)) and any(map(_is_open, asked)):
            return self._split(values(node.all_input_nodes[0]), asked, ir.argument_of(node, 2, "dim", 0))
        if canonical_name(node.target) == "scaled_dot_product_attention":
            query, value = fx.node.map_arg([ir.argument_of(node, 0, "query"), ir.argument_of(node, 2, "value")], values)
            if any(map(_is_open, (query, value))):
                requires_grad = torch.is_grad_enabled() and (query.requires_grad or value.requires_grad)
                made = query.new_empty((*query.shape[:-1], value.shape[-1]))
                return self._known_again(made.requires_grad_(requires_grad))
        if node.op == "call_method" and node.target in ("tolist", "item"):
            return self._numbers_read(node, values)
        given = self._fakes.run(node, values)
        return self._known_again(given) if self._rest else given

    def origin(self, value: Any) -> tuple[fx.Node, tuple[int, ...]] | None:
        """The list, and the places in it, that an open number comes from; None for any other value."""
        return self._origins.get(value.node.expr) if isinstance(value, torch.SymInt) else None

    def _numbers_read(self, node: fx.Node, values: Callable[[fx.Node], Any]) -> Any:
        if sources(node, from_inputs=True) is None:
            given = self._fakes.run(node, values)
        else:
            form = self._forms.of(node)
            if form not in self._numbers:
                self._numbers[form] = self._fakes.run(node, values)
            given = pytree.tree_map(lambda number: number, self._numbers[form])  # a list of its own
        self._note_origins(node, given, ())
        return given

    def _note_origins(self, node: fx.Node, given: Any, places: tuple[int, ...]) -> None:
        if isinstance(given, list):
            for place, part in enumerate(given):
                self._note_origins(node, part, (*places, place))
        elif isinstance(given, torch.SymInt) and given.node.expr.is_symbol:
            self._origins.setdefault(given.node.expr, (node, places))

    def _split(self, whole: torch.Tensor, sizes: Sequence[Any], dim: int) -> tuple[torch.Tensor, ...]:
        last = sizes[-1]
        if isinstance(last, torch.SymInt) and last.node.expr.is_symbol:
            self._rest[last.node.expr] = _expression(whole.shape[dim]) - sum(map(_expression, sizes[:-1]))
        shapes = ((*whole.shape[:dim], size, *whole.shape[dim:][1:]) for size in sizes)
        requires_grad = torch.is_grad_enabled() and whole.requires_grad
        return tuple(whole.new_empty(shape).requires_grad_(requires_grad) for shape in shapes)

    def _known_again(self, value: Any) -> Any:
        """A tensor whose sizes, open as they look, are known: in memory of its own."""
        if not isinstance(value, torch.Tensor) or not _is_open(value):
            return value
        shape = [_number(_expression(extent).xreplace(self._rest)) for extent in value.shape]
        known = [extent for extent in shape if extent is not None]
        if len(known) < len(shape) or _is_view(value):
            return value
        return value.new_empty(known).requires_grad_(value.requires_grad)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _number(expression: Any) -> int | None:
    known = sympy.expand(expression)
    return int(known) if known.is_Integer else None


class OpenSizes:
    """The open values of one trace.

    Args:
        fakes: of the model's tensors, with sizes that are numbers.
    """

    def __init__(self, fakes: Fakes) -> None:
        self._environment = ShapeEnv()
        self._closed = fakes
        self._open = OpenRun(fakes, FakeTensorMode(shape_env=self._environment, allow_non_fake_inputs=True))
        self._values: dict[fx.Node, Any] = {}

    def closed(self, node: fx.Node) -> Any:
        """What a node gives, with sizes that are numbers; UNKNOWN where torch cannot tell, one is open, and for views.

        (Who looks for memory in common must not take a view for memory of its own.) What it writes is marked on it.
        """
        given = {operand: self._given(operand) for operand in node.all_input_nodes}
        value = self._values[node] = self._run(node, given)
        if value is UNKNOWN or any(map(_is_open, pytree.tree_leaves(value))):
            return UNKNOWN
        known = {id(given[operand]): operand.meta["val"] for operand in given if "val" in operand.meta}
        memory = set(map(memory_of, _tensors(list(given.values()))))
        if any(memory_of(part) in memory and id(part) not in known for part in _tensors(value)):
            return UNKNOWN
        return _in_place_of_tensors(
            lambda part: known[id(part)] if id(part) in known else self._closed.of(part),
            value,
        )

    def of_data(self, node: fx.Node) -> fx.Node:
        """The same number or answer, computed of the numbers that the open sizes are which it hangs on."""
        if not isinstance(self._values.get(node), (*_OPEN, tuple)):
            return node
        if (origin := self._open.origin(self._values[node])) is not None:
            return node.graph.call_function(item_at, origin)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.of_data)
        if (args, kwargs) == (node.args, node.kwargs):
            return node
        return node.graph.create_node(node.op, node.target, args, kwargs)

    def _run(self, node: fx.Node, given: dict[fx.Node, Any]) -> Any:
        is_known = node.target not in _WRONG and not any(each is UNKNOWN for each in given.values())
        value = UNKNOWN
        if is_known and not node.meta.get(LOOSE_RANK):
            with contextlib.suppress(Exception):  # torch has no answer for sizes that it does not know
                value = run_and_note_writes(node, given, self._open.run)
        return UNKNOWN if self._has_taken_a_number() else value

    def _given(self, node: fx.Node) -> Any:
        if "val" in node.meta:
            return _in_place_of_tensors(self._open.of, node.meta["val"])
        return self._values.get(node, UNKNOWN)

    def _has_taken_a_number(self) -> bool:
        """Whether torch took an open size for the number that `x[mask] + y` asks for: it may be 1 as well."""
        return any(taken.is_number for taken in self._environment.replacements.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    return [part for part in pytree.tree_leaves(value) if isinstance(part, torch.Tensor)]


def _is_open(part: Any) -> bool:
    if isinstance(part, torch.Tensor):
        return any(isinstance(extent, _OPEN) for extent in (*part.shape, *part.stride()))
    return isinstance(part, _OPEN)


def _is_view(value: torch.Tensor) -> bool:
    return value._is_view()


def _in_place_of_tensors(put: Callable[[Any], Any], value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, put, value, is_leaf=lambda part: isinstance(part, torch.Size))
