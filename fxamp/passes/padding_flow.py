"""How far padding travels: which values of a graph stay padded between GEMMs, and where it must be sliced off.

An analysis, it changes nothing. A planned GEMM gives a padded value; every op that can keep the padding may pass it
on; and it is passed on only towards a GEMM, or a loss, that reads it padded. Everything else reads the slice.
"""

import dataclasses
from collections.abc import Mapping

from torch import fx

from fxamp import ir
from fxamp.passes.alias import Aliases, Storage
from fxamp.passes.gemm_types import Gemm, GemmDim, Place
from fxamp.passes.padding_keep import Known, asks_only, keep, reads_masked
from fxamp.passes.padding_values import Kept, Padding, is_parameter
from fxamp.passes.recurrent_gemms import Recurrent, item_of


@dataclasses.dataclass(frozen=True)
class Planned:
    """A GEMM that is to be padded; `extras` are the elements to add, one number for each of its dims."""

    gemm: Gemm
    extras: tuple[int, ...]

    @property
    def dims(self) -> list[tuple[GemmDim, int]]:
        """The dimensions that grow, with the elements they grow by."""
        return [(dim, extra) for dim, extra in zip(self.gemm.dims, self.extras, strict=True) if extra]

    @property
    def out(self) -> tuple[int, int] | None:
        """(dimension of the result, elements it grows by)."""
        return next(((dim.out, extra) for dim, extra in self.dims if dim.out is not None), None)

    def wants(self, position: int, keyword: str) -> dict[int, int]:
        """Dimension -> elements that one argument grows by."""
        return {
            place.dim: extra
            for dim, extra in self.dims
            for place in dim.places
            if is_argument(self.gemm.node, place, position, keyword)
        }


Plan = Mapping[fx.Node, Planned]


def is_argument(node: fx.Node, place: Place, position: int, keyword: str) -> bool:
    """Whether a place stands in the argument given by position or keyword."""
    if place.keyword and place.keyword in node.kwargs:
        return keyword == place.keyword
    return position == place.position and not keyword


@dataclasses.dataclass(frozen=True)
class Flow:
    """What padding every value has in the planned graph.

    Attributes:
        paddings: of each value that is padded.
        kept: the ops that pass padding on, and how.
        masked: the GEMMs whose padding holds the lowest number, for a loss.
        refused: (value, reader) -> why the reader gets the slice.
        blocked: GEMMs whose N cannot be padded, and why.
    """

    paddings: Mapping[fx.Node, Padding]
    kept: Mapping[fx.Node, Kept]
    masked: frozenset[fx.Node]
    refused: Mapping[tuple[fx.Node, fx.Node], str]
    blocked: Mapping[fx.Node, str]


def follow(graph: fx.Graph, plan: Plan, known: Known, aliases: Aliases) -> Flow:
    """The flow of padding for a plan."""
    blocked: set[fx.Node] = set()
    while True:
        masked = _masked(graph, plan, known, blocked)
        flow = _settle(_spread(graph, plan, known, masked, blocked), plan, aliases)
        broken = [storage for storage in aliases.storages if _is_mixed(storage, flow.paddings)]
        if not broken:
            why = "its result is written in place through a view, or by an op that would see the padding"
            named = {node: why for node in graph.nodes if node in blocked and node in plan}
            return dataclasses.replace(flow, blocked=named)
        for node in (node for storage in broken for node in storage.nodes):
            taken = item_of(node)
            blocked.update((node, taken[0]) if taken is not None and taken[0] in plan else (node,))


def is_read_padded(value: fx.Node, reader: fx.Node, padding: Padding, plan: Plan) -> bool:
    """Whether a reader takes this padded value as it is: a GEMM padded to the same size, or a loss."""
    if reads_masked(reader, value, padding):
        return True
    planned = plan.get(reader)
    if planned is None or padding.masked:
        return False
    reads = [operand for operand in ir.arguments(reader) if operand.value is value]
    return len(reads) == 1 and fits(planned, reads[0], padding)


def reads_as_it_is(value: fx.Node, reader: fx.Node, flow: Flow, plan: Plan) -> bool:
    """Whether a reader needs no slice of a padded value."""
    padding = flow.paddings[value]
    return reader in flow.kept or is_read_padded(value, reader, padding, plan) or asks_only(reader, {value: padding})


def is_cast_of_part(value: fx.Node, reader: fx.Node, flow: Flow) -> bool:
    """Whether a reader is a cast of ours that can read a padded value and give the model's own part of it."""
    is_cast = reader.target == "to" and ir.mark(reader).role == "cast" and len(reader.args) == 2
    return is_cast and flow.paddings[value].blocks == 1


def fits(planned: Planned, operand: ir.Operand, padding: Padding) -> bool:
    """Whether a padded operand is what the GEMM wants; a product of two paddings must be zero."""
    if planned.wants(operand.position, operand.keyword).get(padding.dim) != padding.extra or padding.blocks > 1:
        return False
    node = planned.gemm.node
    partners = [
        ir.argument_of(node, place.position, place.keyword)
        for dim, _ in planned.dims
        for place in dim.places
        if any(is_argument(node, other, operand.position, operand.keyword) for other in dim.places)
        and not is_argument(node, place, operand.position, operand.keyword)
    ]
    return padding.content == 0.0 or (bool(partners) and all(map(is_parameter, partners)))


def can_mask(node: fx.Node) -> bool:
    """Whether a GEMM has a bias that can hold the lowest number."""
    return ir.mark(node).op in ("linear", "conv1d", "conv2d", "conv3d") and "bias" not in node.kwargs


# ------------------------------------------------------------------------------------------------ forwards


def _spread(graph: fx.Graph, plan: Plan, known: Known, masked: frozenset[fx.Node], blocked: set[fx.Node]) -> Flow:
    """The flow if every op that can keep the padding does."""
    paddings: dict[fx.Node, Padding] = {}
    kept: dict[fx.Node, Kept] = {}
    refused: dict[tuple[fx.Node, fx.Node], str] = {}
    for node in graph.nodes:
        given = {value: paddings[value] for value in node.all_input_nodes if value in paddings}
        if node in plan:
            out = plan[node].out
            if out is not None and node not in blocked and not ir.is_tuple(node):
                paddings[node] = Padding(*out, masked=node in masked)
        elif node not in blocked and (padding := _item_padding(node, plan)) is not None:
            kept[node], paddings[node] = Kept(padding), padding
        elif given and not asks_only(node, given):
            answer = "it is written in place elsewhere" if node in blocked else keep(node, given, known)
            if isinstance(answer, Kept):
                kept[node], paddings[node] = answer, answer.padding
            else:
                refused.update({(value, node): answer for value in given})
    return Flow(paddings, kept, masked, refused, {})


def _item_padding(node: fx.Node, plan: Plan) -> Padding | None:
    """The padding of one result of a recurrent call; None for anything else."""
    taken = item_of(node)
    planned = plan.get(taken[0]) if taken is not None else None
    if taken is None or planned is None or not isinstance(planned.gemm, Recurrent):
        return None
    extra, blocks = planned.gemm.result(taken[1], planned.extras)
    return Padding(len(ir.shape_of(node) or ()) - 1, extra, blocks=blocks) if extra else None


def results_of(node: fx.Node, flow: Flow) -> list[fx.Node]:
    """The padded values a GEMM gives: itself, or what is taken from its tuple."""
    return [value for value in (node, *(node.users if ir.is_tuple(node) else ())) if value in flow.paddings]


def _masked(graph: fx.Graph, plan: Plan, known: Known, blocked: set[fx.Node]) -> frozenset[fx.Node]:
    """The GEMMs whose padded result reaches a loss that can read it masked."""
    able = frozenset(node for node in plan if can_mask(node))
    flow = _spread(graph, plan, known, able, blocked)
    wanted: set[fx.Node] = set()
    for value, padding in flow.paddings.items():
        if padding.masked and any(reads_masked(user, value, padding) for user in value.users):
            _want(value, flow, wanted, {})
    return frozenset(node for node in able if node in wanted)


# ----------------------------------------------------------------------------------------------- backwards


def _settle(flow: Flow, plan: Plan, aliases: Aliases) -> Flow:
    """The flow with only what somebody downstream reads padded; a written storage is padded as a whole."""
    wanted: set[fx.Node] = set()
    for value, padding in flow.paddings.items():
        is_made_padded = value in plan or _item_padding(value, plan) is not None
        if is_made_padded or any(is_read_padded(value, user, padding, plan) for user in value.users):
            _want(value, flow, wanted, aliases.storage_of)
    refused = dict(flow.refused)
    for value in wanted:
        for user in value.users:
            if user in flow.kept and user not in wanted:
                refused[value, user] = "nothing behind it reads the padding"
    return dataclasses.replace(
        flow,
        paddings={node: padding for node, padding in flow.paddings.items() if node in wanted},
        kept={node: how for node, how in flow.kept.items() if node in wanted},
        refused={(value, user): why for (value, user), why in refused.items() if value in wanted},
    )


def _want(value: fx.Node, flow: Flow, wanted: set[fx.Node], storages: Mapping[fx.Node, Storage]) -> None:
    stack = [value]
    while stack:
        node = stack.pop()
        if node in wanted or node not in flow.paddings:
            continue
        wanted.add(node)
        if node in flow.kept:
            stack += node.all_input_nodes
        if node in storages:
            stack += storages[node].nodes


def _is_mixed(storage: Storage, paddings: Mapping[fx.Node, Padding]) -> bool:
    padded = sum(node in paddings for node in storage.nodes)
    return 0 < padded < len(storage.nodes)
