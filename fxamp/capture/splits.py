"""Splits into parts whose sizes are given one by one: `x.split([3, 5])`, `x.split(counts.tolist())`."""

from typing import Any

from torch import fx

from fxamp import ir
from fxamp.opnames import canonical_name

_SPLITS = frozenset({"split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"})


def sizes_of_parts(node: fx.Node) -> Any:
    """The sizes that a split asks for: a node, or a list that may hold nodes; None for anything else."""
    op = canonical_name(node.target)
    if node.op not in ("call_function", "call_method") or op not in _SPLITS:
        return None
    name = "split_sizes" if op.endswith("sizes") else "split_size"
    sizes = ir.argument_of(node, 1, name, ir.argument_of(node, 1, "split_size_or_sections"))
    if isinstance(sizes, fx.Node):
        return None if isinstance(sizes.meta.get("val", sizes.meta.get(ir.GUESS)), int) else sizes
    return sizes if isinstance(sizes, (list, tuple)) else None
