"""The matrix products of a graph: their sizes, their precision, and whether the sizes suit Tensor Cores."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

from torch import fx, nn

from fxamp import ir
from fxamp.dtypes import LOW_DTYPES
from fxamp.paths import submodule
from fxamp.review.products import (
    COMPOSED,
    Shape,
    Sizes,
    argument_shape,
    attention,
    inside_module,
    recurrent,
)
from fxamp.value_types import tensors_in

ALIGNMENT = 8
"""Elements: 16 bytes of a 2-byte dtype. Source: Train with Mixed Precision, NVIDIA, section 4.1."""


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One matrix product (a convolution is one too): `batch` times (m x k) by (k x n).

    Attributes:
        precision: "low" or "high"; "none" for other dtypes.
        unaligned: each dimension that is no multiple of the alignment, in words: "n = 51 (weight's rows)".
        runs: how often its graph runs in one forward: a graph of equal blocks once for each of them.
    """

    graph: int
    node: str
    op: str
    batch: int
    m: int
    n: int
    k: int
    precision: str
    source: str
    module: str
    unaligned: tuple[str, ...]
    runs: int = 1

    @property
    def flops(self) -> int:
        """Floating-point operations of the product, once."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def work(self) -> int:
        """The same of all its runs in one forward."""
        return self.flops * self.runs


_WORDS = {
    "linear": {"m": "batch and sequence", "n": "out_features", "k": "in_features"},
    "conv": {"m": "batch and positions", "n": "out_channels", "k": "in_channels"},
    "recurrent": {"m": "batch and sequence", "n": "gates times hidden_size", "k": "input_size or hidden_size"},
    "matmul": {
        "m": "rows of the left operand",
        "n": "columns of the right operand",
        "k": "the shared dimension",
    },
}


def gemms_of(
    graph: fx.Graph, number: int = 0, alignment: int = ALIGNMENT, root: nn.Module | None = None
) -> Iterator[Gemm]:
    """Every matrix product whose sizes are known, in order; an LSTM makes one with each of its weights.

    Args:
        root: resolves the modules that stay whole, whose products are then known too.
    """
    for node in graph.nodes:
        op = ir.mark(node).op
        for batch, m, n, k in _sizes(node, op, root):
            if 0 not in (batch, m, n, k):
                yield Gemm(
                    number,
                    node.name,
                    op,
                    batch,
                    m,
                    n,
                    k,
                    _precision(node),
                    ir.source_line(node),
                    ir.module_path(node),
                    _unaligned(node, op, m, n, k, alignment),
                )


def _sizes(node: fx.Node, op: str, root: nn.Module | None) -> list[Sizes]:
    if ir.sparse_values(node):
        return []  # it multiplies what is stored, and how much that is only the data tells
    if node.op == "call_module":
        is_worth = root is not None and ir.mark(node).colour == "allow"
        return inside_module(node, submodule(root, str(node.target))) if is_worth else []
    if op in _SEVERAL:
        return _SEVERAL[op](node)
    sizes = _MEASURES[op](node) if op in _MEASURES else None
    return [] if sizes is None else [sizes]


def _precision(node: fx.Node) -> str:
    """The node's precision; a product of the model's own low values, which no pass touched, is low too."""
    dtypes = {found.dtype for found in tensors_in(ir.mark(node).type)}
    return "low" if ir.mark(node).precision == "none" and dtypes <= {*LOW_DTYPES} else ir.mark(node).precision


def _unaligned(node: fx.Node, op: str, m: int, n: int, k: int, alignment: int) -> tuple[str, ...]:
    if op.startswith("conv"):
        weight: Shape | None = argument_shape(node, 1, "weight")
        k = weight[1] if weight else k  # cuDNN asks for aligned channels, not for an aligned kernel area
        m = alignment
    is_recurrent = COMPOSED.get(op) is recurrent
    kind = "conv" if op.startswith("conv") else "recurrent" if is_recurrent else op if op in _WORDS else "matmul"
    words = _WORDS[kind]
    sizes = {"m": m, "n": n, "k": k}
    return tuple(f"{name} = {size} ({words[name]})" for name, size in sizes.items() if size % alignment)


def _linear(node: fx.Node) -> Sizes | None:
    x, weight = argument_shape(node, 0, "input"), argument_shape(node, 1, "weight")
    if x is None or weight is None or len(weight) != 2:
        return None
    return 1, math.prod(x[:-1]), weight[0], weight[1]


def _product(left: int, right: int, names: tuple[str, str]) -> Callable[[fx.Node], Sizes | None]:
    """Measure for a product of two arguments at these positions."""

    def measure(node: fx.Node) -> Sizes | None:
        a, b, out = argument_shape(node, left, names[0]), argument_shape(node, right, names[1]), ir.shape_of(node)
        if not a or not b or out is None:
            return None
        m = a[-2] if len(a) > 1 else 1
        n = b[-1] if len(b) > 1 else 1
        return max(1, math.prod(out) // max(1, m * n)), m, n, a[-1]

    return measure


def _inner(node: fx.Node) -> Sizes | None:
    """Sums over the last dimension of both."""
    a, b = argument_shape(node, 0, "input"), argument_shape(node, 1, "other")
    return None if not a or not b else (1, math.prod(a[:-1]), math.prod(b[:-1]), a[-1])


def _summed(node: fx.Node) -> Sizes | None:
    """addbmm: the batch is summed too."""
    a, b = argument_shape(node, 1, "batch1"), argument_shape(node, 2, "batch2")
    return None if a is None or b is None or len(a) != 3 else (1, a[1], b[-1], a[0] * a[2])


def _grouped(node: fx.Node) -> Sizes | None:
    """grouped_mm: each row, or each part of the shared dimension, is one group's."""
    a, b, out = argument_shape(node, 0, "mat_a"), argument_shape(node, 1, "mat_b"), ir.shape_of(node)
    if not a or not b or out is None:
        return None
    return (a[0] if len(a) == len(b) == 3 else 1), a[-2], b[-1], a[-1]


def _conv(node: fx.Node) -> Sizes | None:
    weight, out = argument_shape(node, 1, "weight"), ir.shape_of(node)
    if weight is None or out is None or len(out) != len(weight):
        return None
    return 1, out[0] * math.prod(out[2:]), weight[0], math.prod(weight[1:])


def _conv_transpose(node: fx.Node) -> Sizes | None:
    x, weight = argument_shape(node, 0, "input"), argument_shape(node, 1, "weight")
    if x is None or weight is None or len(x) != len(weight):
        return None
    return 1, x[0] * math.prod(x[2:]), math.prod(weight[1:]), weight[0]


def _attention(node: fx.Node) -> list[Sizes]:
    """As one product of double size; as two where the values are not as wide as the keys."""
    q, k, v = (argument_shape(node, place, name) for place, name in enumerate(("query", "key", "value")))
    if q is None or k is None or v is None or len(q) < 2:
        return []
    if v[-1] == q[-1]:
        return [attention(q, k)]
    batch = math.prod(q[:-2])
    return [(batch, q[-2], k[-2], q[-1]), (batch, q[-2], v[-1], k[-2])]


_MEASURES: Mapping[str, Callable[[fx.Node], Sizes | None]] = {
    "linear": _linear,
    "matmul": _product(0, 1, ("input", "other")),
    "mm": _product(0, 1, ("input", "mat2")),
    "bmm": _product(0, 1, ("input", "mat2")),
    "mv": _product(0, 1, ("input", "vec")),
    "inner": _inner,
    "rmatmul": _product(1, 0, ("", "")),
    "addmv": _product(1, 2, ("mat", "vec")),
    "addbmm": _summed,
    "addmm": _product(1, 2, ("mat1", "mat2")),
    "baddbmm": _product(1, 2, ("batch1", "batch2")),
    "_grouped_mm": _grouped,
    "grouped_mm": _grouped,
    "transformers::grouped_mm_fallback": _grouped,
    "conv1d": _conv,
    "conv2d": _conv,
    "conv3d": _conv,
    "conv_transpose1d": _conv_transpose,
    "conv_transpose2d": _conv_transpose,
    "conv_transpose3d": _conv_transpose,
}
_SEVERAL: Mapping[str, Callable[[fx.Node], list[Sizes]]] = {
    **COMPOSED,
    "scaled_dot_product_attention": _attention,
    "higher_order::flex_attention": _attention,
}
