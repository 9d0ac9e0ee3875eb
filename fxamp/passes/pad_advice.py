"""What padding a graph cannot do, as advice with figures: batch, sequence length, channels, vocabulary."""

from collections.abc import Iterable

from torch import fx

from fxamp import ir
from fxamp.passes.gemm_types import shape_of
from fxamp.passes.pad_costs import padded_size

# Rows and columns of the tiles that the GEMM kernels of cuBLAS compute: larger multiples leave none half empty.
TILE = 128
# From this size on a dimension is a vocabulary, or as large: a multiple of TILE costs it less than 1 %.
WIDE = 12_800


def padding_advice(graphs: Iterable[fx.Graph], multiple: int = 8) -> list[str]:
    """Sentences on what the user could change, each once, in graph order.

    "batch x length: 2 x 15 = 30 rows: 32 would be a multiple of 8"

    Args:
        graphs: after the padding pass.
    """
    found: list[str] = []
    for graph in graphs:
        for node in graph.nodes:
            if ir.mark(node).pad is not None and ir.mark(node).precision == "low":
                found += _of(node, multiple)
    return list(dict.fromkeys(found))


def _of(node: fx.Node, multiple: int) -> Iterable[str]:
    note, op = ir.mark(node).pad, ir.mark(node).op
    assert note is not None
    where = ir.module_path(node) or node.name
    for name, size, padded in note.dims:
        if op == "linear" and name == "N" and size >= WIDE and size % TILE:
            now = f"padded to {padded}" if padded != size else "as it is"
            tiles = padded_size(size, TILE)
            yield f"{where}: vocabulary {size}: {now}; {tiles} would also align to {TILE}"
        elif op.startswith("conv") and size % multiple and padded != size:
            what = "input channels" if name == "K" else "channels"
            growth = 100 * (padded - size) // size
            yield f"{where}: {what} {size}: padded to {padded}, {growth} % more work; {padded} would cost no pads"
        elif size == padded and size % multiple and "run time" in note.text:
            better = padded_size(size, multiple)
            yield f"{where}: {name} = {size} is not fixed: fxamp.data.pad_to_multiple makes it {better}"
    first = shape_of(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if op == "linear" and note.rows is not None and note.rows % multiple and first:
        sizes = " x ".join(map(str, first[:-1]))
        better = padded_size(note.rows, multiple)
        yield f"batch x length: {sizes} = {note.rows} rows: {better} would be a multiple of {multiple}"
    if op.startswith("conv") and first and first[0] % multiple:
        yield f"batch {first[0]}: use {padded_size(first[0], multiple)}"
