"""Measured ranges as decisions about nodes: what low precision would not hold runs in float32."""

import os
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import torch
from torch import fx

from fxamp import ir
from fxamp.dtypes import dtype_name
from fxamp.errors import OptionError
from fxamp.ir import Reason
from fxamp.numerics.places import places_in
from fxamp.numerics.ranges import Ranges
from fxamp.numerics.ranges_file import load_ranges
from fxamp.override_keys import inside, is_within
from fxamp.value_types import tensors_in
from fxamp.words import listed

_NAMED = 5
"""Nodes that a message names."""


def as_ranges(given: Any) -> Ranges | None:
    """The `ranges=` of convert(): what fxamp.profile gave, the path it was saved at, or None.

    Raises:
        OptionError: anything else, or a file that holds no ranges.
    """
    if given is None or isinstance(given, Ranges):
        return given
    if isinstance(given, (str, os.PathLike)):
        return load_ranges(given)
    raise OptionError(f"ranges is a {type(given).__qualname__}. Give what fxamp.profile gave, or its file.")


def ranges_pins(
    ranges: Ranges, graph: fx.Graph, low: torch.dtype, is_shared: bool = False
) -> dict[str, tuple[Literal["low", "high"], Reason]]:
    """The nodes that must be float32: their values do not fit, or they read values that overflow.

    A value that overflows is no better for being computed in float32 if its reader rounds it.

    Args:
        is_shared: whether the graph may run for equal modules, as Dynamo's do: what was measured of any of them counts.
    """
    suspects = ranges.deny(low)
    evidence: dict[str, str] = {}
    for node, name in measured_at(ranges, graph).items():
        names = ranges.shared_with(name) if is_shared else [name]
        if (unfit := next((each for each in names if each in suspects), None)) is not None:
            evidence[node.name] = suspects[unfit]
    pins: dict[str, tuple[Literal["low", "high"], Reason]] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node.name in evidence:
            pins[node.name] = ("high", Reason("ranges", f"measured: {evidence[node.name]}"))
        else:
            read = [given for given in node.all_input_nodes if "overflows" in evidence.get(given.name, "")]
            source = next(iter(read), None)
            if source is not None:
                text = f"measured: it reads {source.name}, and {evidence[source.name].replace('its', 'whose')}"
                pins[node.name] = ("high", Reason("ranges", text, source.name))
    return pins


def misfits_of(ranges: Ranges, graph: fx.Graph, low: torch.dtype, is_preview: bool) -> list[str]:
    """What of a typed graph was not measured, in a sentence; none where all was.

    1. What was measured and is not in this graph is no misfit by itself: it may be of another graph of the model.
    2. A preview's types are assumed, and the ops inside of a module may be others: there whole modules count.
    """
    modules = {node.module for node in ranges.nodes.values()}
    found = measured_at(ranges, graph)
    here = [node for node in places_in(graph) if _is_measured(node)]
    new = [node for node in here if node not in found and not (is_preview and ir.module_path(node) in modules)]
    if not new:
        return []
    parts = [str(node.target) for node in graph.nodes if node.meta.get("boundary")]  # with graphs of their own
    theirs = {name for name, node in ranges.nodes.items() if any(is_within(node.module, path) for path in parts)}
    known = theirs | {found[node] for node in here if node in found}
    lost = [name for name in ranges.nodes if name not in known]
    unfit = ranges.deny(low)
    denied = [name for name in lost if name in unfit]
    paths = [inside(ranges.path, ir.module_path(node)) for node in new]
    names = [f"{node.name} of {path}" if path else node.name for node, path in zip(new, paths, strict=True)]
    left = f", and {len(lost)} of the {len(ranges.nodes)} that were measured have no place among them" if lost else ""
    return [
        f"the ranges do not fit this model: {len(new)} of {len(here)} nodes were not measured ({listed(names, _NAMED)})"
        + (f"{left}: {listed(lost, _NAMED)}" if lost else "")
        + (f" ({dtype_name(low)} does not hold {listed(denied, _NAMED)})" if denied else "")
        + ". What was not measured is decided as without ranges. Measure this model, captured as here: "
        "fxamp.profile(converted, batches)."
    ]


def measured_at(ranges: Ranges, graph: fx.Graph) -> dict[fx.Node, str]:
    """The names, in the ranges, of what was measured at the nodes of a graph.

    Where lines are edited, it is what stands in the same order in its module, if all of it does; so it is with the same
    op of another name, as what a module gives has in the graph around it.
    """
    places, known = places_in(graph), {node.place: name for name, node in ranges.nodes.items()}
    found = {node: known[place] for node, place in places.items() if place in known}
    taken = set(found.values())
    for by_op in (False, True):
        left = _grouped(
            (node.module, node.op if by_op else node.place.stem, name)
            for name, node in ranges.nodes.items()
            if name not in taken
        )
        open_ones = _grouped(
            (place.module, ir.mark(node).op if by_op else place.stem, node)
            for node, place in places.items()
            if node not in found and _is_measured(node)
        )
        for key, nodes in open_ones.items():
            if len(nodes) == len(left.get(key, ())):
                found.update(zip(nodes, left[key], strict=True))
                taken.update(left[key])
    return found


_T = TypeVar("_T")


def _grouped(placed: Iterable[tuple[str, str, _T]]) -> dict[tuple[str, str], list[_T]]:
    groups: dict[tuple[str, str], list[_T]] = {}
    for module, kind, one in placed:
        groups.setdefault((module, kind), []).append(one)
    return groups


def _is_measured(node: fx.Node) -> bool:
    """Whether `profile` looks at what a node computes: float32 values, but of parts with graphs of their own, and of
    what nothing has to widen in its float32 run."""
    is_other = ir.PROMOTED in node.meta or node.meta.get("boundary")
    return not is_other and any(found.dtype == torch.float32 for found in tensors_in(ir.mark(node).type))
