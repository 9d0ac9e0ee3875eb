"""Where values and gradients stop being finite: one call, watched on every edge of its graphs, forward and backward."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.inplace import mutated
from fxamp.lists import TRAITS
from fxamp.numerics.around import Around
from fxamp.numerics.extent import extent_of, extent_of_all, numbers_in, storage_of
from fxamp.numerics.flow import CallFlow, Edge, Flow
from fxamp.numerics.kept import state_kept
from fxamp.numerics.losses import floats_in, gradients_of, loss_of
from fxamp.numerics.run import Call, Rewriter, run, takes_derivative
from fxamp.numerics.runner import Part
from fxamp.numerics.twin import given_to, takes_part
from fxamp.sparse import held, is_sparse


def watch_flow(
    call: Call,
    loss_fn: Callable[[Any], torch.Tensor] | None,
    rewritten: Rewriter | None = None,
    as_float32: bool = False,
    counting: bool = False,
) -> CallFlow:
    """Run a call once, with its backward where there is a loss function, and note every extent."""
    watcher = CallWatcher(call.weights, with_gradients=loss_fn is not None, counting=counting)
    flow = watcher.flow
    flow.inputs = [extent_of(tensor) for tensor in floats_in((call.args, call.kwargs))]
    around = watcher.around = Around(flow, loss_fn is not None) if call.turns is not None else None
    with state_kept(call.model), torch.set_grad_enabled(loss_fn is not None or call.needs_gradients):
        try:
            with around or contextlib.nullcontext():
                output = run(call, watcher.see, watcher.edge, rewritten, as_float32)
        except Exception as error:
            if not flow.has_bad_values:
                raise
            flow.error = error
            return flow
        flow.outputs = [extent_of(tensor) for tensor in floats_in(output)]
        if around is not None:
            around.gives(output)
        if loss_fn is not None:
            for tensor in floats_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: flow.came.append(extent_of(gradient)))  # type: ignore[no-untyped-call]
            _watch_backward(call, flow, loss_of(output, loss_fn))
    return flow


def _watch_backward(call: Call, flow: CallFlow, loss: torch.Tensor) -> None:
    flow.loss = extent_of(loss)
    inputs = pytree.tree_leaves((call.args, call.kwargs, call.inputs))
    tensors = {id(given): ("an input", given) for given in inputs if isinstance(given, torch.Tensor)}
    tensors |= {id(weight): (name, weight) for name, weight in call.model.named_parameters()}
    wanted = [(name, tensor) for name, tensor in tensors.values() if tensor.requires_grad]
    if loss.requires_grad and wanted:
        gradients = gradients_of(loss, [tensor for _, tensor in wanted])
        for (name, _), gradient in zip(wanted, gradients, strict=True):
            flow.gradients |= {name: extent_of_all(found)} if (found := floats_in(gradient)) else {}


class CallWatcher:
    """What the runners of one call use: a watcher for each graph's turn.

    Args:
        weights: the module whose parameters are read.
        with_gradients: a backward will run: put probes on the edges.
        counting: also count the elements that are not zero.
    """

    def __init__(self, weights: nn.Module, with_gradients: bool, counting: bool = False) -> None:
        self.flow = CallFlow()
        self.weights = weights
        self.with_gradients = with_gradients
        self.counting = counting
        self.watchers: dict[int, Watcher] = {}
        self.around: Around | None = None

    def see(self, part: Part, node: fx.Node, value: Any) -> Any:
        if self.around is not None and node.op == "placeholder":
            self.around.arrives((part.number, node.name), value)
        return self._of(part).see(node, value)

    def edge(self, part: Part, given: fx.Node, reader: fx.Node, value: Any) -> Any:
        return self._of(part).edge(given, reader, value)

    def _of(self, part: Part) -> "Watcher":
        if part.number not in self.watchers:
            self.flow.parts.append(Flow(part))
            root = part.root(self.weights)
            self.watchers[part.number] = Watcher(self.flow.parts[-1], root, self.with_gradients, self.counting)
        return self.watchers[part.number]


class Watcher:
    """What a `Runner` calls while it runs: notes extents, and puts a probe on every edge that carries a gradient.

    A probe is a view, and autograd lets no view of a custom function be written in place: edges on which a value
    comes to an in-place op have none, and their gradient is that of the whole value before it was written. Nor have
    those to a call of torch.autograd.grad: it asks for the value that others read, not for a view of it. What is
    returned has a plain view's hook instead: the caller may write it in place.
    """

    def __init__(self, flow: Flow, root: nn.Module, with_gradients: bool, counting: bool = False) -> None:
        self.flow = flow
        self.root = root
        self.counting = counting
        nodes = list(flow.variant.graph.nodes)
        written = [value for node in nodes for value in mutated(node)]
        self.is_written = any(not ir.is_weight(value) or len(value.users) > 1 for value in written)
        self.unprobed = _unprobed(nodes) | {
            (given.name, node.name) for node in nodes if takes_derivative(node) for given in node.all_input_nodes
        }
        self.with_gradients = with_gradients
        self.writer_of: dict[StorageWeakRef, str] = {}
        self.written: list[torch.Tensor] = []
        self.readers = {node.name: [user.name for user in node.users] for node in nodes}

    def see(self, node: fx.Node, value: Any) -> Any:
        if ir.mark(node).op == "packed_cast":
            return value  # each of its parts is looked at where it is taken
        tensors = numbers_in(value)
        written = self._written_by(node, tensors)
        if tensors and self.counting:
            self.flow.counts[node.name] = [nonzero(tensor) for tensor in tensors]
        if tensors or written:
            self.flow.values[node.name] = found = extent_of_all([*tensors, *written])
            if node.op == "call_module" and not found.is_finite:
                self._note_held(node)
        if self.with_gradients and isinstance(value, torch.Tensor) and value.requires_grad:
            self._watch_sum(node, value)
        return value

    def _note_held(self, node: fx.Node) -> None:
        """Which number of a module's own is not finite; a boundary's are for its own graph to tell."""
        module = self.root.get_submodule(str(node.target))
        if any(ir.ENGINE in part.__dict__ for part in module.modules()):
            return
        for path, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_floating_point() and not _is_only_written(module, path):
                found = extent_of(tensor)
                if not found.is_finite:
                    self.flow.held[node.name] = f"{node.target}.{path}", found
                    return

    def _written_by(self, node: fx.Node, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the node has written, each memory once, and what it gives; it is noted as their writer."""
        if not self.is_written or not mutated(node):
            return []
        found = {storage_of(tensor): tensor for tensor in (*self.written, *given)}
        for storage in found:
            if (before := self.writer_of.get(storage)) is not None:
                self.flow.earlier[node.name] = before
            self.writer_of[storage] = node.name
        self.written = []
        return list(found.values())

    def edge(self, given: fx.Node, reader: fx.Node, value: Any) -> Any:
        self._note_read(given, reader, value)
        if self.is_written and given in mutated(reader):
            self.written += numbers_in(value)
        if not self.with_gradients or (given.name, reader.name) in self.unprobed:
            return value
        edge = (self.flow.writers.get((given.name, reader.name), given.name), reader.name)
        if type(value) in (tuple, list):  # the parts of a split, or of a bucket of weights
            return type(value)(self._probed(edge, part) for part in value)
        return self._returned(edge, given, value) if reader.op == "output" else self._probed(edge, value)

    def _returned(self, edge: Edge, given: fx.Node, value: Any) -> Any:
        """A view that the caller may write in place.

        That takes its hook away, and those of the views it is of; then all their gradients are told by what they are
        views of, before it was written.
        """
        if not _has_gradient(value) or is_sparse(value):
            return self._probed(edge, value)
        view, seen, version = value.view_as(value), value.detach(), value._version
        views = list(_view_edges(given))

        def note_written(gradient: torch.Tensor) -> None:
            for lost in (edge, *views) if seen._version != version else ():
                if lost not in self.flow.edges:
                    self._note(lost, gradient)

        view.register_hook(lambda gradient: self._note(edge, gradient))
        (value if value._base is None else value._base).register_hook(note_written)
        return view

    def _probed(self, edge: Edge, value: Any) -> Any:
        if not _has_gradient(value):
            return value
        return _Probe.apply(value, lambda gradient: self._note(edge, gradient))  # type: ignore[no-untyped-call]

    def _note_read(self, given: fx.Node, reader: fx.Node, value: Any) -> None:
        tensors, edge = numbers_in(value), (given.name, reader.name)
        if not tensors:
            return
        if takes_part(reader):
            weight = given_to(reader).name
            self.flow.reads[weight, reader.name] = self.flow.reads[weight, given.name]
            return
        self.flow.reads[edge] = extent_of_all(tensors) if self.is_written else self.flow.values[given.name]
        writer = self.writer_of.get(storage_of(tensors[0]))
        if writer is not None and writer != given.name:
            self.flow.writers[edge] = writer

    def _note(self, edge: Edge, gradient: torch.Tensor) -> None:
        found = extent_of(gradient)
        if edge not in self.flow.edges or not found.is_finite:
            self.flow.edges[edge] = found
        if self.counting:
            self.flow.edge_counts[edge] = self.flow.edge_counts.get(edge, 0) + nonzero(gradient)

    def _watch_sum(self, node: fx.Node, value: torch.Tensor) -> None:
        readers = self.readers[node.name]
        unprobed = [reader for reader in readers if (node.name, reader) in self.unprobed]
        if len(readers) < 2 and not unprobed:
            return

        def note(gradient: torch.Tensor) -> None:
            found = extent_of(gradient)
            if len(readers) > 1:
                self.flow.sums[node.name] = found
            for reader in unprobed:
                self.flow.edges.setdefault((node.name, reader), found)
            if self.counting:
                self.flow.sum_counts[node.name] = nonzero(gradient)

        value.register_hook(note)  # type: ignore[no-untyped-call]


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_floating_point()


def _unprobed(nodes: list[fx.Node]) -> frozenset[Edge]:
    """Edges on which a value, or a view of it, comes to an op that writes it, or on which a view of it is returned."""
    found: set[Edge] = set()
    frontier = [(written, node) for node in nodes for written in mutated(node)]
    returned = (value for node in nodes if node.op == "output" for value in node.all_input_nodes)
    views = {edge for value in returned for edge in _view_edges(value)}
    while frontier:
        written, reader = frontier.pop()
        if (written.name, reader.name) not in found:
            found.add((written.name, reader.name))
            if _may_be_view(written) or mutated(written):
                frontier += [(given, written) for given in written.all_input_nodes]
    return frozenset(found | views)


def _view_edges(node: fx.Node) -> Iterator[Edge]:
    """Edges over which a value is a view of others, the last first."""
    while node.all_input_nodes and _may_be_view(node):
        yield node.all_input_nodes[0].name, node.name
        node = node.all_input_nodes[0]


def _may_be_view(node: fx.Node) -> bool:
    """Every view is on the clear list; the graph of the fp32 run, in which all is denied, does not say so."""
    mark = ir.mark(node)
    return mark.colour == "clear" or mark.op in TRAITS["view"]


def _is_only_written(module: nn.Module, path: str) -> bool:
    """Whether it is a running statistic of a norm that trains: its forward does not read those."""
    parent, _, name = path.rpartition(".")
    owner = module.get_submodule(parent)
    return isinstance(owner, _NormBase) and owner.training and name in ("running_mean", "running_var")


def nonzero(tensor: torch.Tensor) -> int:
    """How many elements are not zero."""
    return int(held(tensor).count_nonzero())


class _Probe(torch.autograd.Function):
    """The identity, which shows the gradient that flows back through it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, note: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.note = note
        return value.clone() if is_sparse(value) else value.view_as(value)  # torch has no view of a sparse one

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.note(gradient)
        return gradient, None
