"""Values that low precision would destroy: literals, what they taint, exact integers, squares."""

import itertools

import torch
from torch import fx

from fxamp import ir
from fxamp.dtypes import dtype_name, is_inexact
from fxamp.inplace import mutated
from fxamp.lists import TRAITS
from fxamp.passes.literals import destroyed_literal, is_beyond_range
from fxamp.passes.reads import is_conversion
from fxamp.passes.ruling import Ruling, is_bounded
from fxamp.value_types import tensors_in

_RANGES = frozenset({"arange", "linspace", "logspace", "range"})
# Their integer operand selects and does not become a number.
_SELECTIONS = frozenset("embedding embedding_bag one_hot getitem index_select gather where masked_fill".split())
_PRODUCTS = frozenset({"mul", "div"})
# Every integer of these is exact in bfloat16 (8 bits of mantissa).
_SHORT_INTEGERS = frozenset({torch.uint8, torch.int8, torch.bool})


def mark_integers(ruling: Ruling) -> None:
    """Float values made of integers stay exact until a GEMM, a deny or a bounded op, or a product with a rounded value.

    (A hidden state times a mask of integers is no integer: what a GEMM or a norm made was rounded before. A sum of the
    two stays exact, as a grid moved by an offset does, and a GEMM that reads it rounds it as it rounds the offset. So
    it does with what is made of the rows of a table, which nothing has rounded yet.)
    """
    rounded: set[fx.Node] = set()
    for node in ruling.graph.nodes:
        if is_bounded(node) or ruling.colours.get(node) == "allow" or ruling.first_source(node, rounded) is not None:
            rounded.add(node)
        if node in rounded or _gives_rows(node) or ruling.first_source(node, ruling.rounded) is not None:
            ruling.rounded.add(node)
        if (ir.mark(node).op in _PRODUCTS or is_elementwise_product(node)) and ruling.first_source(
            node, rounded
        ) is not None:
            continue
        if not node.op.startswith("call") or not (ir.holds_float32(node) or mutated(node)):
            continue
        if _makes_floats_of_integers(ruling, node):
            ruling.integers.add(node)
        elif ruling.colours[node] in ("infer", "clear") and not is_bounded(node):
            if ruling.first_source(node, ruling.integers) is not None:
                ruling.integers.add(node)


def _gives_rows(node: fx.Node) -> bool:
    """Whether it looks up rows of a weight."""
    return ir.mark(node).op in ("embedding", "embedding_bag") and any(map(ir.is_weight, node.all_input_nodes))


def _makes_floats_of_integers(ruling: Ruling, node: fx.Node) -> bool:
    op = ir.mark(node).op
    if op in _RANGES:
        return True
    if op in _SELECTIONS or ruling.reads[node] or not ir.holds_float32(node):
        return False
    if not is_conversion(node) and ruling.colours[node] not in ("infer", "clear"):
        return False
    return any(_holds_long_integers(given) for given in node.all_input_nodes)


def _holds_long_integers(node: fx.Node) -> bool:
    if ir.mark(node).op == "one_hot":
        return False
    return any(
        found.dtype is not None and not is_inexact(found.dtype) and found.dtype not in _SHORT_INTEGERS
        for found in tensors_in(ir.mark(node).type)
    )


def fix_destroyed_values(ruling: Ruling, node: fx.Node) -> None:
    """Fix an infer or clear node that low precision would destroy."""
    low = ruling.policy.low
    problem = destroyed_literal(node, low)
    spread_taint(ruling, node)
    if problem:
        ruling.fix(node, "high", "literal", problem)
    elif node in ruling.tainted:
        carrier = ruling.first_source(node, ruling.tainted)
        name = carrier.name if carrier is not None else "its literal"
        ruling.fix(node, "high", "taint", f"holds numbers beyond {dtype_name(low)}'s range, from {name}", carrier)
    elif node in ruling.integers:
        carrier = ruling.first_source(node, ruling.integers)
        ruling.fix(
            node, "high", "integers", "is made of positions or exact integers, which low precision rounds", carrier
        )
    elif _multiplies_itself(ruling, node):
        ruling.fix(node, "high", "square", "a square overflows fp16 from 256 and loses half the exponent range")
        ruling.colours[node] = "deny"


def spread_taint(ruling: Ruling, node: fx.Node) -> None:
    """Mark a node that makes, or passes on, numbers beyond the low range."""
    carries = not is_bounded(node) and ruling.first_source(node, ruling.tainted) is not None
    if carries or is_beyond_range(node, ruling.policy.low):
        ruling.tainted.add(node)


def _multiplies_itself(ruling: Ruling, node: fx.Node) -> bool:
    if is_elementwise_product(node):
        factors = ir.nodes_in(node.args[1:])
        return any(_are_one(ruling, list(pair)) for pair in itertools.combinations(factors, 2))
    factors = [ir.argument_of(node, position, keyword) for position, keyword in ((0, "input"), (1, "other"))]
    is_product = ir.mark(node).op == "mul" and all(isinstance(factor, fx.Node) for factor in factors)
    return is_product and _are_one(ruling, factors)


def _are_one(ruling: Ruling, factors: list[fx.Node]) -> bool:
    return len({ruling.through_clear(factor) if _is_view(factor) else factor for factor in factors}) == 1


def _is_view(node: fx.Node) -> bool:
    return ir.mark(node).op in TRAITS["view"] and ir.mark(node).op not in ("getitem", "dropout")


def is_dot_product(node: fx.Node) -> bool:
    """Whether a GEMM op only adds up numbers or products, of vectors or of batches of them.

    1. No dimension of its result is one operand's alone: einsum("i,i->", a, b), einsum("bi,bi->b", a, b), and the
       matmul or inner of two vectors.
    2. No sum is of products: einsum("bhw->b", a), einsum("b,bij->bj", a, b).
    """
    op, given = ir.mark(node).op, node.args[0] if node.args else None
    if op == "einsum":
        return isinstance(given, str) and _only_reduces(given)
    operands = [ir.argument_of(node, 0, "input"), ir.argument_of(node, 1, "other")]
    return op in ("matmul", "inner") and all(_is_vector(operand) for operand in operands)


def _only_reduces(equation: str) -> bool:
    operands, result = _terms(equation)
    summed = set().union(*operands) - set(result)
    return bool(summed) and (all(set(result) <= set(operand) for operand in operands) or not _shared(operands, summed))


def is_elementwise_product(node: fx.Node) -> bool:
    """Whether a node is an einsum that adds up nothing: einsum("bld,dn->bldn", a, b), einsum("i,j->ij", a, b)."""
    operands, result = _terms_of(node)
    return len(operands) > 1 and set().union(*operands) == set(result)


def _shared(operands: list[str], indices: set[str]) -> bool:
    """Whether two operands have one of the indices."""
    return any(sum(index in operand for operand in operands) > 1 for index in indices)


def adds_to_what_is_there(node: fx.Node) -> bool:
    """Whether a write is a sum of all that goes to one place, as scatter_add and index_add always are.

    put and index_put with accumulate=True, scatter with reduce="add" or "multiply".
    """
    op = ir.mark(node).op
    if op in ("put", "index_put"):
        return ir.argument_of(node, 3, "accumulate", False) is not False
    return op == "_unsafe_masked_index_put_accumulate" or (op == "scatter" and node.kwargs.get("reduce") is not None)


def is_rearrangement(node: fx.Node) -> bool:
    """Whether a node is an einsum of one operand, all of whose dimensions are the result's: it multiplies nothing.

    einsum("nhwc->nchw", a), einsum("ii->i", a)
    """
    operands, result = _terms_of(node)
    return len(operands) == 1 and set(operands[0]) == set(result)


def _terms_of(node: fx.Node) -> tuple[list[str], str]:
    """The same of a node; of one that is no einsum in such words no operands."""
    is_einsum = ir.mark(node).op == "einsum" and node.args and isinstance(node.args[0], str)
    return _terms(str(node.args[0])) if is_einsum else ([], "")


def _terms(equation: str) -> tuple[list[str], str]:
    """The indices of each operand of an einsum, and of its result; an ellipsis is one index."""
    inputs, arrow, result = equation.replace(" ", "").replace("...", ".").partition("->")
    if not arrow:  # then the indices that stand once are the result's
        every = inputs.replace(",", "")
        result = "".join(index for index in every if every.count(index) == 1 or index == ".")
    return inputs.split(","), result


def _is_vector(operand: object) -> bool:
    shape = ir.shape_of(operand)
    return shape is not None and len(shape) == 1


def is_sum_of_squares(ruling: Ruling, node: fx.Node) -> bool:
    """Whether a dot product is that of a value with itself."""
    return is_dot_product(node) and len(ruling.reads[node]) > 1 and _are_one(ruling, node.all_input_nodes)
