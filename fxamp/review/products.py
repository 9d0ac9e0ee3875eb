"""The matrix products inside ops that make several of them, or of a form of their own: sizes as (batch, m, n, k)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import fx, nn

from fxamp import ir
from fxamp.value_types import tensors_in

Shape = tuple[int, ...]
Sizes = tuple[int, int, int, int]
"""batch, m, n, k: a product of `batch` times (m x k) by (k x n)."""


def argument_shape(node: fx.Node, position: int, keyword: str) -> Shape | None:
    """The shape of a tensor argument."""
    return ir.shape_of(ir.argument_of(node, position, keyword))


# -------------------------------------------------------------------------------------------------- recurrent


def recurrent(node: fx.Node) -> list[Sizes]:
    """A product for each matrix among the flat weights, with every element of the sequence.

    lstm(input, (h, c), [w_ih, w_hh, b_ih, b_hh, ...], ...); of a packed sequence, the data come first too.
    """
    x = argument_shape(node, 0, "input")
    weights = [ir.shape_of(given) for given in node.all_input_nodes if _is_weight(given)]
    if not x:
        return []
    return [(1, math.prod(x[:-1]), shape[0], shape[1]) for shape in weights if shape and len(shape) == 2]


def _is_weight(node: fx.Node) -> bool:
    return ir.is_weight(node) or ir.mark(node).role in ("weight cast", "pad")


# -------------------------------------------------------------------------------------------------- attention


def attention(query: Shape, key: Shape) -> Sizes:
    """Two products, q k^T and its weights times v, as one of double size."""
    return 2 * math.prod(query[:-2]), query[-2], key[-2], query[-1]


def multi_head_attention(node: fx.Node) -> list[Sizes]:
    """F.multi_head_attention_forward: the projections of query, key and value, the attention, and the last one."""
    query, key, value = (argument_shape(node, place, name) for place, name in enumerate(("query", "key", "value")))
    width, heads = ir.argument_of(node, 3, "embed_dim_to_check"), ir.argument_of(node, 4, "num_heads")
    if not query or not key or not value or not isinstance(width, int) or not isinstance(heads, int):
        return []
    batch = math.prod(query[1:-1])  # length, batch, width
    projections = [(1, math.prod(given[:-1]), width, given[-1]) for given in (query, key, value)]
    depth = width // heads
    inner = attention((batch * heads, query[0], depth), (batch * heads, key[0], depth))
    return [*projections, inner, (1, math.prod(query[:-1]), width, width)]


# ------------------------------------------------------------------------------------------------ contractions


def einsum(node: fx.Node) -> list[Sizes]:
    """torch.einsum(equation, a, b, ...): from left to right, two operands at a time."""
    equation, *given = node.args if node.args else (None,)
    operands = given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
    shapes = [ir.shape_of(operand) for operand in operands]
    if not isinstance(equation, str) or not shapes or any(shape is None for shape in shapes):
        return []
    left, _, result = equation.replace(" ", "").partition("->")
    terms = [_letters(term, shape) for term, shape in zip(left.split(","), shapes, strict=False) if shape is not None]
    if len(terms) != len(shapes):
        return []
    sizes = {letter: size for term in terms for letter, size in term}
    names = [[letter for letter, _ in term] for term in terms]
    kept = set(result) if "->" in equation else {one for one in sizes if sum(one in term for term in names) == 1}
    kept |= {letter for letter in sizes if letter.startswith(".")}
    found: list[Sizes] = []
    current = names[0]
    for number, term in enumerate(names[1:], 2):
        later = kept.union(*names[number:])
        if any(letter in term and letter not in later for letter in current):  # else it is an element-wise product
            found.append(_contraction(current, term, later, sizes))
        current = [letter for letter in dict.fromkeys([*current, *term]) if letter in later]
    return found


def _letters(term: str, shape: Shape) -> list[tuple[str, int]]:
    """Each letter of one operand with its size; the dimensions of an ellipsis are called ".0" from the right."""
    before, dots, after = term.partition("...")
    hidden = len(shape) - len(before) - len(after)
    names = [*before, *([f".{number}" for number in reversed(range(hidden))] if dots else []), *after]
    return list(zip(names, shape, strict=False))


def _contraction(left: Sequence[str], right: Sequence[str], kept: set[str], sizes: Mapping[str, int]) -> Sizes:
    """Letters in both are the batch where they are kept and the sum where not; in one, its rows or columns."""
    both = [letter for letter in left if letter in right]

    def size(letters: Iterable[str]) -> int:
        return math.prod(sizes[letter] for letter in letters)

    return (
        size(letter for letter in both if letter in kept),
        size(letter for letter in left if letter not in right and letter in kept),
        size(letter for letter in right if letter not in left and letter in kept),
        size(letter for letter in both if letter not in kept),
    )


def tensordot(node: fx.Node) -> list[Sizes]:
    """torch.tensordot(a, b, dims): what is summed stands in both operands and not in the result.

    (The dimensions themselves may be known at the call alone, and then are no numbers here.)
    """
    a, b, out = argument_shape(node, 0, "a"), argument_shape(node, 1, "b"), ir.shape_of(node)
    if a is None or b is None or out is None or 0 in (*a, *b):
        return []
    k = math.isqrt(math.prod(a) * math.prod(b) // math.prod(out))
    return [(1, math.prod(a) // k, math.prod(b) // k, k)]


def bilinear(node: fx.Node) -> list[Sizes]:
    """F.bilinear(a, b, weight): the rows of `a` times the weight, which then meets `b` element by element."""
    a, weight = argument_shape(node, 0, "input1"), argument_shape(node, 2, "weight")
    if not a or weight is None or len(weight) != 3:
        return []
    return [(1, math.prod(a[:-1]), weight[0] * weight[2], weight[1])]


def chain(node: fx.Node) -> list[Sizes]:
    """linalg.multi_dot([a, b, c]), chain_matmul(a, b, c): as if from left to right."""
    operands = node.args[0] if node.args and isinstance(node.args[0], (list, tuple)) else node.args
    shapes = [ir.shape_of(given) for given in operands]
    known = [shape for shape in shapes if shape is not None and len(shape) == 2]
    if len(known) != len(shapes):
        return []
    return [(1, known[0][0], right[1], right[0]) for right in known[1:]]


COMPOSED: Mapping[str, Callable[[fx.Node], list[Sizes]]] = {
    **dict.fromkeys(("lstm", "gru", "rnn", "rnn_tanh", "rnn_relu"), recurrent),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_cell", "rnn_tanh_cell", "rnn_relu_cell"), recurrent),
    "multi_head_attention_forward": multi_head_attention,
    "einsum": einsum,
    "tensordot": tensordot,
    "bilinear": bilinear,
    "linalg_multi_dot": chain,
    "chain_matmul": chain,
}


# ------------------------------------------------------------------------------------------------ whole modules


def inside_module(node: fx.Node, module: nn.Module) -> list[Sizes]:
    """The products with the weights of a module that stays whole, each as often as its input has rows."""
    out = ir.shape_of(node) or next((kind.shape for kind in tensors_in(ir.mark(node).type)), None)
    x = next((shape for given in node.all_input_nodes if (shape := ir.shape_of(given))), None)
    if isinstance(module, nn.modules.conv._ConvNd):
        positions = (x if module.transposed else out) or ()
        weight = module.weight.shape
        rows = positions[0] * math.prod(positions[2:]) if len(positions) == len(weight) else 0
        return [(1, rows, weight[0], math.prod(weight[1:]))] if rows else []
    if x is None or isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return []
    matrices = [weight.shape for weight in module.parameters() if weight.dim() == 2]
    return [(1, math.prod(x[:-1]), shape[0], shape[1]) for shape in matrices]
