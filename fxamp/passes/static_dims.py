"""Which dimensions of which values have one size in every call: an analysis, it changes nothing.

A size is static where it follows from parameters, constants and the code alone. The answer decides whether
padding by a fixed number of elements aligns a dimension. A size that is called static and is not would be padded
wrongly in another call, so whatever is not sure is not static.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fxamp import ir
from fxamp.lists import TRAITS
from fxamp.passes.gemm_types import Gemm
from fxamp.passes.gemms import OPS, describe
from fxamp.passes.moved_dims import dims_after, dims_of_getitem
from fxamp.passes.recurrent_gemms import OPS as RECURRENT
from fxamp.passes.recurrent_gemms import Recurrent
from fxamp.passes.view_sizes import is_rest_static
from fxamp.value_types import TensorType, ValueType, tensors_in

Static = Any
"""Of a tensor: a bool for each dimension; of a tuple: one of these for each part; of a number: a bool."""


def static_dims(graph: fx.Graph, all_static: bool = False) -> dict[fx.Node, Static]:
    """For every value of a graph, which of its dimensions are static.

    Args:
        all_static: the graph is only ever run with the sizes of its example, but for symbolic ones and for those that
            the data decides.
    """
    if all_static and not any(ir.GUESS in node.meta for node in graph.nodes):
        found: dict[fx.Node, Static] = {}
        for node in graph.nodes:
            found[node] = _but_symbols(node.meta["val"]) if "val" in node.meta else _of(node, found)
        return found
    return _forwards(graph, _forced_by_weights(graph, _forwards(graph, {})))


def _forwards(graph: fx.Graph, forced: dict[fx.Node, set[int]]) -> dict[fx.Node, Static]:
    found: dict[fx.Node, Static] = {}
    for node in graph.nodes:
        found[node] = _of(node, found)
        if node in forced and isinstance(found[node], tuple):
            found[node] = tuple(flag or dim in forced[node] for dim, flag in enumerate(found[node]))
    return found


def _forced_by_weights(graph: fx.Graph, found: dict[fx.Node, Static]) -> dict[fx.Node, set[int]]:
    """Dimensions that a weight allows one size only: K of what it is multiplied with."""
    forced: dict[fx.Node, set[int]] = {}
    for node in graph.nodes:
        gemm = describe(node) if ir.mark(node).op in OPS else ""
        if isinstance(gemm, Recurrent):
            forced.setdefault(_uncast(node.args[0]), set()).add(gemm.dims[0].places[0].dim)
            continue
        for dim in gemm.dims if isinstance(gemm, Gemm) else ():
            values = [(ir.argument_of(node, at.position, at.keyword), at.dim) for at in dim.places]
            if any(is_static(found, value, at) for value, at in values):
                for value, at in values:
                    forced.setdefault(_uncast(value), set()).add(at)
    return forced


def _uncast(value: fx.Node) -> fx.Node:
    """What a cast was made of."""
    while ir.mark(value).role == "cast" and isinstance(value.args[0], fx.Node):
        value = value.args[0]
    return value


def is_static(found: Mapping[fx.Node, Static], node: fx.Node, dim: int) -> bool:
    """Whether one dimension of a node's tensor is static."""
    dims = found.get(node)
    return isinstance(dims, tuple) and -len(dims) <= dim < len(dims) and dims[dim] is True


def _everywhere(node: fx.Node, value: bool) -> Static:
    return _fill(ir.mark(node).type, value)


def _but_symbols(value: Any) -> Static:
    """Of a value whose sizes are those of every call, but for those that are symbols."""
    if isinstance(value, torch.Tensor):
        return tuple(not isinstance(size, torch.SymInt) for size in value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(map(_but_symbols, value))
    return not isinstance(value, torch.SymInt)


def _fill(kind: ValueType, value: bool) -> Static:
    if isinstance(kind, TensorType):
        return (value,) * len(kind.shape or ())
    if isinstance(kind, tuple):
        return tuple(_fill(part, value) for part in kind)
    return value


def _of(node: fx.Node, found: dict[fx.Node, Static]) -> Static:
    if node.op in ("placeholder", "get_attr", "output"):
        return _everywhere(node, ir.is_weight(node))
    op = ir.mark(node).op
    if ir.mark(node).type is None:
        return _number(node, op, found)
    if op == "getitem" and isinstance(node.args[0], fx.Node) and ir.is_tuple(node.args[0]):
        return _part(found[node.args[0]], node.args[1])
    if op in ("chunk", "split", "tensor_split", "unsafe_chunk", "unsafe_split"):
        return _split(node, found)
    if op in RECURRENT and ir.is_tuple(node) and isinstance(describe(node), Recurrent):
        return tuple((False,) * (len(kind.shape or ()) - 1) + (True,) for kind in tensors_in(ir.mark(node).type))
    if op in _ROWS_OF_DATA and isinstance(given := found.get(node.all_input_nodes[0]), tuple):
        rows, gone = _ROWS_OF_DATA[op]
        return ((False,) * rows + given[gone:], (False,))
    if ir.shape_of(node) is None:
        return _everywhere(node, False)
    if op in _SHAPED:
        return _SHAPED[op](node, found)
    if op in OPS:
        gemm = describe(node)
        return _gemm(node, gemm, found) if isinstance(gemm, Gemm) else _same(node, found)
    return _same(node, found)


# Dimensions of rows, which the lengths decide, in what packs or unpacks a sequence and in what it reads.
_ROWS_OF_DATA = {"_pack_padded_sequence": (1, 2), "_pad_packed_sequence": (2, 1)}


def _known(argument: Any, found: dict[fx.Node, Static]) -> bool:
    """Whether a size argument, or each in a list of them, is static: a constant, or computed from static sizes."""
    return all(
        all(value) if isinstance(value := found.get(node), tuple) else value is True for node in ir.nodes_in(argument)
    )


def _number(node: fx.Node, op: str, found: dict[fx.Node, Static]) -> Static:
    given = node.args[0] if node.args else None
    if isinstance(given, fx.Node) and ir.shape_of(given) is not None:
        if op == "size" or (op == "getattr" and node.args[1] == "shape"):
            dim = ir.argument_of(node, 1, "dim") if op == "size" else None
            return found[given][dim] if isinstance(dim, int) else found[given]
        return op in ("dim", "len") or (op == "getattr" and node.args[1] in ("ndim", "dtype", "device"))
    if op == "getitem" and isinstance(given, fx.Node) and isinstance(found[given], tuple):
        return _part(found[given], node.args[1])
    return all(_known(value, found) for value in node.all_input_nodes)


def _part(parts: Static, index: Any) -> Static:
    if not isinstance(parts, tuple):
        return parts
    try:
        return parts[index]
    except (TypeError, IndexError):
        return False


def _split(node: fx.Node, found: dict[fx.Node, Static]) -> Static:
    given, kinds = node.args[0], ir.mark(node).type
    dim = ir.argument_of(node, 2, "dim", 0)
    known = all(_known(value, found) for value in node.all_input_nodes if value is not given)
    if not isinstance(given, fx.Node) or not isinstance(kinds, tuple) or not isinstance(dim, int):
        return _everywhere(node, False)
    dims = list(found[given])
    if dims:
        dims[dim] = dims[dim] and known
    return tuple(tuple(dims) for _ in kinds)


_ROWS_FIRST = frozenset({"bmm", "linear", "matmul", "mm", "scaled_dot_product_attention"})


def _gemm(node: fx.Node, gemm: Gemm, found: dict[fx.Node, Static]) -> Static:
    dims = [False] * len(ir.shape_of(node) or ())
    first = node.args[0] if node.args else None
    if ir.mark(node).op in _ROWS_FIRST and isinstance(first, fx.Node):
        rows = found[first][:-1]
        dims[-1 - len(rows) : -1] = rows[-len(dims) + 1 :] if len(dims) > 1 else ()
        for at in _broadcast(node, found):
            dims[at] = False
    elif ir.mark(node).op.startswith("conv") and isinstance(first, fx.Node) and len(dims) == len(found[first]):
        dims[0] = found[first][0]
    for dim in gemm.dims:
        if dim.out is not None and isinstance(gemm, Recurrent):
            dims[dim.out] = True
        elif dim.out is not None:
            place = dim.places[0]
            argument = ir.argument_of(node, place.position, place.keyword)
            dims[dim.out] = is_static(found, argument, place.dim)
    return tuple(dims)


def _broadcast(node: fx.Node, found: dict[fx.Node, Static]) -> list[int]:
    """Batch dimensions, from the back, of a product that are 1 in this call and may be another number in others."""
    second, shape = ir.argument_of(node, 1, "other"), ir.shape_of(node) or ()
    rank = min(len(ir.shape_of(second) or ()), len(shape))
    return [-back for back in range(3, rank + 1) if shape[-back] == 1 and not is_static(found, second, -back)]


def _same(node: fx.Node, found: dict[fx.Node, Static]) -> Static:
    """An op that keeps or broadcasts its operands' shapes: static where an operand of that size is.

    A size of 1 is static where each operand's is, as one that is 1 in this call alone is broadcast no longer in others,
    and where no number that the op reads may have decided on it.
    """
    shape = ir.shape_of(node) or ()
    has_static_numbers = all(_known(value, found) for value in node.all_input_nodes if ir.shape_of(value) is None)
    dims = [False] * len(shape)
    for back in range(1, len(shape) + 1):
        flags = [
            is_static(found, value, -back)
            for value in node.all_input_nodes
            if len(given := ir.shape_of(value) or ()) in range(back, len(shape) + 1) and given[-back] == shape[-back]
        ]
        dims[-back] = any(flags) and (shape[-back] != 1 or (all(flags) and has_static_numbers))
    return tuple(dims)


# ------------------------------------------------------------------------------------- ops that move sizes


def _sizes(node: fx.Node, found: dict[fx.Node, Static]) -> Static:
    given = node.args[0]
    sizes = node.args[1:] if len(node.args) != 2 else node.args[1]
    sizes = sizes or node.kwargs.get("shape", node.kwargs.get("size", ()))
    shape = ir.shape_of(node) or ()
    if isinstance(sizes, fx.Node) or not isinstance(sizes, (tuple, list)):
        sizes = (sizes,)
    if len(sizes) != len(shape):
        return tuple(_known(sizes[0], found) for _ in shape) if len(sizes) == 1 else _everywhere(node, False)
    dims = [size != -1 and _known(size, found) for size in sizes]
    rest = [number for number, size in enumerate(sizes) if isinstance(size, int) and size == -1]
    if rest and isinstance(given, fx.Node) and ir.shape_of(given) is not None:
        dims[rest[0]] = is_rest_static(ir.shape_of(given) or (), found[given], shape, tuple(sizes), dims, rest[0])
    return tuple(dims)


def _permute(node: fx.Node, found: dict[fx.Node, Static]) -> Static:
    order = dims_after(node, len(ir.shape_of(node) or ()))
    given = found.get(node.args[0])  # type: ignore[arg-type]
    if order is None or not isinstance(given, tuple) or len(given) != len(order):
        return _everywhere(node, False)
    return tuple(given[source] for source in order)


def _flatten(node: fx.Node, found: dict[fx.Node, Static]) -> Static:
    given = found.get(node.args[0])  # type: ignore[arg-type]
    if not isinstance(given, tuple):
        return _everywhere(node, False)
    start, end = ir.argument_of(node, 1, "start_dim", 0), ir.argument_of(node, 2, "end_dim", -1)
    if not isinstance(start, int) or not isinstance(end, int):
        return _everywhere(node, False)
    rank = max(len(given), 1)  # of a number it makes one dimension
    start, end = start % rank, end % rank
    return (*given[:start], all(given[start : end + 1]), *given[end + 1 :])


def _getitem(node: fx.Node, found: dict[fx.Node, Static]) -> Static:
    kept = dims_of_getitem(node)
    given = found[node.args[0]]  # type: ignore[index]
    if kept is None or not isinstance(given, tuple):  # what a whole module gives may be no tensor
        return _everywhere(node, False)
    has_constant_bounds = not ir.nodes_in(node.args[1])
    return tuple(source is not None and (whole or has_constant_bounds) and given[source] for source, whole in kept)


def _embedding(node: fx.Node, found: dict[fx.Node, Static]) -> Static:
    indices = found.get(ir.argument_of(node, 0, "input"))
    return (*indices, True) if isinstance(indices, tuple) else _everywhere(node, False)


def _index_select(node: fx.Node, found: dict[fx.Node, Static]) -> Static:
    given, index = found.get(node.args[0]), ir.argument_of(node, 2, "index")  # type: ignore[arg-type]
    dim = ir.argument_of(node, 1, "dim")
    if not isinstance(given, tuple) or not given or not isinstance(dim, int):
        return _everywhere(node, False)
    dim %= len(given)
    return (*given[:dim], is_static(found, index, 0), *given[dim + 1 :])


def _unsqueeze(node: fx.Node, found: dict[fx.Node, Static]) -> Static:
    given, dim = found.get(node.args[0]), ir.argument_of(node, 1, "dim")  # type: ignore[arg-type]
    if not isinstance(given, tuple) or not isinstance(dim, int):
        return _everywhere(node, False)
    dim %= len(given) + 1
    return (*given[:dim], True, *given[dim:])


def _pooled(node: fx.Node, found: dict[fx.Node, Static]) -> Static:
    """An adaptive pool: its sizes are arguments, None for those of the input."""
    given, sizes = found.get(node.args[0]), ir.argument_of(node, 1, "output_size")  # type: ignore[arg-type]
    if not isinstance(given, tuple):
        return _everywhere(node, False)
    spatial = int(ir.mark(node).op[-2])
    sizes = sizes if isinstance(sizes, (tuple, list)) else (sizes,) * spatial
    return (*given[:-spatial], *(size is not None and _known(size, found) for size in sizes))


def _attribute(node: fx.Node, found: dict[fx.Node, Static]) -> Static:
    return _permute(node, found) if node.args[1] in ("T", "mT") else _same(node, found)


def _moved(node: fx.Node, found: dict[fx.Node, Static]) -> Static:
    return _everywhere(node, False)


_SHAPED: dict[str, Callable[[fx.Node, dict[fx.Node, Static]], Static]] = {
    **{f"adaptive_{kind}_pool{n}d": _pooled for kind in ("avg", "max") for n in (1, 2, 3)},
    "cat": _moved,
    "embedding": _embedding,
    "expand": _sizes,
    "flatten": _flatten,
    "getattr": _attribute,
    "getitem": _getitem,
    "index_select": _index_select,
    "mT": _permute,
    "permute": _permute,
    "reshape": _sizes,
    "squeeze": _moved,
    "stack": _moved,
    "t": _permute,
    "transpose": _permute,
    "unflatten": _moved,
    "unsqueeze": _unsqueeze,
    "view": _sizes,
    **{op: _moved for op in TRAITS["view"] & {"diagonal", "movedim", "narrow", "select", "unfold"}},
}
