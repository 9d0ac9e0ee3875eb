"""A plan whose graphs are of parts of a model: what it says of one part, of each module, and of all as one graph."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from fxamp.model.variant import where_of
from fxamp.override_keys import inside, is_within, within
from fxamp.review.match import Place

if TYPE_CHECKING:
    from fxamp.review.plan import Plan

Nodes = Mapping[str, tuple[str, Place | None]]
"""Key of a node -> "low" | "high", and where it stands."""


class Planned(NamedTuple):
    """One graph of a plan.

    Attributes:
        call: its title without the modules that it is for, and without a number.
        roots: paths of the equal modules that it is for, in the first of which its nodes stand; none for the model.
    """

    call: str
    roots: tuple[str, ...]
    nodes: Nodes


def module_of(key: str) -> str:
    """The module that the key of a node names."""
    return key.partition(":")[0]


def key_at(path: str, key: str, start: str = "") -> str:
    """The key of a node of a part, whose modules' paths begin with `start`, where the part stands at `path`."""
    module, _, rest = key.partition(":")
    return f"{inside(path, within(module, start))}:{rest}"


def base_title(title: str) -> str:
    """The title without its number."""
    return re.sub(r" \(\d+\)$", "", title)


def unique(titles: Iterable[str]) -> Iterator[str]:
    """The titles, numbered where several graphs have the same: "dynamo, forward()", "dynamo, forward() (2)"."""
    seen: Counter[str] = Counter()
    for title in (title.removesuffix(", preview") for title in titles):
        seen[title] += 1
        yield title if seen[title] == 1 else f"{title} ({seen[title]})"


def plan_within(plan: "Plan", path: str) -> "Plan":
    """What a plan says of one part of the model, as a plan of that part by itself.

    Where it has graphs of the part, those of what is around it call that alone.
    """
    graphs = _graphs_of(plan)
    if any(is_within(path, root) for graph in graphs for root in graph.roots):
        graphs = [graph for graph in graphs if graph.roots]
    found = [part for graph in graphs if (part := _inside(graph, path)) is not None]
    return dataclasses.replace(_plan_of(plan, found), path=inside(plan.path, path))


def _inside(graph: Planned, path: str) -> Planned | None:
    """What of a graph is in a part, or is of modules in it; None where nothing is."""
    roots = graph.roots or ("",)
    around = next((root for root in roots if is_within(path, root)), None)
    inner = tuple(within(root, path) for root in roots if around is None and is_within(root, path))
    if around is None and not inner:
        return None
    start = inside(roots[0], within(path, around)) if around is not None else roots[0]
    nodes = _moved(graph.nodes, start, inner[0] if inner else "")
    return Planned(graph.call, inner, nodes) if nodes else None


def expanded(plan: "Plan") -> "Plan":
    """The same plan with the graphs of equal modules once for each of them."""
    return _plan_of(plan, _each(_graphs_of(plan)))


def _each(graphs: Iterable[Planned]) -> Iterator[Planned]:
    for graph in graphs:
        yield from (Planned(graph.call, (root,), _moved(graph.nodes, graph.roots[0], root)) for root in graph.roots)
        if not graph.roots:
            yield graph


def as_whole(plan: "Plan") -> "Plan":
    """The same plan for a graph of all that it has in graphs of parts, as far as these decide alike about a node."""
    graphs = list(_each(_graphs_of(plan)))
    outer, parts = [each for each in graphs if not each.roots], [each for each in graphs if each.roots]
    roots = {graph.roots[0] for graph in parts}
    nodes: dict[str, tuple[str, Place | None]] = {}
    unlike: set[str] = set()
    for key, node in (pair for graph in parts for pair in graph.nodes.items()):
        unlike |= {key} if nodes.setdefault(key, node)[0] != node[0] else set()
    known = {key: node for key, node in nodes.items() if key not in unlike}
    wholes = [
        Planned(graph.call, (), {key: node for key, node in graph.nodes.items() if module_of(key) not in roots} | known)
        for graph in outer or [Planned("", (), {})]
    ]
    return _plan_of(plan, [*outer, *wholes])


def _moved(nodes: Nodes, start: str, to: str) -> dict[str, tuple[str, Place | None]]:
    """The nodes in modules within `start`, as they stand where that is `to`."""
    found = {}
    for key, (decided, place) in nodes.items():
        if is_within(module_of(key), start):
            new = key_at(to, key, start)
            found[new] = decided, None if place is None else place._replace(module=module_of(new))
    return found


def _graphs_of(plan: "Plan") -> list[Planned]:
    found = []
    for title, decided in plan.graphs.items():
        roots, places = plan.blocks.get(title, ()), plan.places.get(title, {})
        call = base_title(title).removeprefix(f"{where_of(roots)}: ")
        found.append(Planned(call, roots, {key: (each, places.get(key)) for key, each in decided.items()}))
    return found


def _plan_of(plan: "Plan", given: Iterable[Planned]) -> "Plan":
    graphs = list(given)
    named = [f"{where_of(graph.roots)}: {graph.call}" if graph.roots else graph.call for graph in graphs]
    titles = dict(zip(unique(named), graphs, strict=True))
    return dataclasses.replace(
        plan,
        graphs={title: {key: decided for key, (decided, _) in graph.nodes.items()} for title, graph in titles.items()},
        places={
            title: {key: place for key, (_, place) in graph.nodes.items() if place} for title, graph in titles.items()
        },
        blocks={title: graph.roots for title, graph in titles.items() if graph.roots},
    )
