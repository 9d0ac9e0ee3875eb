"""Which dimension of its source each dimension of a result is, of ops that reorder dimensions or take parts."""

from torch import fx

from fxamp import ir


def dims_after(node: fx.Node, rank: int) -> tuple[int, ...] | None:
    """For an op that reorders dimensions: the source dimension of each dimension of the result."""
    op, order = ir.mark(node).op, list(range(rank))
    if not rank:
        return None
    if op in ("t", "mT", "adjoint") or (op == "getattr" and node.args[1] in ("T", "mT")):
        if rank < 2 or (rank > 2 and op == "getattr" and node.args[1] == "T"):
            return None
        return (*order[:-2], order[-1], order[-2])
    if op == "transpose":
        one, other = ir.argument_of(node, 1, "dim0"), ir.argument_of(node, 2, "dim1")
        if not isinstance(one, int) or not isinstance(other, int):
            return None
        order[one], order[other] = order[other], order[one]
        return tuple(order)
    if op == "permute":
        given = node.args[1] if len(node.args) == 2 else node.args[1:]
        given = node.kwargs.get("dims", given)
        order = [dim % rank for dim in given if isinstance(dim, int)] if isinstance(given, (tuple, list)) else []
        return tuple(order) if len(order) == rank else None
    return None


def dims_of_getitem(node: fx.Node) -> list[tuple[int | None, bool]] | None:
    """For `x[...]`: (source dimension, taken whole) of each dimension of the result.

    None where it indexes with tensors or with numbers that are not known.
    """
    index = node.args[1] if isinstance(node.args[1], (tuple, list)) else (node.args[1],)
    shape = ir.shape_of(node.args[0])
    if shape is None or any(isinstance(item, (fx.Node, list, bool)) for item in index):
        return None
    named = sum(item is not None and item is not Ellipsis for item in index)
    found: list[tuple[int | None, bool]] = []
    source = 0
    for item in (*index, *(() if Ellipsis in index else (Ellipsis,))):
        if item is Ellipsis:
            count = len(shape) - named
            found += [(source + number, True) for number in range(count)]
            source += count
        elif item is None:
            found.append((None, True))
        elif isinstance(item, slice):
            found.append((source, item == slice(None)))
            source += 1
        else:
            source += 1
    return found
