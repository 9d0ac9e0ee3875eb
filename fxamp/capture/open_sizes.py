"""Values whose sizes the data decides, as far as they are known: on fake tensors with sizes that stay open.

    chosen = x[mask]              # (rows, 8): 8 is known
    y = x.new_zeros(x.shape)
    y[mask] = self.fc(chosen)     # as y was
    loss = chosen.square().mean() # a scalar

What does not hang on the data is as certain as where no data decides anything.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.capture.ranks import LOOSE_RANK
from fxamp.capture.splits import parts_of, sizes_of_parts
from fxamp.fakes import UNKNOWN, Fakes, memory_of
from fxamp.inplace import run_and_note_writes
from fxamp.opnames import canonical_name

_OPEN = torch.SymInt, torch.SymFloat, torch.SymBool
# Fakes of sizes that stay open are wrong: rows that are not counted, and batch sizes of floats.
_WRONG = frozenset({torch._pack_padded_sequence})


def run_open(node: fx.Node, values: Callable[[fx.Node], Any], fakes: Fakes) -> Any:
    """`fakes.run`, where sizes may be open that its operands have.

    1. Of the sizes that `x.split(sizes)` asks for, the last is what the others leave: all parts are x again.
    2. Attention asks of each size whether it is 0, which changes nothing about what it gives.
    """
    sizes = sizes_of_parts(node)
    if sizes is not None and len(asked := fx.node.map_arg(sizes, values)) and any(map(_is_open, asked)):
        return parts_of(values(node.all_input_nodes[0]), asked, ir.argument_of(node, 2, "dim", 0))
    if canonical_name(node.target) == "scaled_dot_product_attention":
        query, value = fx.node.map_arg([ir.argument_of(node, 0, "query"), ir.argument_of(node, 2, "value")], values)
        if any(map(_is_open, (query, value))):
            return query.sum(-1, keepdim=True) * value.new_empty(value.shape[-1:])
    return fakes.run(node, values)


class OpenSizes:
    """The open values of one trace.

    Args:
        fakes: of the model's tensors, with sizes that are numbers.
    """

    def __init__(self, fakes: Fakes) -> None:
        self._environment = ShapeEnv()
        self._closed = fakes
        self._fakes = fakes.in_mode(FakeTensorMode(shape_env=self._environment, allow_non_fake_inputs=True))
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

    def _run(self, node: fx.Node, given: dict[fx.Node, Any]) -> Any:
        is_known = node.target not in _WRONG and not any(each is UNKNOWN for each in given.values())
        value = UNKNOWN
        if is_known and not node.meta.get(LOOSE_RANK):
            with contextlib.suppress(Exception):  # torch has no answer for sizes that it does not know
                value = run_and_note_writes(node, given, lambda node, values: run_open(node, values, self._fakes))
        return UNKNOWN if self._has_taken_a_number() else value

    def _given(self, node: fx.Node) -> Any:
        if "val" in node.meta:
            return _in_place_of_tensors(self._fakes.of, node.meta["val"])
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


def _in_place_of_tensors(put: Callable[[Any], Any], value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, put, value, is_leaf=lambda part: isinstance(part, torch.Size))
