"""The dimensions K and N of a GEMM, and the arguments in which they stand."""

import dataclasses
import math

from torch import fx

from fxamp import ir
from fxamp.value_types import TensorType

UNKNOWN_SIZES = "sizes are not known before it runs: give example_inputs (a size that the data decides stays unknown)"


@dataclasses.dataclass(frozen=True)
class Place:
    """One dimension of one argument of a node; `dim` counts from the front."""

    position: int
    keyword: str
    dim: int


@dataclasses.dataclass(frozen=True)
class GemmDim:
    """One dimension of a GEMM.

    Attributes:
        name: "K" (summed over) or "N".
        size: in elements.
        places: where it stands in the arguments.
        out: the dimension of the result, None for one that is summed over.
    """

    name: str
    size: int
    places: tuple[Place, ...]
    out: int | None = None


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One GEMM (or convolution, or attention) of a graph.

    Attributes:
        dims: those that a graph can pad.
        rows: size of M.
        macs: multiplications, each with an addition.
        nbytes: read and written once, in the low dtype.
    """

    node: fx.Node
    dims: tuple[GemmDim, ...]
    rows: int
    macs: int
    nbytes: int


def operands(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments of a GEMM."""
    return [value for value in node.all_input_nodes if isinstance(ir.mark(value).type, TensorType)]


def count_of(node: fx.Node) -> int:
    """Elements of a node's tensor value; 1 where its sizes are not known."""
    return math.prod(ir.shape_of(node) or ())
