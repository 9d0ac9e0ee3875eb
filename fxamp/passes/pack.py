"""Cast weights bucket by bucket: one multi-tensor copy instead of one kernel each."""

import dataclasses
import operator
from collections import defaultdict
from typing import Any, ClassVar, Literal

from torch import fx
from torch.nn import functional

from fxamp import ir
from fxamp.errors import InvariantError
from fxamp.inplace import mutated
from fxamp.ir import Reason
from fxamp.passes.alias import Aliases, find_aliases, grad_modes, grad_regions
from fxamp.passes.base import Pass
from fxamp.passes.costs import GATHERS
from fxamp.passes.reads import READ_NO_NUMBER, asked_dtype
from fxamp.passes.recurrent_gemms import sequence_call
from fxamp.passes.verify import casts_minimal, operands_agree
from fxamp.runtime.packed_weights import packed_cast
from fxamp.runtime.padded_weights import Growth, grown
from fxamp.runtime.recurrent_memory import RecurrentCall
from fxamp.value_types import tensors_in

# Bytes of low copies in one bucket: DistributedDataParallel sends as much at a time (`bucket_cap_mb=25`).
BUCKET_BYTES = 25 << 20
WEIGHT_NORMS = ("_weight_norm",)
"""Ops that compute a weight from its parameters, the same at each call."""


def packs_sound(graph: fx.Graph) -> None:
    """A bucket stands before its first use, in one no_grad region, and casts no weight that is cast elsewhere."""
    regions = grad_regions(graph)
    seen: dict[tuple[object, ...], fx.Node] = {}
    aliases = find_aliases(graph)
    for node in graph.nodes:
        kinds = dict.fromkeys(map(_kind, node.all_input_nodes)) if node.target is packed_cast else {}
        if len(kinds) > 1:
            raise InvariantError(f"{node.name} casts {' and '.join(sorted(kinds, reverse=True))} together")
        for source in _sources(node):
            name = source.target if ir.is_weight(source) else source
            key = (name, aliases.epoch(source, node), regions[node])
            if key in seen:
                raise InvariantError(f"{source.target} is cast twice: by {seen[key].name} and by {node.name}")
            seen[key] = node
            if source in aliases.storage_of and node.target is packed_cast:
                raise InvariantError(f"{node.name} casts {source.target}, which is written in place")


def _sources(node: fx.Node) -> list[fx.Node]:
    """The weights a node casts."""
    if node.target is packed_cast:
        return list(node.all_input_nodes)
    return node.all_input_nodes[:1] if is_weight_cast(node) else []


@dataclasses.dataclass(frozen=True)
class PackWeights(Pass):
    """Cast the weights of a bucket together, just before the first of them is used.

        a = w.to(low); y = linear(x, a); b = v.to(low); z = linear(y, b)
        a, b = packed_cast(low, w, v); y = linear(x, a); z = linear(y, b)

    A pad of such a cast is part of the copy: `pads` says by how much each grows.

    1. A bucket holds weights in the order of their first use, up to `bucket_bytes` of low copies; casts at the start
       of the forward would run last in backward, when nothing is left to overlap an all-reduce with.
    2. Weights to which gradients come back from different outputs are in different buckets: an unused auxiliary head,
       or what stands before a `detach()`, gets no gradient, and no hook of a parameter is called with None.
    3. Buckets do not cross the border of a torch.no_grad region.
    4. Alone stay a weight that is written in place, a table that is only gathered from, and a bucket of one whose
       copy does not grow.
    5. A copy grows where its pad is all that reads it: other readers want the weight's own sizes.
    6. Pads of weights that are stored low (O2) are made by one copy in the same way.
    7. Buffers have buckets of their own: one may hold what the last call computed, and backward must not go there.
    8. No copy is made for `zeros_like(w)`, which reads no number of it: `zeros_like(w, dtype=low)`.
    9. The weights of a recurrent call are in one bucket, however large: cuDNN reads them as one piece of memory.
    10. What one checkpointed region alone reads has buckets of its own, which are cast again with it: nothing of them
        is kept, as under autocast.
    11. Weights that a weight norm computes from parameters alone have buckets of their own; the norms are computed just
        before. One that is computed in a checkpointed region is read there alone: else more would be computed again.
    """

    ensures: ClassVar = (operands_agree, casts_minimal, packs_sound)
    bucket_bytes: int = BUCKET_BYTES

    def apply(self, graph: fx.Graph) -> bool:
        changed = _read_as_stored(graph)
        buckets = [bucket for bucket in self._buckets(graph) if len(bucket) > 1 or growth_of(bucket[0]) is not None]
        for bucket in buckets:
            _pack(graph, bucket)
        return changed or bool(buckets)

    def _buckets(self, graph: fx.Graph) -> list[list[fx.Node]]:
        aliases, regions = find_aliases(graph), grad_regions(graph)
        reached = outputs_reached(graph, aliases)
        buckets: list[list[fx.Node]] = []
        open_buckets: dict[tuple[object, ...], tuple[list[fx.Node], int]] = {}
        copies: dict[fx.Node, tuple[object, ...]] = {}
        for node in graph.nodes:
            if can_pack(node, aliases) or _is_computed_copy(node, aliases):
                place = regions[node], *_checkpoint_of(node)
                copies[node] = _dtype(node), _source_dtype(node), _kind(node.args[0]), place, reached[node]
        made_by = {_result(copy): copy for copy in copies}
        done: set[fx.Node] = set()
        for node in graph.nodes:
            if node.target is packed_cast:  # packed before: what follows it is another bucket
                open_buckets.clear()
            if node not in copies or node in done:
                continue
            key = copies[node]
            together = [copy for copy in _read_with(node, made_by) if copies[copy] == key and copy not in done]
            bucket, size = open_buckets.get(key, ([], 0))
            nbytes = sum(_nbytes(_result(copy)) for copy in together)
            if not bucket or size + nbytes > self.bucket_bytes:
                bucket, size = [], 0
                buckets.append(bucket)
            bucket += together
            done.update(together)
            open_buckets[key] = (bucket, size + nbytes)
        return buckets


def _read_with(copy: fx.Node, made_by: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """A copy, and those that a recurrent call reads with it as its weights, in its order."""
    calls = filter(None, map(sequence_call, _result(copy).users))
    weights = next((weights for weights, _ in calls if _result(copy) in weights), [])
    return [made_by[weight] for weight in dict.fromkeys(weights) if weight in made_by] or [copy]


def _recurrent_calls(results: list[fx.Node]) -> tuple[RecurrentCall, ...]:
    """The recurrent calls all of whose weights are among the results; of two that share some, the first."""
    found: list[RecurrentCall] = []
    taken: set[int] = set()
    for reader in dict.fromkeys(reader for result in results for reader in result.users):
        call = sequence_call(reader)
        if call is None or not set(call[0]) <= set(results) or len(set(call[0])) < len(call[0]):
            continue
        numbers = tuple(results.index(weight) for weight in call[0])
        if taken.isdisjoint(numbers):
            found.append(call[1]._replace(numbers=numbers))
            taken.update(numbers)
    return tuple(found)


def is_weight_cast(node: fx.Node) -> bool:
    """Whether the node is the plain cast of a parameter or buffer."""
    source = node.args[0] if node.args else None
    is_cast = node.target == "to" and ir.mark(node).role == "weight cast"
    return is_cast and isinstance(source, fx.Node) and ir.is_weight(source)


def is_weight_pad(node: fx.Node) -> bool:
    """Whether the node is the one pad of a parameter or buffer that is stored low."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not ir.is_weight(source) or growth_by(node) is None:
        return False
    return sum(ir.mark(user).role == "pad" for user in source.users) == 1


def _kind(weight: Any) -> Literal["parameters", "buffers", "computed weights"]:
    """What a copy is made of; a constant of the model is a buffer, too."""
    if not ir.is_weight(weight):
        return "computed weights"
    return "parameters" if ir.mark(weight).op == "parameter" else "buffers"


def _is_computed_copy(node: fx.Node, aliases: Aliases) -> bool:
    """Rule 11: whether a node is the low copy of a weight-normed weight, none of which is written in place."""
    norm = node.args[0] if node.args else None
    if node.target != "to" or ir.mark(node).role != "cast" or ir.mark(node).precision != "low":
        return False
    if not isinstance(norm, fx.Node) or ir.mark(norm).op not in WEIGHT_NORMS or ir.dtype_of(norm) is None:
        return False
    read = norm.all_input_nodes
    if not all(_kind(each) == "parameters" for each in read) or any(e in aliases.storage_of for e in (norm, *read)):
        return False
    return norm.meta.get(ir.REGION) in (None, *_checkpoint_of(node))


def _read_as_stored(graph: fx.Graph) -> bool:
    """Rule 8: only the sizes and the dtype of such a copy would be read."""
    changed = False
    for node in list(graph.nodes):
        cast = node.args[0] if node.args else None
        if ir.mark(node).op not in READ_NO_NUMBER or not isinstance(cast, fx.Node) or not is_weight_cast(cast):
            continue
        if asked_dtype(node) is None:
            node.kwargs = {**node.kwargs, "dtype": cast.args[1]}
        node.replace_input_with(cast, cast.args[0])
        ir.set_mark(node, modes=tuple((p, k, "any" if p == 0 else mode) for p, k, mode in ir.mark(node).modes))
        if not cast.users:
            graph.erase_node(cast)
        changed = True
    return changed


def can_pack(node: fx.Node, aliases: Aliases) -> bool:
    """Whether a node is the low copy of a weight, and may be made earlier and together with others."""
    is_copy = is_weight_cast(node) or is_weight_pad(node)
    if not is_copy or node.args[0] in aliases.storage_of or ir.mark(node).precision != "low":
        return False
    # A table's cast that only gathers read is there because the cut wanted it.
    return any(ir.mark(user).op not in GATHERS for user in node.users)


def outputs_reached(graph: fx.Graph, aliases: Aliases) -> dict[fx.Node, int]:
    """For each node the outputs of the graph from which a gradient comes back to it, as bits."""
    reached: dict[fx.Node, int] = defaultdict(int)
    regions, modes = grad_regions(graph), grad_modes(graph, at_start=True)
    for node in reversed(graph.nodes):
        if node.op == "output":
            for position, value in enumerate(ir.nodes_in(node.args)):
                reached[value] |= 1 << position
            continue
        for written in mutated(node):
            storage = aliases.storage_of.get(written)
            for member in storage.nodes if storage else ():
                reached[node] |= reached[member]
        if not modes[regions[node]] or _ends_gradients(node):
            continue
        for value in node.all_input_nodes:
            reached[value] |= reached[node]
    return reached


def _ends_gradients(node: fx.Node) -> bool:
    """Whether no gradient goes through a node, whatever it is given: `h.detach()`, `h.data`, `h.argmax(-1)`."""
    if ir.mark(node).op == "detach" or (node.target is getattr and node.args[1] == "data"):
        return True
    dtypes = [found.dtype for found in tensors_in(ir.mark(node).type)]
    return bool(dtypes) and not any(d is None or d.is_floating_point or d.is_complex for d in dtypes)


def growth_of(cast: fx.Node) -> Growth | None:
    """How the copy of a weight can grow while it is made: as its pad, if that is its one reader, says."""
    if is_weight_pad(cast):
        return growth_by(cast)
    reader = next(iter(cast.users), None)
    return None if reader is None or len(cast.users) > 1 else growth_by(reader)


def growth_by(pad: fx.Node) -> Growth | None:
    """What a pad of the padding pass makes of the value it reads; None for any other node."""
    shape = ir.shape_of(pad.args[0]) if ir.mark(pad).role == "pad" and pad.args else None
    if shape is None or pad.target not in (grown, functional.pad):
        return None
    if pad.target is grown:
        return pad.args[1], float(pad.kwargs.get("fill", 0.0))  # type: ignore[return-value, arg-type]
    amounts: list[int] = list(pad.args[1])  # type: ignore[arg-type]
    behind = [*amounts[1::2], *[0] * len(shape)][: len(shape)]
    return tuple((1, extra) for extra in reversed(behind)), float(pad.kwargs.get("value", 0.0))  # type: ignore[arg-type]


def _result(cast: fx.Node) -> fx.Node:
    """What the copy is for: the cast, or the pad behind it."""
    return cast if is_weight_pad(cast) or growth_of(cast) is None else next(iter(cast.users))


def _checkpoint_of(copy: fx.Node) -> tuple[object, ...]:
    """The checkpointed region that alone reads a copy."""
    found = {reader.meta.get(ir.REGION) for reader in _result(copy).users}
    return tuple(found) if len(found) == 1 else ()


def _dtype(copy: fx.Node) -> Any:
    return ir.dtype_of(copy) if is_weight_pad(copy) else copy.args[1]


def _source_dtype(copy: fx.Node) -> Any:
    return ir.dtype_of(copy.args[0])


def _nbytes(cast: fx.Node) -> int:
    """Bytes of the low copy; without shapes a bucket is not limited."""
    return sum(found.nbytes or 0 for found in tensors_in(ir.mark(cast).type))


def _pack(graph: fx.Graph, casts: list[fx.Node]) -> None:
    first = casts[0]
    weights = [cast.args[0] for cast in casts]
    growths = tuple(growth_of(cast) for cast in casts)
    results = [_result(cast) for cast in casts]
    for weight in weights:
        assert isinstance(weight, fx.Node)
        for node in (*weight.all_input_nodes, weight):
            if node > first:  # one that was read before stays where its other readers find it
                first.prepend(node)
    with graph.inserting_before(first):
        options: dict[str, Any] = {"pads": growths} if any(growths) else {}
        if _kind(weights[0]) == "buffers":
            options["are_buffers"] = True
        if calls := _recurrent_calls(results):
            options["recurrent"] = calls
        packed = graph.call_function(packed_cast, (_dtype(first), *weights), options)
        items = [graph.call_function(operator.getitem, (packed, number)) for number in range(len(casts))]
    _describe(packed, casts, results)
    for cast, result, item in zip(casts, results, items, strict=True):
        item.meta.update(cast.meta)
        if result is not cast:
            why = ir.mark(cast).reason
            readers = ", ".join(reader.name for reader in result.users)
            why = dataclasses.replace(why, text=f"{why.text}; its copy is padded for {readers}")
            ir.set_mark(item, type=ir.mark(result).type, reason=why)
            result.replace_all_uses_with(item)
            graph.erase_node(result)
        else:
            cast.replace_all_uses_with(item)
        graph.erase_node(cast)


def _describe(packed: fx.Node, casts: list[fx.Node], results: list[fx.Node]) -> None:
    ir.keep_place(packed, casts[0])
    size = sum(map(_nbytes, results)) / 2**20
    done = "padded" if is_weight_pad(casts[0]) else "cast"
    ir.set_mark(
        packed,
        op="packed_cast",
        type=tuple(ir.mark(result).type for result in results),
        colour="clear",
        precision="low",
        reason=Reason("pack", f"{len(casts)} weights ({size:.1f} MiB) are {done} by one copy before their first use"),
        role=ir.mark(casts[0]).role,
        serves=casts[0].name,
    )
