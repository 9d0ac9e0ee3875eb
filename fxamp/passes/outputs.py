"""Keep the results that a caller gets on the way to the others."""

import dataclasses
from typing import ClassVar

import torch
from torch import fx

from fxamp import ir
from fxamp.ir import Reason
from fxamp.passes.alias import Aliases, find_aliases, grad_regions
from fxamp.passes.base import Pass
from fxamp.passes.losses import MOVES
from fxamp.passes.reads import only_converts
from fxamp.passes.verify import casts_minimal, operands_agree, writes_land
from fxamp.runtime import low_loss
from fxamp.value_types import TensorType, converted


@dataclasses.dataclass(frozen=True)
class ConnectOutputs(Pass):
    """What is computed from a low result is computed from the float32 copy of it that the caller gets.

        o = h.to(float32); y = head(h)              # before: autograd.grad(y, o) finds no way from y to o
        o = h.to(float32); y = head(o.to(low))      # after: the same numbers

    Attribution (gradients of a score with respect to returned attention maps or hidden states), StyleGAN2's path
    lengths and `output.retain_grad()` ask for it.

    Where a value is read in float32, at once or after moves, the copy is read or moved instead, and a cast is saved.

    1. Only where gradients flow: a frozen model's graph is as it was.
    2. A result that somebody writes into afterwards stays a copy, and so does one inside a checkpointed region.
    3. A loss that reads low logits (see fxamp.passes.losses) goes on to read them past the copy: a pass over the
       largest tensor of a language model is more than what this is for.
    """

    ensures: ClassVar = (operands_agree, casts_minimal, writes_land)
    low: torch.dtype

    def apply(self, graph: fx.Graph) -> bool:
        aliases, regions = find_aliases(graph), grad_regions(graph)
        (output,) = graph.find_nodes(op="output")
        changed = False
        for cast in output.all_input_nodes:
            if cast in output.all_input_nodes and _is_copy(cast):  # one before it may have left it out
                changed |= self._connect(graph, cast, aliases, regions)
        return changed

    def _connect(self, graph: fx.Graph, copy: fx.Node, aliases: Aliases, regions: dict[fx.Node, int]) -> bool:
        value = copy.all_input_nodes[0]
        readers = [user for user in value.users if user is not copy and ir.has_gradient(user) and not _is_loss(user)]
        keepers = [user for user in value.users if ir.mark(user).op == "retain_grad"]
        if not (readers or keepers) or _is_written_after(value, aliases) or ir.REGION in value.meta:
            return False
        if any(regions[node] != regions[value] for node in (copy, *readers, *keepers) if node.op != "output"):
            return False
        value.append(copy)
        copy.meta[ir.RESULT] = True
        for keeper in keepers:  # forward's own `h.retain_grad()` is for who gets h
            keeper.replace_input_with(value, copy)
        narrow = [reader for reader in readers if not _move_wide(graph, reader, copy, aliases)]
        if not narrow:
            return True
        with graph.inserting_after(copy):
            low = graph.call_method("to", (copy, self.low))
        ir.keep_place(low, value)
        reason = Reason("cast", f"{value.name} is a result too: the others are computed from what the caller gets")
        ir.set_mark(
            low, op="to", type=ir.mark(value).type, colour="clear", precision="low", reason=reason, role="cast",
            serves=value.name,
        )  # fmt: skip
        for reader in narrow:
            reader.replace_input_with(value, low)
        return True


def _is_loss(reader: fx.Node) -> bool:
    """Whether all that is made of a value is a loss that reads it low."""
    if reader.target is low_loss.cross_entropy:
        return True
    followers = [user for user in reader.users if ir.has_gradient(user)]  # others ask for its device or sizes
    return ir.mark(reader).op in MOVES and bool(followers) and all(map(_is_loss, followers))


def _move_wide(graph: fx.Graph, reader: fx.Node, copy: fx.Node, aliases: Aliases) -> bool:
    """Let moves that end in casts up read the float32 copy, and leave the casts out; False where they do not."""
    value = copy.all_input_nodes[0]
    if ir.mark(reader).role and _is_up(reader):  # a cast of ours that gives what the copy is
        reader.replace_all_uses_with(copy)
        graph.erase_node(reader)
        return True
    if only_converts(reader, torch.float32):
        reader.replace_input_with(value, copy)
        return True
    moves: list[fx.Node] = [reader]
    ends: list[fx.Node] = []
    for move in moves:
        followers = [user for user in move.users if ir.has_gradient(user)]
        if ir.mark(move).op not in MOVES or move in aliases.storage_of or ir.REGION in move.meta or not followers:
            return False
        for user in followers:
            (ends if _is_up(user) else moves).append(user)
    reader.replace_input_with(value, copy)
    for move in moves:
        kind = converted(ir.mark(move).type, torch.float32)
        reason = Reason("absorbed", f"it moves {copy.name}, which the caller gets in float32", copy.name)
        ir.set_mark(move, type=kind, precision="high", reason=reason)
    for end in dict.fromkeys(ends):
        if ir.mark(end).role:  # the user's own stay, and have nothing to do
            end.replace_all_uses_with(end.all_input_nodes[0])
            graph.erase_node(end)
    return True


def _is_up(node: fx.Node) -> bool:
    """A cast to float32, ours or the user's."""
    is_ours = ir.mark(node).role == "cast" and node.target == "to" and ir.dtype_of(node) == torch.float32
    return is_ours or only_converts(node, torch.float32)


def _is_copy(node: fx.Node) -> bool:
    """Whether a result is the float32 copy, ours or the user's, of one low tensor through which gradients flow."""
    if not _is_up(node):
        return False
    value = node.all_input_nodes[0]
    kind = ir.mark(value).type
    return ir.mark(value).precision == "low" and isinstance(kind, TensorType) and kind.requires_grad


def _is_written_after(value: fx.Node, aliases: Aliases) -> bool:
    storage = aliases.storage_of.get(value)
    return storage is not None and any(aliases.order[writer] > aliases.order[value] for writer in storage.writers)
