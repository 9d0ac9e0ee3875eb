"""Put a cast on every edge whose two ends differ in precision."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import fx

from fxamp import ir
from fxamp.dtypes import is_inexact
from fxamp.ir import Reason
from fxamp.passes.alias import Aliases, find_aliases, grad_modes, grad_regions
from fxamp.passes.base import Pass
from fxamp.passes.policy import Policy
from fxamp.passes.reads import Read, float_reads
from fxamp.passes.verify import casts_minimal, operands_agree, writes_land
from fxamp.value_types import ValueType, converted, tensors_in, with_dtype


@dataclasses.dataclass(frozen=True)
class InsertCasts(Pass):
    """Cast values that are read in the other precision; types become real.

        y = linear(x, w)                            # before: linear is low
        y = linear(x.to(low), w.to(low))            # after

    1. A value read by several nodes in the other precision is cast once, unless it was written between them.
    2. A cast stands directly behind the value, or behind the write it must see; a weight's before its first use, and so
       does one whose reader has gradients where the value had none: forward may differentiate by an input. Inside of a
       torch.func transform stands none: what it gives is cast after it, what it takes before it.
    3. Only float32 tensors are cast; a mask with numbers beyond the low range is clamped to it first. Where low ops
       came before, infinities stay: they are an overflow, which the scaler and `find_nan` must see.
    4. Outputs come back in `output_dtype`.
    5. A value that was widened for this reader (see fxamp.capture.promotion) is read as it was before.
    """

    ensures: ClassVar = (operands_agree, casts_minimal, writes_land)
    policy: Policy
    output_dtype: torch.dtype | None = torch.float32
    has_gradients: bool = True

    def apply(self, graph: fx.Graph) -> bool:
        aliases = find_aliases(graph)
        wanted = self._edges(graph)
        for node in graph.nodes:
            precision = ir.mark(node).precision
            dtype = self.policy.low if precision == "low" else torch.float32
            ir.set_mark(node, type=with_dtype(ir.mark(node).type, dtype))
        regions, modes = grad_regions(graph), grad_modes(graph, self.has_gradients)
        after_low = _after_low(graph)
        made: dict[tuple[object, ...], fx.Node] = {}
        for reader, read, dtype in wanted:
            if (narrow := _narrow_source(read.value, dtype)) is not None:
                ir.replace_operand(reader, read, narrow)
                continue
            is_late = modes[regions[reader]] and not modes[regions[read.value]]
            at_reader = is_late or ir.is_weight(read.value) or read.value in aliases.storage_of
            region = regions[reader] if at_reader else 0
            key = (read.value, dtype, aliases.epoch(read.value, reader), region)
            if key not in made:
                place = _before(reader) if at_reader else _behind(read.value, reader)
                limits = (
                    torch.finfo(dtype)
                    if dtype == self.policy.low and _is_tainted(read.value, reader, aliases)
                    else None
                )
                with graph.inserting_before(place):
                    source = read.value if limits is None else _clamped(read.value, limits, aliases, after_low)
                    made[key] = _make_cast(graph, source, read.value, dtype, self.policy.low)
            ir.replace_operand(reader, read, made[key])
        for node in [node for node in graph.nodes if ir.PROMOTED in node.meta and not node.users]:
            graph.erase_node(node)
        return bool(wanted)

    def _edges(self, graph: fx.Graph) -> list[tuple[fx.Node, Read, torch.dtype]]:
        """Every (reader, argument, dtype to read it in) where the value has another dtype."""
        found = []
        for node in graph.nodes:
            for read in float_reads(node, self.policy.lists, self.policy.output_mode):
                want = self._wanted(node, read)
                if want is not None and want != self._dtype_of(read.value):
                    found.append((node, read, want))
        return found

    def _wanted(self, node: fx.Node, read: Read) -> torch.dtype | None:
        if read.mode == "any":
            return None
        if node.op == "output":
            return self.output_dtype
        if read.mode in ("high", "low"):
            return torch.float32 if read.mode == "high" else self.policy.low
        precision = ir.mark(node).precision
        return None if precision == "none" else (self.policy.low if precision == "low" else torch.float32)

    def _dtype_of(self, value: fx.Node) -> torch.dtype:
        return self.policy.low if ir.mark(value).precision == "low" else torch.float32


def _narrow_source(value: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """What a widened value was widened from, where that has the dtype it is wanted in; None for any other value."""
    if ir.PROMOTED not in value.meta:
        return None
    (source,) = value.all_input_nodes
    return source if any(found.dtype == dtype for found in tensors_in(ir.mark(source).type)) else None


def _make_cast(graph: fx.Graph, source: fx.Node, value: fx.Node, dtype: torch.dtype, low: torch.dtype) -> fx.Node:
    """A cast of the source, which is the value, or that as it is clamped."""
    cast = graph.call_method("to", (source, dtype))
    kind = converted(ir.mark(value).type, dtype)
    _describe(cast, value, kind, "weight cast" if ir.is_weight(value) else "cast")
    ir.set_mark(cast, op="to", precision="low" if dtype == low else "high")
    return cast


def _is_tainted(value: fx.Node, reader: fx.Node, aliases: Aliases) -> bool:
    writer = aliases.last_writer(value, reader)
    return ir.mark(value).tainted or (writer is not None and ir.mark(writer).tainted)


def _after_low(graph: fx.Graph) -> set[fx.Node]:
    """Low ops that compute numbers (a clear one overflows nowhere), and what is made of these numbers, not of sizes."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        mark = ir.mark(node)
        is_low = node.op.startswith("call") and mark.precision == "low" and mark.colour != "clear"
        holds_floats = any(kind.dtype is None or is_inexact(kind.dtype) for kind in tensors_in(mark.type))
        if holds_floats and (is_low or not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _clamped(value: fx.Node, limits: torch.finfo, aliases: Aliases, after_low: set[fx.Node]) -> fx.Node:
    """Finite numbers clamped to the low range; of a copy where the value is written later, since clamp saves it."""
    source = _added(value, "clone", (value,)) if value in aliases.storage_of else value
    clamped = _added(value, "clamp", (source, limits.min, limits.max))
    if value not in after_low:
        return clamped
    detached = _added(value, "detach", (source,))  # gradients go one way: through clamp
    is_infinite = _added(value, "isinf", (detached,))
    ir.set_mark(is_infinite, type=converted(ir.mark(value).type, torch.bool), precision="none")
    return _added(value, "where", (detached, is_infinite, clamped))


def _added(value: fx.Node, op: str, args: tuple[Any, ...]) -> fx.Node:
    """A method of the value's own that clamps it, in its dtype."""
    node = value.graph.call_method(op, args)
    _describe(node, value, ir.mark(value).type, "cast")
    ir.set_mark(node, op=op, precision="high")
    return node


def _describe(node: fx.Node, value: fx.Node, kind: ValueType, role: ir.Role) -> None:
    ir.keep_place(node, value)
    reason = Reason("cast", f"{value.name} is read in the other precision", value.name)
    ir.set_mark(node, type=kind, colour="clear", reason=reason, role=role, serves=value.name)


def _before(reader: fx.Node) -> fx.Node:
    """The node a cast stands before that is made for this reader: the reader, or the transform that it is a part of."""
    transform = reader.meta.get(ir.TRANSFORMED)
    while transform is not None and reader.prev.meta.get(ir.TRANSFORMED) == transform:
        reader = reader.prev
    return reader


def _behind(value: fx.Node, reader: fx.Node) -> fx.Node:
    """The node a cast stands before that stands right behind its value, or the transform that gives it."""
    transform, follower = value.meta.get(ir.TRANSFORMED), value.next
    while transform is not None and follower.meta.get(ir.TRANSFORMED) == transform:
        follower = follower.next
    while follower.op in ("placeholder", "get_attr") and follower is not reader:
        follower = follower.next
    return follower
