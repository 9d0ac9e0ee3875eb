"""What counts as a node, a cast and a weight cast: the one definition of it."""

from collections.abc import Iterable, Sequence

from fxamp.capability import conversions_inside
from fxamp.dtypes import NAMES
from fxamp.review.rows import Row


def is_node(row: Row) -> bool:
    """One operation, input, parameter read or output of the model; what a pass put in is no node."""
    return not row.role


def is_cast(row: Row) -> bool:
    """One conversion of an activation between the two precisions in the forward graph."""
    return row.role == "cast" and row.op == "to"


def is_weight_cast(row: Row) -> bool:
    """One conversion of a parameter or buffer in the forward graph."""
    return row.role == "weight cast" and row.op == "to"


def user_casts(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Conversions between the two precisions that the user wrote, x.float() of a value that is low by now: what is
    read, and the conversion."""
    known = {(row.graph, row.name): row for row in rows}
    written = [row for row in rows if row.op in _CONVERSIONS and not row.role and row.dtype in _FLOATS]
    reads = [(known.get((row.graph, row.inputs[0])), row) for row in written if row.inputs]
    return [(read, row) for read, row in reads if read and read.dtype in _FLOATS and read.dtype != row.dtype]


_CONVERSIONS = ("to", "float", "half", "bfloat16", "type", "type_as", "_to_copy")
_FLOATS = ("float32", "float16", "bfloat16")


def casts_inside(rows: Sequence[Row], device: str) -> int:
    """Conversions that an op makes by itself: of a low operand where it is asked for a float32 result (`dtype=`), and
    around an RMS norm of low values.

    They are no nodes of the graph, and no kernels on CUDA; elsewhere torch makes softmax and log_softmax with
    `dtype=` of a conversion and a kernel (in bfloat16 on CUDA too), and an RMS norm of float32 kernels between two
    conversions. What a CPU's composite kernel of attention (for dropout, a mask, three
    dimensions, or operands whose strides its fused kernel does not take) converts inside is not counted.
    """
    dtypes = {(row.graph, row.name): row.dtype for row in rows}
    total = 0
    for row in rows:
        low = NAMES.get(dtypes.get((row.graph, row.inputs[0]), "")) if row.inputs else None
        asked = row.op in ("softmax", "log_softmax") and row.dtype == "float32" and not row.role
        if low is not None and (asked or (row.op == "rms_norm" and row.precision == "low")):
            total += row.runs * conversions_inside(row.op, low, device)
    return total


def count(rows: Iterable[Row]) -> int:
    """How many of them one forward runs."""
    return sum(row.runs for row in rows)
