"""What a node multiplies: the dimensions K and N of a GEMM, and the arguments in which they stand.

`linear(x, w, b)` has K in the last dimension of `x` and dimension 1 of `w`, N in dimension 0 of `w` and `b`; N is
the last dimension of the result. M is everything else: rows, which no stride depends on.
"""

import math
from collections.abc import Callable

from torch import fx

from fxamp import ir
from fxamp.passes import recurrent_gemms
from fxamp.passes.gemm_types import UNKNOWN_SIZES, Gemm, GemmDim, Place, count_of, operands
from fxamp.passes.recurrent_gemms import describe_recurrent

# (dimension name, ((position, keyword, dimension from the end or the front), ...), dimension of the result)
_Row = tuple[str, tuple[tuple[int, str, int], ...], int | None]


def _convolution(spatial: int, transposed: bool = False) -> tuple[_Row, ...]:
    channel, read, written = -1 - spatial, int(not transposed), int(transposed)
    return (
        ("K", ((0, "input", channel), (1, "weight", read)), None),
        ("N", ((1, "weight", written), (2, "bias", 0)), channel),
    )


def _product(left: tuple[int, str], right: tuple[int, str], added: tuple[int, str] | None = None) -> tuple[_Row, ...]:
    summand = ((*added, -1),) if added else ()
    return (
        ("K", ((*left, -1), (*right, -2)), None),
        ("N", ((*right, -1), *summand), -1),
    )


_TABLE: dict[str, tuple[_Row, ...]] = {
    "addbmm": _product((1, "batch1"), (2, "batch2"), (0, "input")),
    "addmm": _product((1, "mat1"), (2, "mat2"), (0, "input")),
    "baddbmm": _product((1, "batch1"), (2, "batch2"), (0, "input")),
    "bilinear": (
        ("K", ((0, "input1", -1), (2, "weight", 1)), None),
        ("K", ((1, "input2", -1), (2, "weight", 2)), None),
        ("N", ((2, "weight", 0), (3, "bias", 0)), -1),
    ),
    "bmm": _product((0, "input"), (1, "mat2")),
    "conv1d": _convolution(1),
    "conv2d": _convolution(2),
    "conv3d": _convolution(3),
    "conv_transpose1d": _convolution(1, transposed=True),
    "conv_transpose2d": _convolution(2, transposed=True),
    "conv_transpose3d": _convolution(3, transposed=True),
    "linear": (
        ("K", ((0, "input", -1), (1, "weight", 1)), None),
        ("N", ((1, "weight", 0), (2, "bias", 0)), -1),
    ),
    "matmul": _product((0, "input"), (1, "other")),
    "mm": _product((0, "input"), (1, "mat2")),
    "scaled_dot_product_attention": (
        ("K", ((0, "query", -1), (1, "key", -1)), None),
        ("N", ((2, "value", -1),), -1),
    ),
}

_MODULE_WEIGHTS = "its weights belong to a module that stays whole, in gate blocks of the hidden size"
NO_RULE = {
    "chain_matmul": "several products in one call",
    "conv_tbc": "no padding rule for this layout",
    "convolution": "a backend form of convolution",
    "embedding": "no GEMM: rows are padded where a GEMM reads them",
    "embedding_bag": "no GEMM: rows are padded where a GEMM reads them",
    "inner": "no padding rule for this product",
    "linalg_multi_dot": "several products in one call",
    "linear_cross_entropy": "the product and its loss are one kernel",
    "multi_head_attention_forward": "projections and products are one call; example inputs have it traced into",
    "rmatmul": "no padding rule for this product",
    "rnn": _MODULE_WEIGHTS,
    "rnn_cell": _MODULE_WEIGHTS,
}
"""What multiplies, or feeds what multiplies, and has no padding rule: op -> why."""

OPS = frozenset({*_TABLE, *NO_RULE, *recurrent_gemms.OPS, "einsum"})
"""Every op that gets an answer."""

_VECTOR = "a product with a vector reads its matrix once: no Tensor Core is involved"


def describe(node: fx.Node) -> Gemm | str:
    """The node's GEMM, or the reason why it cannot be padded."""
    op = ir.mark(node).op
    if op in NO_RULE:
        return NO_RULE[op]
    if op in recurrent_gemms.OPS:
        return describe_recurrent(node)
    out = ir.shape_of(node)
    if out is None or any(ir.shape_of(value) is None for value in operands(node)):
        return UNKNOWN_SIZES
    if ir.sparse_values(node):
        return "a sparse product multiplies what is stored: no Tensor Core is involved"
    if "out" in node.kwargs:
        return "it writes into out="
    groups = ir.argument_of(node, 6, "groups", 1) if op.startswith("conv") else 1
    if groups != 1:
        return f"{groups} groups: padding channels would move them between groups"
    if any(size == 0 for value in (node, *operands(node)) for size in ir.shape_of(value) or ()):
        return "one of its sizes is 0"
    dims = _einsum_dims(node) if op == "einsum" else _table_dims(node, _TABLE[op])
    if isinstance(dims, str):
        return dims
    columns = next((dim.size for dim in dims if dim.name == "N"), 1)
    nbytes = 2 * sum(count_of(value) for value in (node, *operands(node)))
    return Gemm(node, dims, count_of(node) // columns, _macs(node, op, dims), nbytes)


def _table_dims(node: fx.Node, rows: tuple[_Row, ...]) -> tuple[GemmDim, ...] | str:
    multiplied = [ir.shape_of(ir.argument_of(node, place[0], place[1])) for place in rows[0][1]]
    if any(shape is None or len(shape) < 2 for shape in multiplied):
        return _VECTOR
    found = []
    for name, places, out in rows:
        known = [place for place in (_place(node, *place) for place in places) if place is not None]
        position = known[0]
        size = (ir.shape_of(ir.argument_of(node, position.position, position.keyword)) or ())[position.dim]
        kept = tuple(place for place in known if _size_at(node, place) == size)
        rank = len(ir.shape_of(node) or ())
        found.append(GemmDim(name, size, kept, None if out is None else out % rank))
    return tuple(found)


def _place(node: fx.Node, position: int, keyword: str, dim: int) -> Place | None:
    shape = ir.shape_of(ir.argument_of(node, position, keyword))
    if shape is None or not -len(shape) <= dim < len(shape):
        return None
    return Place(position, keyword, dim % len(shape))


def _size_at(node: fx.Node, place: Place) -> int | None:
    shape = ir.shape_of(ir.argument_of(node, place.position, place.keyword))
    return None if shape is None else shape[place.dim]


def _macs(node: fx.Node, op: str, dims: tuple[GemmDim, ...]) -> int:
    if op.startswith("conv"):
        weight = ir.shape_of(ir.argument_of(node, 1, "weight")) or ()
        pixels = node if "transpose" not in op else ir.argument_of(node, 0, "input")
        channels = weight[0]
        return count_of(pixels) * math.prod(weight) // channels
    if op == "scaled_dot_product_attention":
        query, key = (ir.shape_of(ir.argument_of(node, i, name)) or () for i, name in ((0, "query"), (1, "key")))
        return math.prod(query[:-1]) * key[-2] * (dims[0].size + dims[1].size)
    if op == "einsum":
        sizes = _label_sizes(node)
        return math.prod(sizes.values()) if isinstance(sizes, dict) else 0
    added = (ir.shape_of(ir.argument_of(node, 1, "batch1")) or (1,))[0] if op == "addbmm" else 1
    return count_of(node) * added * math.prod(dim.size for dim in dims if dim.name == "K")


# ------------------------------------------------------------------------------------------------- einsum


def _einsum_dims(node: fx.Node) -> tuple[GemmDim, ...] | str:
    terms, sizes = _einsum_terms(node), _label_sizes(node)
    if isinstance(terms, str):
        return terms
    if isinstance(sizes, str):
        return sizes
    left, right, out = terms
    places: Callable[[str], tuple[Place, ...]] = lambda label: tuple(  # noqa: E731
        Place(position, "", term.index(label)) for position, term in ((1, left), (2, right)) if label in term
    )
    summed = [label for label in left if label in right and label not in out]
    columns = [label for label in right if label not in left and label in out]
    found = [GemmDim("K", sizes[label], places(label)) for label in summed[-1:]]
    found += [GemmDim("N", sizes[label], places(label), out.index(label)) for label in columns[-1:]]
    if len(summed) > 1 or len(columns) > 1:
        return "K or N is a product of several dimensions of this einsum"
    return tuple(found) if found else "this einsum multiplies element by element"


def _label_sizes(node: fx.Node) -> dict[str, int] | str:
    terms = _einsum_terms(node)
    if isinstance(terms, str):
        return terms
    sizes: dict[str, int] = {}
    for term, value in zip(terms, node.args[1:], strict=False):
        for label, size in zip(term, ir.shape_of(value) or (), strict=False):
            if sizes.setdefault(label, size) != size:
                return "this einsum broadcasts a dimension"
    return sizes


def _einsum_terms(node: fx.Node) -> tuple[str, str, str] | str:
    equation, *values = node.args or (None,)
    if not isinstance(equation, str) or len(values) != 2 or not all(isinstance(v, fx.Node) for v in values):
        return "only einsum(equation, a, b) has a padding rule"
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != 2 or "." in equation:
        return "this einsum has no written result, an ellipsis, or not two operands"
    if any(len(set(term)) != len(term) for term in (*terms, out)):
        return "this einsum takes a diagonal"
    return terms[0], terms[1], out
