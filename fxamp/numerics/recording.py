"""One run of a call with all that it computes: each node's value as the node made it, and its gradient."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.inplace import mutated
from fxamp.numerics.extent import storage_of
from fxamp.numerics.flow import CallFlow
from fxamp.numerics.kept import state_kept
from fxamp.numerics.losses import floats_in, gradients_of, loss_of
from fxamp.numerics.run import Call, Rewriter, run
from fxamp.numerics.runner import Identity, Part
from fxamp.numerics.watcher import CallWatcher

Key = tuple[Identity, str]
"""(the graph's turn, the node's name)"""
Values = dict[Key, list[torch.Tensor]]


@dataclasses.dataclass
class Recorded:
    """One run: values and gradients by node, the outputs, and the loss; `parts` are the graphs that ran.

    Attributes:
        values: of an op that writes in place and returns nothing, what it has written.
        writers: (value, its reader) -> the op that wrote the value's memory last before it was read.
        flow: what was not zero, where; None where that was not asked for.
        weight_gradients: of each parameter that is trained, by path, None where it has none; empty without a loss.
    """

    parts: dict[int, Part]
    values: Values
    gradients: Values
    outputs: list[torch.Tensor]
    loss: float | None
    writers: dict[tuple[Key, str], str]
    flow: CallFlow | None = None
    weight_gradients: dict[str, torch.Tensor | None] = dataclasses.field(default_factory=dict)


def record(
    call: Call,
    rewritten: Rewriter | None,
    loss_fn: Callable[[Any], torch.Tensor] | None,
    scale: float = 1.0,
    as_float32: bool = False,
    counting: bool = False,
) -> Recorded:
    """Run one call and keep what it computes; `counting` also what is not zero, on every edge."""
    watcher = CallWatcher(call.weights, with_gradients=loss_fn is not None, counting=True) if counting else None
    keeper = _Keeper(is_left_alone=call.variant is not None)
    kept = Recorded({}, keeper.values, {}, [], None, keeper.writers, watcher.flow if watcher else None)

    def see(part: Part, node: fx.Node, value: Any) -> Any:
        if watcher is not None:
            watcher.see(part, node, value)
        is_own = node.op not in ("placeholder", "get_attr") and not ir.mark(node).role
        keeper.see(_key(part, node), value, is_own)
        if is_own:
            kept.parts[part.number] = part
            if loss_fn is not None:
                for tensor in floats_in(value)[:1]:
                    _keep_gradient(tensor, _key(part, node), kept.gradients, scale)
        return value

    def edge(part: Part, given: fx.Node, reader: fx.Node, value: Any) -> Any:
        keeper.before(_key(part, given), reader, value)
        return value if watcher is None else watcher.edge(part, given, reader, value)

    with state_kept(call.model, call.weights), torch.set_grad_enabled(loss_fn is not None or call.needs_gradients):
        output = run(call, see, edge, rewritten, as_float32)
        kept.outputs = [tensor.detach() for tensor in floats_in(output)]
        if loss_fn is not None:
            loss = loss_of(output, loss_fn)
            kept.loss = float(loss.detach())
            kept.weight_gradients = _weight_gradients(loss * scale, call.weights, scale)
    return kept


class _Keeper:
    """Keeps the values themselves, and copies of those alone whose memory is about to be written.

    Args:
        is_left_alone: nothing but the graph writes its values; code between two graphs may.
    """

    def __init__(self, is_left_alone: bool) -> None:
        self.is_left_alone = is_left_alone
        self.values: Values = {}
        self.writers: dict[tuple[Key, str], str] = {}
        self._sharing: dict[StorageWeakRef, list[Key]] = {}
        self._copied: set[Key] = set()
        self._writer_of: dict[Key, str] = {}
        self._written: list[torch.Tensor] = []

    def see(self, key: Key, value: Any, is_own: bool) -> None:
        """A node has given its value; values of the model's own nodes are kept."""
        tensors = floats_in(value) or [tensor for tensor in self._written if tensor.is_floating_point()]
        self._written = []
        if is_own:
            self.values[key] = [tensor.detach() for tensor in tensors]
        for storage in _storages(tensors):
            self._sharing.setdefault(storage, []).append(key)

    def before(self, key: Key, reader: fx.Node, value: Any) -> None:
        """A node is about to read a value, and perhaps to write it."""
        if key in self._writer_of:
            self.writers[key, reader.name] = self._writer_of[key]
        if any(key[1] == written.name for written in mutated(reader)):
            self._written += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            for sharing in self._sharing_with(self._written):
                self._copy(sharing)
                self._writer_of[sharing] = reader.name
        elif reader.op == "output" and not self.is_left_alone:
            for sharing in self._sharing_with(floats_in(value)):
                self._copy(sharing)

    def _sharing_with(self, tensors: list[torch.Tensor]) -> Iterator[Key]:
        for storage in _storages(tensors):
            yield from self._sharing.get(storage, ())

    def _copy(self, key: Key) -> None:
        if key in self.values and key not in self._copied:
            self._copied.add(key)
            self.values[key] = [tensor.clone() for tensor in self.values[key]]


def _storages(tensors: Iterable[torch.Tensor]) -> Iterable[StorageWeakRef]:
    return dict.fromkeys(map(storage_of, tensors))


def _key(part: Part, node: fx.Node) -> Key:
    return part.identity, node.name


def _keep_gradient(tensor: torch.Tensor, key: Key, kept: Values, scale: float) -> None:
    def keep(gradient: torch.Tensor) -> None:
        kept[key] = [gradient.detach().float() * (1 / scale)]  # torch divides no compressed rows

    if tensor.requires_grad:
        tensor.register_hook(keep)  # type: ignore[no-untyped-call]


def _weight_gradients(loss: torch.Tensor, model: nn.Module, scale: float) -> dict[str, torch.Tensor | None]:
    """Backward to the parameters, whose `.grad` is left as it is; sparse gradients come dense."""
    wanted = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not (loss.requires_grad and wanted):
        return {}
    gradients = gradients_of(loss, list(wanted.values()))
    return {name: _unscaled(gradient, scale) for name, gradient in zip(wanted, gradients, strict=True)}


def _unscaled(gradient: torch.Tensor | None, scale: float) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().to_dense().float() / scale
