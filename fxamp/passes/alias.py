"""Which values may share storage, and where that storage is written: an analysis, it changes nothing.

Views and in-place ops are found by op name; a function nobody lists may return a view of any of its arguments, but for
weights that are stored low (O2): where it runs in float32 it is given copies of those.
"""

import bisect
import dataclasses

import torch
from networkx.utils import UnionFind
from torch import fx

from fxamp import ir
from fxamp.fakes import MEMORY, memory_of
from fxamp.inplace import mutated
from fxamp.lists import TRAITS


@dataclasses.dataclass(frozen=True)
class Storage:
    """Nodes that may share one storage which somebody writes into.

    Attributes:
        nodes: in graph order.
        writers: the nodes that write, in graph order.
        external: whether the storage belongs to an input, a parameter or a buffer, or to the caller in the end.
        places: the writers' positions in the graph.
    """

    nodes: tuple[fx.Node, ...]
    writers: tuple[fx.Node, ...]
    external: bool
    places: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Aliases:
    """The written storages of a graph, and how often each was written before a point of it."""

    storage_of: dict[fx.Node, Storage]
    order: dict[fx.Node, int]

    def epoch(self, value: fx.Node, reader: fx.Node) -> int:
        """Number of writes into `value`'s storage before `reader` runs; casts are shared within one epoch."""
        storage = self.storage_of.get(value)
        return 0 if storage is None else bisect.bisect_left(storage.places, self.order[reader])

    def last_writer(self, value: fx.Node, reader: fx.Node) -> fx.Node | None:
        """The node that wrote last into `value`'s storage before `reader` runs."""
        epoch = self.epoch(value, reader)
        return self.storage_of[value].writers[epoch - 1] if epoch else None

    @property
    def storages(self) -> list[Storage]:
        """Every written storage once, in graph order."""
        return list({id(storage): storage for storage in self.storage_of.values()}.values())


def find_aliases(graph: fx.Graph, with_results: bool = False) -> Aliases:
    """The written storages of a graph.

    Args:
        with_results: whether a result that is a view of another one, or of what the caller has, counts as written when
            the graph ends: what goes on with it (behind a graph break, say) may write one, and reads the other.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    writes = {node: written for node in graph.nodes if (written := mutated(node))}
    if with_results and (shared := _shared_results(graph)):
        writes[next(iter(graph.find_nodes(op="output")))] = shared
    own = _written_by_modules(graph)
    if not writes and not own:
        return Aliases({}, order)
    sets = UnionFind()
    first: dict[object, fx.Node] = {}
    stored_low: set[fx.Node] = set()  # and views of such weights
    for node in graph.nodes:
        for key in _memory_keys(node):
            sets.union(node, first.setdefault(key, node))
        sources = may_share(node, writes.get(node, []))
        if node not in writes and _may_give_any(ir.mark(node).op):
            sources = [source for source in sources if source not in stored_low]
        for source in sources:
            sets.union(node, source)
        if node.meta.get("stored_low") or not stored_low.isdisjoint(sources):
            stored_low.add(node)
    for node, state in own.items():
        writes[node] = [*writes.get(node, ()), *state]
    return Aliases(_storages(graph, sets, writes), order)


def _shared_results(graph: fx.Graph) -> list[fx.Node]:
    """The float32 results that are views of others, of inputs or of weights, and those.

    Parts side by side of one value are none.
    """
    (output,) = graph.find_nodes(op="output")
    results = {node: None for node in output.all_input_nodes if "val" in node.meta and ir.holds_float32(node)}
    found: dict[fx.Node, None] = {}
    for result in results:
        behind = [result]
        for node in behind:
            behind += [source for source in may_share(node, mutated(node)) if source not in behind]
        kept = [node for node in behind if node in results or node.op in ("placeholder", "get_attr")]
        memory = memory_of(result.meta["val"])
        same = [node for node in kept if "val" in node.meta and memory_of(node.meta["val"]) == memory]
        found.update(dict.fromkeys(same if len(same) > 1 else ()))
    return list(found)


def _memory_keys(node: fx.Node) -> list[object]:
    """What an input or a weight has in common with those that lie in the same memory: its path, a note, or a fake."""
    if node.op not in ("placeholder", "get_attr"):
        return []
    path: list[object] = [str(node.target)] if node.op == "get_attr" else []
    if MEMORY in node.meta:
        return [*path, (MEMORY, node.meta[MEMORY])]
    value = node.meta.get("val")
    return [*path, getattr(value, MEMORY, memory_of(value))] if isinstance(value, torch.Tensor) else path


def _written_by_modules(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """What the graph reads of the state of modules that are called whole: running statistics, and what hooks keep."""
    calls: dict[str, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_module"):
        calls.setdefault(str(node.target), []).append(node)
    found: dict[fx.Node, list[fx.Node]] = {}
    for read in graph.find_nodes(op="get_attr") if calls else ():
        path = str(read.target)
        while "." in path:
            path = path.rpartition(".")[0]
            for call in calls.get(path, ()):
                found.setdefault(call, []).append(read)
    return found


def _storages(graph: fx.Graph, sets: UnionFind, writes: dict[fx.Node, list[fx.Node]]) -> dict[fx.Node, Storage]:
    written_roots = {sets[target] for targets in writes.values() for target in targets}
    members: dict[object, list[fx.Node]] = {root: [] for root in written_roots}
    writers: dict[object, list[fx.Node]] = {root: [] for root in written_roots}
    places: dict[object, list[int]] = {root: [] for root in written_roots}
    for place, node in enumerate(graph.nodes):
        if node.op != "output" and sets[node] in members:
            members[sets[node]].append(node)
        for root in dict.fromkeys(sets[target] for target in writes.get(node, ())):
            writers[root].append(node)
            places[root].append(place)
    result: dict[fx.Node, Storage] = {}
    for root, nodes in members.items():
        external = any(node.op in ("placeholder", "get_attr", "output") for node in (*nodes, *writers[root]))
        storage = Storage(tuple(nodes), tuple(writers[root]), external, tuple(places[root]))
        result.update(dict.fromkeys(nodes, storage))
    return result


# Views of every argument, not of the first alone.
_VIEWS_OF_ALL = frozenset("broadcast_tensors meshgrid atleast_1d atleast_2d atleast_3d cartesian_prod".split())

# They write into their statistics or table, and give something new.
_WRITES_ASIDE = frozenset({"batch_norm", "embedding", "embedding_bag", "instance_norm"})

# Attention under a name of a library's or of Dynamo's: it gives something new, as not every such function does.
_KERNELS = TRAITS["low_only"] | {"higher_order::flex_attention"}


def may_share(node: fx.Node, written: list[fx.Node]) -> list[fx.Node]:
    """The inputs whose storage the node's value may share; `written` are those it writes into."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    op = ir.mark(node).op
    if op in _WRITES_ASIDE:
        return []
    if written:
        return written
    if op in _KERNELS:
        return []
    if _may_give_any(op):
        return node.all_input_nodes
    if op in TRAITS["view"] or op == "getattr":
        return ir.nodes_in(node.args[:1] or next(iter(node.kwargs.values()), ()))
    if op == "einsum" and len(node.all_input_nodes) == 1:
        return node.all_input_nodes  # a permutation, or a diagonal
    return []


def _may_give_any(op: str) -> bool:
    """Whether an op may return a view of any of its arguments."""
    return op in _VIEWS_OF_ALL or "." in op or "::" in op


def grad_regions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Number of the no_grad region, or the stretch between two, that each node stands in.

    A cast made inside torch.no_grad carries no gradient, so casts are not shared across the borders.
    """
    regions, number = {}, 0
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            number += 1
        regions[node] = number
    return regions


def grad_modes(graph: fx.Graph, at_start: bool) -> list[bool]:
    """Whether gradients are on in each of the `grad_regions`.

    Args:
        at_start: whether they are where the graph begins.
    """
    modes, asked = [at_start], {}
    for node in graph.nodes:
        if node.target is torch.is_grad_enabled:
            asked[node] = modes[-1]
        elif node.target is torch._C._set_grad_enabled:
            (mode,) = node.args
            modes.append(asked.get(mode, True) if isinstance(mode, fx.Node) else bool(mode))
    return modes
