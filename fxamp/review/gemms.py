"""The matrix products of a graph: their sizes, their precision, and whether the sizes suit Tensor Cores."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

from torch import fx

from fxamp import ir

ALIGNMENT = 8
"""Elements: 16 bytes of a 2-byte dtype. Source: Train with Mixed Precision, NVIDIA, section 4.1."""


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One matrix product (a convolution is one too): `batch` times (m x k) by (k x n).

    Attributes:
        precision: "low" or "high".
        unaligned: each dimension that is no multiple of the alignment, in words: "n = 51 (weight's rows)".
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

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward product."""
        return 2 * self.batch * self.m * self.n * self.k


Shape = tuple[int, ...]
Sizes = tuple[int, int, int, int]
"""batch, m, n, k"""

_WORDS = {
    "linear": {"m": "batch and sequence", "n": "out_features", "k": "in_features"},
    "conv": {"m": "batch and positions", "n": "out_channels", "k": "in_channels"},
    "matmul": {
        "m": "rows of the left operand",
        "n": "columns of the right operand",
        "k": "the shared dimension",
    },
}


def gemms_of(graph: fx.Graph, number: int = 0, alignment: int = ALIGNMENT) -> Iterator[Gemm]:
    """Every matrix product whose sizes are known, in order."""
    for node in graph.nodes:
        op = ir.mark(node).op
        sizes = _MEASURES[op](node) if op in _MEASURES else None
        if sizes is not None and 0 not in sizes:
            batch, m, n, k = sizes
            yield Gemm(
                number,
                node.name,
                op,
                batch,
                m,
                n,
                k,
                ir.mark(node).precision,
                ir.source_line(node),
                ir.module_path(node),
                _unaligned(node, op, m, n, k, alignment),
            )


def gemm_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that are matrix products, their sizes known or not."""
    return [node for node in graph.nodes if ir.mark(node).op in _MEASURES]


def _unaligned(node: fx.Node, op: str, m: int, n: int, k: int, alignment: int) -> tuple[str, ...]:
    if op.startswith("conv"):
        weight = _shape(node, 1, "weight")
        k = weight[1] if weight else k  # cuDNN asks for aligned channels, not for an aligned kernel area
        m = alignment
    words = _WORDS["conv" if op.startswith("conv") else op if op in _WORDS else "matmul"]
    sizes = {"m": m, "n": n, "k": k}
    return tuple(f"{name} = {size} ({words[name]})" for name, size in sizes.items() if size % alignment)


def _shape(node: fx.Node, position: int, keyword: str) -> Shape | None:
    value = ir.argument_of(node, position, keyword)
    kind = ir.mark(value).type if isinstance(value, fx.Node) else None
    return kind.shape if isinstance(kind, ir.TensorType) else None


def _own_shape(node: fx.Node) -> Shape | None:
    kind = ir.mark(node).type
    return kind.shape if isinstance(kind, ir.TensorType) else None


def _linear(node: fx.Node) -> Sizes | None:
    x, weight = _shape(node, 0, "input"), _shape(node, 1, "weight")
    if x is None or weight is None or len(weight) != 2:
        return None
    return 1, math.prod(x[:-1]), weight[0], weight[1]


def _product(left: int, right: int, names: tuple[str, str]) -> Callable[[fx.Node], Sizes | None]:
    """Measure for a product of two arguments at these positions."""

    def measure(node: fx.Node) -> Sizes | None:
        a, b, out = _shape(node, left, names[0]), _shape(node, right, names[1]), _own_shape(node)
        if not a or not b or out is None:
            return None
        m = a[-2] if len(a) > 1 else 1
        n = b[-1] if len(b) > 1 else 1
        return max(1, math.prod(out) // max(1, m * n)), m, n, a[-1]

    return measure


def _conv(node: fx.Node) -> Sizes | None:
    weight, out = _shape(node, 1, "weight"), _own_shape(node)
    if weight is None or out is None or len(out) != len(weight):
        return None
    return 1, out[0] * math.prod(out[2:]), weight[0], math.prod(weight[1:])


def _conv_transpose(node: fx.Node) -> Sizes | None:
    x, weight = _shape(node, 0, "input"), _shape(node, 1, "weight")
    if x is None or weight is None or len(x) != len(weight):
        return None
    return 1, x[0] * math.prod(x[2:]), math.prod(weight[1:]), weight[0]


def _attention(node: fx.Node) -> Sizes | None:
    """Two products, q k^T and its weights times v, as one of double size."""
    q, k = _shape(node, 0, "query"), _shape(node, 1, "key")
    if q is None or k is None or len(q) < 2:
        return None
    return 2 * math.prod(q[:-2]), q[-2], k[-2], q[-1]


_MEASURES: Mapping[str, Callable[[fx.Node], Sizes | None]] = {
    "linear": _linear,
    "matmul": _product(0, 1, ("input", "other")),
    "mm": _product(0, 1, ("input", "mat2")),
    "bmm": _product(0, 1, ("input", "mat2")),
    "addmm": _product(1, 2, ("mat1", "mat2")),
    "baddbmm": _product(1, 2, ("batch1", "batch2")),
    "conv1d": _conv,
    "conv2d": _conv,
    "conv3d": _conv,
    "conv_transpose1d": _conv_transpose,
    "conv_transpose2d": _conv_transpose,
    "conv_transpose3d": _conv_transpose,
    "scaled_dot_product_attention": _attention,
}
