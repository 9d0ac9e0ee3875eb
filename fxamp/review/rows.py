"""Nodes of a rewritten graph as plain rows: what the passes' marks say, in words and numbers."""

import dataclasses
from collections.abc import Iterator
from pathlib import PurePath

from torch import fx

from fxamp import ir
from fxamp.dtypes import dtype_name
from fxamp.review.conversions import conversion
from fxamp.value_types import tensors_in


@dataclasses.dataclass(frozen=True)
class Row:
    """One node of a rewritten graph.

    Attributes:
        graph: number of the graph; a model has one for each kind of call.
        name, op: node name, and canonical op.
        colour: "allow" | "infer" | "deny" | "clear" | "unlisted".
        precision: "low" | "high" | "none" (no float32 value in it).
        dtype: of the value, "" where it is no tensor.
        shape, nbytes: None where not known, or where the value is not one tensor.
        role: "" for a node of the model, else "cast", "weight cast", "pad" or "slice".
        reason: one sentence; `reason_kind` is the rule and `reason_node` the node it came from.
        source: the user's line, "/path/file.py:12".
        module, module_class: path and class of the innermost module whose forward made the node.
        inputs: names of the nodes it reads, each once.
        requires_grad: whether backward passes through its value.
        written_out: the ops that the model writes it out with, where it writes more than the one.
        is_estimate: its size depends on data (behind a packed sequence): `shape`, `nbytes` and `moved` are the most
            that there can be.
        launches: kernels that it starts only to convert.
        moved: bytes that its conversion reads and writes, 0 where it makes none; None where not known.
        runs: how often its graph runs in one forward: a graph of equal blocks once for each of them.
    """

    graph: int
    name: str
    op: str
    colour: str
    precision: str
    dtype: str
    shape: tuple[int, ...] | None
    nbytes: int | None
    role: str
    reason: str
    reason_kind: ir.Rule
    reason_node: str | None
    source: str
    module: str
    module_class: str
    inputs: tuple[str, ...]
    requires_grad: bool
    written_out: str = ""
    is_estimate: bool = False
    launches: int = 0
    moved: int | None = 0
    runs: int = 1

    @property
    def line(self) -> str:
        """The source line without its folder: "model.py:12"."""
        return PurePath(self.source).name

    @property
    def is_source(self) -> bool:
        """Whether it computes nothing: an input, a parameter or a buffer."""
        return self.op in ("input", "parameter", "buffer")

    @property
    def runs_in(self) -> str:
        """The precision in words; "low" is the dtype's name."""
        return {"low": self.dtype, "high": "float32"}.get(self.precision, "no float32")


def rows_of(graph: fx.Graph, number: int = 0, runs: int = 1) -> Iterator[Row]:
    """A row for every node of the graph, in order."""
    for node in graph.nodes:
        yield row_of(node, number, runs)


def row_of(node: fx.Node, number: int = 0, runs: int = 1) -> Row:
    """The row of one node of graph `number`."""
    mark = ir.mark(node)
    types = list(tensors_in(mark.type))
    dtypes = dict.fromkeys(dtype_name(found.dtype) for found in types if found.dtype is not None)
    sizes = [found.nbytes for found in types]
    path, module_class = _innermost(node)
    launches, moved = conversion(node)
    return Row(
        graph=number,
        name=node.name,
        op=mark.op,
        colour=mark.colour,
        precision=mark.precision,
        dtype="/".join(dtypes),
        shape=types[0].shape if len(types) == 1 else None,
        nbytes=None if None in sizes else sum(size for size in sizes if size is not None),
        role=mark.role,
        reason=mark.reason.text,
        reason_kind=mark.reason.kind,
        reason_node=mark.reason.node,
        source=ir.source_line(node),
        module=path,
        module_class=module_class,
        inputs=tuple(given.name for given in node.all_input_nodes),
        requires_grad=any(found.requires_grad for found in types),
        written_out=node.meta.get(ir.WRITTEN_OUT, ""),
        is_estimate=_is_estimate(node),
        launches=launches,
        moved=moved,
        runs=runs,
    )


def _is_estimate(node: fx.Node) -> bool:
    """Whether the value, or the one that a pass made it of, has a size that was guessed."""
    while ir.GUESSED not in node.meta and ir.mark(node).role and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return ir.GUESSED in node.meta


def _innermost(node: fx.Node) -> tuple[str, str]:
    """Path and class name of the innermost module in whose forward the node stands; "" for the model's own."""
    stack = node.meta.get("nn_module_stack")
    entry = list(stack.values())[-1] if stack else ("", None)
    if not isinstance(entry, tuple):
        return "", ""
    owner = node.meta.get(ir.BLOCK_CLASS, "") if entry[1] is None else entry[1]
    return ir.module_path(node), owner if isinstance(owner, str) else getattr(owner, "__name__", "")
