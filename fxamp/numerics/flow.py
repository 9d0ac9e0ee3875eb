"""Where values and gradients stop being finite: one run of a graph, watched on every edge, forward and backward."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.converted import Variant
from fxamp.numerics.run import Call, floats_in, loss_of, run, state_kept


@dataclasses.dataclass(frozen=True)
class Extent:
    """What a value holds.

    Attributes:
        low, high: smallest and largest finite element; None where there is none.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    nans: int
    infs: int

    @property
    def is_finite(self) -> bool:
        return not (self.nans or self.infs)

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        span = "nothing finite" if self.low is None else f"[{self.low:.4g}, {self.high:.4g}]"
        bad = [f"{count} {word}" for count, word in ((self.nans, "nan"), (self.infs, "inf")) if count]
        return f"{kind} {list(self.shape)} {span}" + (f", {' and '.join(bad)}" if bad else "")


def extent_of(tensor: torch.Tensor) -> Extent:
    """The extent of a floating tensor."""
    values = tensor.detach()
    finite = torch.isfinite(values)
    kept = values[finite]
    nans = int(torch.isnan(values).sum())
    infs = values.numel() - int(finite.sum()) - nans
    low, high = (float(kept.min()), float(kept.max())) if kept.numel() else (None, None)
    return Extent(tensor.dtype, tuple(tensor.shape), low, high, nans, infs)


Edge = tuple[str, str]
"""(the value's node, the node that reads it)"""


@dataclasses.dataclass
class Flow:
    """One watched run.

    Attributes:
        values: extents of every node's value when it was made; of a tuple, the first part that is not finite.
        reads: (value, reader) -> its extent when it was read: in-place ops may have written it since.
        edges: extents of the gradients that flowed over each edge, in the order of backward.
        sums: extents of the gradients of whole values, where several readers' gradients were added.
        writers: (value, reader) -> the in-place op that wrote the value last before it was read.
    """

    variant: Variant
    values: dict[str, Extent] = dataclasses.field(default_factory=dict)
    edges: dict[Edge, Extent] = dataclasses.field(default_factory=dict)
    sums: dict[str, Extent] = dataclasses.field(default_factory=dict)
    reads: dict[Edge, Extent] = dataclasses.field(default_factory=dict)
    writers: dict[Edge, str] = dataclasses.field(default_factory=dict)
    loss: Extent | None = None
    outputs: list[Extent] = dataclasses.field(default_factory=list)

    @property
    def is_finite(self) -> bool:
        """Whether outputs, loss and every gradient are finite."""
        ends = [*self.outputs, *self.edges.values(), *self.sums.values(), *([self.loss] if self.loss else [])]
        return all(extent.is_finite for extent in ends)


def watch_flow(
    call: Call, loss_fn: Callable[[Any], torch.Tensor] | None, variant: Variant | None = None, as_float32: bool = False
) -> Flow:
    """Run a call once, with its backward where there is a loss function, and note every extent."""
    flow = Flow(variant or call.variant)
    watcher = Watcher(flow, with_gradients=loss_fn is not None)
    with state_kept(call.model), torch.set_grad_enabled(loss_fn is not None):
        output = run(call, watcher.see, watcher.edge, variant=flow.variant, as_float32=as_float32)
        flow.outputs = [extent_of(tensor) for tensor in floats_in(output)]
        if loss_fn is not None:
            loss = loss_of(output, loss_fn)
            flow.loss = extent_of(loss)
            wanted = [parameter for parameter in call.model.parameters() if parameter.requires_grad]
            if loss.requires_grad and wanted:
                torch.autograd.grad(loss, wanted, allow_unused=True)
    return flow


class Watcher:
    """What a `Runner` calls while it runs: notes extents, and puts a probe on every edge that carries a gradient."""

    def __init__(self, flow: Flow, with_gradients: bool) -> None:
        self.flow = flow
        nodes = list(flow.variant.graph.nodes)
        # A probe is a view, and autograd lets no view of a custom function be written in place.
        self.is_written = any(written.op != "get_attr" for node in nodes for written in ir.mutated(node))
        self.with_probes = with_gradients and not self.is_written
        self.with_gradients = with_gradients
        self.writer_of: dict[int, str] = {}
        self.readers = {node.name: [user.name for user in node.users] for node in nodes}

    def see(self, node: fx.Node, value: Any) -> Any:
        tensors = floats_in(value)
        if tensors:
            self.flow.values[node.name] = _extent_of_all(tensors)
        if self.is_written and ir.mutated(node):
            self.writer_of.update({_storage(tensor): node.name for tensor in tensors})
        if self.with_gradients and isinstance(value, torch.Tensor) and value.requires_grad:
            self._watch_sum(node, value)
        return value

    def edge(self, given: fx.Node, reader: fx.Node, value: Any) -> Any:
        self._note_read(given, reader, value)
        is_probed = isinstance(value, torch.Tensor) and value.requires_grad and value.is_floating_point()
        if not self.with_probes or not is_probed:
            return value
        return _Probe.apply(value, lambda gradient: self._note((given.name, reader.name), gradient))  # type: ignore[no-untyped-call]

    def _note_read(self, given: fx.Node, reader: fx.Node, value: Any) -> None:
        tensors, edge = floats_in(value), (given.name, reader.name)
        if not tensors:
            return
        self.flow.reads[edge] = _extent_of_all(tensors) if self.is_written else self.flow.values[given.name]
        writer = self.writer_of.get(_storage(tensors[0]))
        if writer is not None:
            self.flow.writers[edge] = writer

    def _note(self, edge: Edge, gradient: torch.Tensor) -> None:
        found = extent_of(gradient)
        if edge not in self.flow.edges or not found.is_finite:
            self.flow.edges[edge] = found

    def _watch_sum(self, node: fx.Node, value: torch.Tensor) -> None:
        readers = self.readers[node.name]
        if self.with_probes and len(readers) < 2:
            return

        def note(gradient: torch.Tensor) -> None:
            found = extent_of(gradient)
            if self.with_probes:
                self.flow.sums[node.name] = found
            else:
                for reader in self._readers_as_made(node.name):
                    self.flow.edges.setdefault((node.name, reader), found)

        value.register_hook(note)  # type: ignore[no-untyped-call]

    def _readers_as_made(self, name: str) -> list[str]:
        """Who read the value as this node made or wrote it, not as a later in-place op left it."""
        writers = self.flow.writers
        through_views = [reader for (_, reader), writer in writers.items() if writer == name]
        return [reader for reader in self.readers[name] if (name, reader) not in writers] + through_views


def _extent_of_all(tensors: list[torch.Tensor]) -> Extent:
    extents = [extent_of(tensor) for tensor in tensors]
    return next((found for found in extents if not found.is_finite), extents[0])


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Probe(torch.autograd.Function):
    """The identity, which shows the gradient that flows back through it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, note: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.note = note
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.note(gradient)
        return gradient, None


# ------------------------------------------------------------------------------------------------- who began


@dataclasses.dataclass(frozen=True)
class Origin:
    """The node where something stopped being finite.

    Attributes:
        phase: "input" | "parameter" | "forward" | "backward" | "sum of gradients".
        extent: of the first bad value or gradient; `edge`: the edge it flowed over, for gradients.
    """

    node: str
    phase: str
    extent: Extent
    edge: Edge | None = None


def origin_of(flow: Flow) -> Origin | None:
    """The first bad node: of what reaches the outputs, else of the gradients, else of any value at all."""
    nodes = {node.name: node for node in flow.variant.graph.nodes}
    return _reaching_origin(flow, nodes) or _gradient_origin(flow, nodes) or _first_new(flow, list(nodes.values()))


def _reaching_origin(flow: Flow, nodes: dict[str, fx.Node]) -> Origin | None:
    """Walk back from bad outputs through bad values; the earliest node whose inputs explain nothing."""
    frontier = [node for node in nodes.values() if node.op == "output"]
    reached: set[fx.Node] = set()
    while frontier:
        node = frontier.pop()
        if node in reached:
            continue
        reached.add(node)
        for given in node.all_input_nodes:
            read = flow.reads.get((given.name, node.name))
            if read is not None and not read.is_finite:
                writer = flow.writers.get((given.name, node.name), "")
                frontier.append(nodes[writer] if writer and not _is_bad(flow, given) else given)
    return _first_new(flow, [node for node in nodes.values() if node in reached])


def _first_new(flow: Flow, among: list[fx.Node]) -> Origin | None:
    for node in among:
        if _is_bad(flow, node) and not _is_meant(flow, node) and _is_new(flow, node):
            phase = {"placeholder": "input", "get_attr": "parameter"}.get(node.op, "forward")
            return Origin(node.name, phase, flow.values[node.name])
    return None


def _is_bad(flow: Flow, node: fx.Node) -> bool:
    extent = flow.values.get(node.name)
    return extent is not None and not extent.is_finite


def _is_new(flow: Flow, node: fx.Node) -> bool:
    """Whether the node made a nan or an inf of inputs that had none of that kind."""
    own = flow.values[node.name]
    reads = [flow.reads.get((given.name, node.name)) for given in node.all_input_nodes]
    if own.nans:
        return not any(read.nans for read in reads if read is not None)
    return not any(read.infs for read in reads if read is not None)


def _is_meant(flow: Flow, node: fx.Node) -> bool:
    """Whether the user wrote the infinity: a fill with a literal inf, or a mask that is an input or a buffer."""
    if flow.values[node.name].nans:
        return False
    if node.op == "placeholder" or (node.op == "get_attr" and ir.mark(node).op == "buffer"):
        return True
    return any(isinstance(part, float) and math.isinf(part) for part in pytree.tree_leaves((node.args, node.kwargs)))


def _gradient_origin(flow: Flow, nodes: dict[str, fx.Node]) -> Origin | None:
    """The first bad edge in backward order whose reader got good gradients: the reader's backward made it."""
    for (given, reader), extent in flow.edges.items():
        if extent.is_finite:
            continue
        if flow.sums.get(reader, extent).is_finite is False and reader in flow.sums:
            if all(found.is_finite for (value, _), found in flow.edges.items() if value == reader):
                return Origin(reader, "sum of gradients", flow.sums[reader])
            continue
        if all(found.is_finite for (value, _), found in flow.edges.items() if value == reader):
            return Origin(reader, "backward", extent, (given, reader))
    bad_sum = next((name for name, extent in flow.sums.items() if not extent.is_finite), None)
    return Origin(bad_sum, "sum of gradients", flow.sums[bad_sum]) if bad_sum is not None else None
