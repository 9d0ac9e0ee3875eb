"""Values whose sizes depend on data: guessed from full lengths, right in rank and dtype, and asked for nothing else.

    data, batch_sizes = _pack_padded_sequence(x, lengths)     # how many rows follows from the lengths
    chosen = x[x > 0]                                         # as many as are true, all of them at most

A recurrent module behind a packed sequence must know whether its input is batched, `isinstance(chosen, Tensor)` has an
answer, and which tensors an op gives (`chosen.max(0)`) is known from running it; costs and paddings behind it want
sizes. A decision on sizes never sees a guess, and none is called static.
"""

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.capture.computed import computed, is_computed, is_number
from fxamp.capture.splits import sizes_of_parts
from fxamp.errors import CaptureError, uncaught_captures
from fxamp.fakes import UNKNOWN, Fakes
from fxamp.opnames import canonical_name
from fxamp.paths import attribute_at
from fxamp.recurrent_fakes import SEQUENCES, like_recurrent

_MOST_HELD = 64
"""Numbers in a tensor of the model's that one is read of."""


def known_or_guessed(node: fx.Node) -> Any:
    """A node's fake value, or its guess."""
    return node.meta.get("val", node.meta.get(ir.GUESS, UNKNOWN))


def guess(node: fx.Node, fakes: Fakes) -> Any:
    """A value with the right rank and dtype for a node that could not be run; UNKNOWN where there is none.

    Raises:
        CaptureError: a module that stays whole writes what a graph cannot see, whatever the sizes.
    """
    values = {given: known_or_guessed(given) for given in node.all_input_nodes}
    try:
        if node.target in _PACKED and _is_packed(node, values):
            return _PACKED[node.target](*fx.node.map_arg(node.args, values.__getitem__))
        if node.target is operator.getitem and _has_numbers(sizes := values[node.all_input_nodes[0]]):
            return sizes[node.args[1]]
        values = {
            given: int(value) if _has_numbers(value) and not value.dim() else value for given, value in values.items()
        }
        if any(value is UNKNOWN for value in values.values()):
            return UNKNOWN
        if node.op == "call_method" and node.target in ("item", "tolist"):
            return _numbers_in(values[node.all_input_nodes[0]], node.target)
        if (sizes := sizes_of_parts(node)) is not None and (many := len(fx.node.map_arg(sizes, values.__getitem__))):
            whole, dim = values[node.all_input_nodes[0]], ir.argument_of(node, 2, "dim", 0)
            most = whole.shape[dim] // many
            return whole.split([most] * (many - 1) + [whole.shape[dim] - most * (many - 1)], dim)
        try:
            with uncaught_captures():  # so that it is caught here
                return fakes.run(node, values.__getitem__)
        except DynamicOutputShapeException:
            return _at_full_length(node, fakes, values)
        except DataDependentOutputException:  # of a size that is a tensor, as in F.pad(x, (before, after))
            return _by_sizes(node, {given: _as_size(given, value, fakes) for given, value in values.items()}, fakes)
    except CaptureError as error:
        if error.__cause__ is None:
            raise
        return UNKNOWN  # a module failed, which the guess may be the reason of
    except Exception:  # a guess decides nothing that could fail
        return UNKNOWN


def _at_full_length(node: fx.Node, fakes: Fakes, values: dict[fx.Node, Any]) -> Any:
    """What an op gives whose data decides how long that is, at the most; UNKNOWN where it gives numbers."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    open_ended = fakes.in_mode(mode)
    given = {each: pytree.tree_map_only(torch.Tensor, open_ended.of, value) for each, value in values.items()}
    longest = max(
        int(extent) for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor) for extent in value.shape
    )

    def full(value: torch.Tensor) -> Any:
        with mode:
            closed = torch.empty([_most(e, longest) for e in value.shape], dtype=value.dtype, device=value.device)
        return fakes.of(closed.requires_grad_(value.requires_grad))

    return pytree.tree_map(full, open_ended.run(node, given.__getitem__))


def _most(extent: int | torch.SymInt, longest: int) -> int:
    """A size, or the most it can be, where that is known."""
    if isinstance(extent, int):
        return extent
    most = extent.node.shape_env.bound_sympy(extent.node.expr).upper
    return int(most) if most.is_Integer and most < sys.maxsize - 1 else longest


def _as_size(node: fx.Node, value: Any, fakes: Fakes) -> Any:
    """For a tensor of one integer what it holds, or one where that is not known; anything else as it is."""
    is_size = isinstance(value, FakeTensor) and value.dim() == 0 and value.dtype in (torch.int64, torch.int32)
    return _held(node, fakes) if is_size else value


def _held(node: fx.Node, fakes: Fakes) -> int:
    """The integer that forward makes of constants, sizes and the model's own small tensors: x.permute(*self.order)."""
    known: dict[fx.Node, Any] = {}
    waiting = [node]
    while waiting:
        given = waiting.pop()
        if is_number(given):
            known[given] = given.meta["val"]
        elif given.op == "get_attr":
            known[given] = held = attribute_at(fakes.root, str(given.target))
            if not isinstance(held, torch.Tensor) or held.is_floating_point() or held.numel() > _MOST_HELD:
                return 1
        elif is_computed(given):
            waiting += given.all_input_nodes
        else:
            return 1
    with torch.no_grad():
        return int(computed(node, known))


def _by_sizes(node: fx.Node, values: dict[fx.Node, Any], fakes: Fakes) -> Any:
    """What an op gives of sizes that may be wrong; where they do not fit what is known, the rank and dtype of it."""
    try:
        return fakes.run(node, values.__getitem__)
    except Exception:
        op, whole = canonical_name(node.target), values[node.all_input_nodes[0]]
        asked = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], tuple | list) else node.args[1:]
        if op == "permute":
            return whole.permute(*range(whole.dim()))
        if op not in ("expand", "reshape", "view"):
            raise
        return whole.new_empty((1,) * len(asked)).requires_grad_(whole.requires_grad)


def _numbers_in(value: torch.Tensor, method: str) -> Any:
    """Numbers of the class that `.item()` gives; for `.tolist()` as many as there are."""
    return getattr(torch.ones(value.shape if method == "tolist" else (), dtype=value.dtype, device="cpu"), method)()


def _has_numbers(value: Any) -> bool:
    """Whether it is the guess of a tensor of sizes, which is no fake: a size can be read from it."""
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def _is_packed(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Whether the second argument holds the lengths or batch sizes (of a recurrent kernel: no states)."""
    second = values.get(node.args[1], UNKNOWN) if isinstance(node.args[1], fx.Node) else UNKNOWN
    return isinstance(second, torch.Tensor) and not second.is_floating_point()


def _pack(padded: Any, lengths: Any, batch_first: bool) -> Any:
    steps = padded.shape[1 if batch_first else 0]
    batch = padded.shape[0 if batch_first else 1]
    batches = torch.full((steps,), int(batch), device="cpu")  # real numbers: first states take a size from them
    return padded.flatten(0, 1), batches


def _pad(data: Any, batch_sizes: Any, batch_first: bool, *_: Any) -> Any:
    steps = max(int(batch_sizes.shape[0]), 1)
    batch = max(int(data.shape[0]) // steps, 1)
    leading = (batch, steps) if batch_first else (steps, batch)
    return data.new_empty((*leading, *data.shape[1:])), torch.empty(batch, dtype=torch.int64, device="cpu")


_PACKED: dict[Any, Callable[..., Any]] = {
    torch._pack_padded_sequence: _pack,
    torch._pad_packed_sequence: _pad,
    **dict.fromkeys(SEQUENCES, like_recurrent),
}
