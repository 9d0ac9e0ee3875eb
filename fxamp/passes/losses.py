"""Let cross entropy read low logits, where the device has a kernel that does."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import fx
from torch.nn import functional

from fxamp import ir
from fxamp.capability import conversions_inside
from fxamp.dtypes import dtype_name
from fxamp.ir import Reason
from fxamp.passes.alias import Aliases, find_aliases, grad_regions
from fxamp.passes.base import Pass
from fxamp.passes.reads import only_converts
from fxamp.passes.verify import casts_minimal, operands_agree
from fxamp.runtime import low_loss
from fxamp.value_types import converted

# What models put between logits and loss: the numbers stay what they are, in another order or shape.
MOVES = frozenset("contiguous flatten getitem movedim permute reshape squeeze transpose unsqueeze view".split())
_QUESTIONS = frozenset("dim numel size".split())


@dataclasses.dataclass(frozen=True)
class ReadLogitsLow(Pass):
    """A loss reads the low logits that were cast up for it; torch's own cross entropy is these two ops, too.

        y = logits.to(float32); loss = cross_entropy(y.view(-1, C), target)
        loss = nll_loss(log_softmax(logits.view(-1, C), 1, dtype=float32), target)

    The cast, and the cast of the gradient, are each a pass over the largest tensors that language models have.

    1. The values and their gradients are the same; where the graph sends the logits another gradient as well, the two
       would be added in low precision, so then nothing changes. (One that the caller sends through logits that the
       model returns is added so, as under autocast.)
    2. Only where the device's log_softmax reads the low dtype by itself; elsewhere torch casts all the same.
    3. What stands between the cast and the loss moves numbers only, each of them once (gradients of one that is picked
       twice would be added low); nothing there is written in place, and all of it is in one gradient mode and one
       checkpointed region.
    """

    ensures: ClassVar = (operands_agree, casts_minimal)
    low: torch.dtype
    device: str

    def apply(self, graph: fx.Graph) -> bool:
        losses = [node for node in graph.nodes if _is_loss(node)]
        if not losses or conversions_inside("log_softmax", self.low, self.device):
            return False
        written, modes = find_aliases(graph), grad_regions(graph)
        places = {node: (modes[node], node.meta.get(ir.REGION)) for node in graph.nodes}
        changed = [self._read_low(graph, loss, written, places) for loss in losses]
        return any(changed)

    def _read_low(self, graph: fx.Graph, loss: fx.Node, written: Aliases, places: Mapping[fx.Node, object]) -> bool:
        path = self._path_from_low(ir.argument_of(loss, 0, "input"))
        if path is None or any(places[node] != places[loss] for node in path):
            return False
        if any(written.epoch(node, path[0]) != written.epoch(node, loss) for node in (*path[0].all_input_nodes, *path)):
            return False
        others = [user for node in path for user in node.users if user not in (*path, loss)]
        if not all(map(_carries_no_gradient, others)):
            return False
        twin = path[0].all_input_nodes[0]
        for node in path:
            twin = twin if node is path[0] else self._moved_low(graph, node, twin, loss)
            for user in filter(_asks_only, list(node.users)):
                user.replace_input_with(node, twin)
        modes = tuple((at, name, "any" if (at, name) == (0, "") else mode) for at, name, mode in ir.mark(loss).modes)
        loss.args = (twin, *loss.args[1:])
        loss.target = low_loss.cross_entropy
        reason = ir.mark(loss).reason
        text = f"{reason.text}; its log-softmax reads {dtype_name(self.low)} and computes in float32"
        ir.set_mark(loss, modes=modes, reason=dataclasses.replace(reason, text=text))
        for node in reversed(path):
            if not node.users:
                graph.erase_node(node)
        return True

    def _moved_low(self, graph: fx.Graph, move: fx.Node, low: fx.Node, loss: fx.Node) -> fx.Node:
        """The same move of the low value."""
        with graph.inserting_before(move):
            moved = graph.node_copy(move, lambda given: low if given is move.args[0] else given)
        kind = converted(ir.mark(move).type, self.low)
        reason = Reason("absorbed", f"{loss.name} reads low logits", loss.name)
        ir.set_mark(moved, type=kind, precision="low", reason=reason)
        return moved

    def _path_from_low(self, logits: object) -> list[fx.Node] | None:
        """The conversion of a low value, and the moves behind it up to the logits; None where there is none."""
        path: list[fx.Node] = []
        node = logits
        while isinstance(node, fx.Node) and node.args:
            path.insert(0, node)
            if self._is_conversion_up(node):
                return path
            if ir.mark(node).op not in MOVES or not ir.is_tensor(node) or ir.mark(node).precision != "high":
                return None
            if _may_repeat(node):
                return None
            node = node.args[0]
        return None

    def _is_conversion_up(self, node: fx.Node) -> bool:
        """A cast, ours or `x.float()` of the user's, whose argument is low."""
        is_cast = ir.mark(node).role == "cast" or only_converts(node, torch.float32)
        return is_cast and ir.dtype_of(node.args[0]) == self.low and ir.dtype_of(node) == torch.float32


def _is_loss(node: fx.Node) -> bool:
    """Cross entropy against class indices, as torch.nn.functional has it."""
    if node.target is not functional.cross_entropy or not node.args:
        return False
    target = ir.argument_of(node, 1, "target")
    indices = ir.dtype_of(target)
    return (
        ir.mark(node).precision == "high"
        and indices is not None
        and not indices.is_floating_point
        and ir.argument_of(node, 7, "label_smoothing", 0.0) == 0.0
    )


def _may_repeat(move: fx.Node) -> bool:
    """Whether a move picks rows by their numbers, some perhaps twice; slices and masks pick none twice."""
    if ir.mark(move).op != "getitem":
        return False
    index = move.args[1] if isinstance(move.args[1], tuple) else move.args[1:]
    numbers = [given for given in ir.nodes_in(index) if ir.is_tuple(given) or ir.is_tensor(given)]
    return any(isinstance(item, list) for item in index) or any(ir.dtype_of(each) != torch.bool for each in numbers)


def _asks_only(reader: fx.Node) -> bool:
    """Whether a reader asks what every precision answers in the same way."""
    op = ir.mark(reader).op
    return op in _QUESTIONS or (op == "getattr" and reader.args[1] in ("device", "ndim", "shape"))


def _carries_no_gradient(reader: fx.Node) -> bool:
    """Whether no gradient comes back from a reader, as far as the graph goes: it is the model's result."""
    if reader.op == "output" or not ir.has_gradient(reader):
        return True
    return ir.mark(reader).op in MOVES and all(map(_carries_no_gradient, reader.users))
