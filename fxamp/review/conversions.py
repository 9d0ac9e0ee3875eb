"""What the conversions of a rewritten graph cost: kernels that they start, and bytes that these read and write."""

import math

from torch import fx

from fxamp import ir
from fxamp.runtime.padded_weights import Growth, adds_rows
from fxamp.value_types import TensorType


def conversion(node: fx.Node) -> tuple[int, int | None]:
    """Kernels that a node starts only to convert, and bytes that its conversion reads and writes.

    A bucket of weights is one kernel, and each of its weights whose copy grows by more than rows is one more; the
    bytes stand with the weights. A node that converts nothing gives (0, 0); bytes are None where sizes are not known.
    """
    found = ir.mark(node)
    if found.role not in ("cast", "weight cast"):
        return 0, 0
    if found.op == "packed_cast":
        return int(any(_is_copied_with_others(node, position) for position in range(len(node.all_input_nodes)))), 0
    if found.op != "to":
        return 0, 0
    source = node.all_input_nodes[0]
    if ir.mark(source).op != "packed_cast":
        return 1, _moved(source, node)
    position: int = node.args[1]  # type: ignore[assignment]
    weight: fx.Node = source.args[1 + position]  # type: ignore[assignment]
    return int(not _is_copied_with_others(source, position)), _moved(weight, node)


def _is_copied_with_others(packed: fx.Node, position: int) -> bool:
    """Whether the one multi-tensor copy of a bucket makes the low copy of this weight."""
    pads: tuple[Growth | None, ...] | None = packed.kwargs.get("pads")  # type: ignore[assignment]
    growth = pads[position] if pads else None
    return growth is None or adds_rows(growth[0])


def _moved(source: fx.Node, cast: fx.Node) -> int | None:
    """Bytes of the value, and of as many elements in the dtype of the cast; of the smaller of the two, where the copy
    of a weight has grown, or a cast reads a part of a padded value."""
    before, after = ir.mark(source).type, ir.mark(cast).type
    if not isinstance(before, TensorType) or not isinstance(after, TensorType):
        return None
    if before.dtype is None or after.dtype is None or before.shape is None or after.shape is None:
        return None
    numbers = min(math.prod(before.shape), math.prod(after.shape))
    return numbers * (before.dtype.itemsize + after.dtype.itemsize)
