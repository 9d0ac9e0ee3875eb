"""Measured ranges as decisions about nodes: what low precision would not hold runs in float32."""

import os
from typing import Any, Literal

import torch
from torch import fx

from fxamp import ir
from fxamp.dtypes import dtype_name
from fxamp.errors import OptionError, warn_once
from fxamp.ir import Reason
from fxamp.numerics.ranges import Ranges
from fxamp.numerics.ranges_file import load_ranges
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
    ranges: Ranges, graph: fx.Graph, low: torch.dtype, is_preview: bool = False
) -> dict[str, tuple[Literal["low", "high"], Reason]]:
    """The nodes that must be float32: their values do not fit, or they read values that overflow.

    A value that overflows is no better for being computed in float32 if its reader rounds it. Nodes that were not
    measured are told of in one warning.
    """
    misfit = misfit_of(ranges, graph, low, is_preview)
    if misfit:
        warn_once(misfit)
    suspects = [(ranges.nodes[name], text) for name, text in ranges.deny(low).items()]
    evidence = {node.name: text for node in graph.nodes for found, text in suspects if found.is_of(node)}
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


def misfit_of(ranges: Ranges, graph: fx.Graph, low: torch.dtype, is_preview: bool) -> str:
    """What of a typed graph was not measured, in words; "" where all was.

    1. What was measured and is not in this graph is no misfit by itself: it may be of another graph of the model.
    2. A preview's types are assumed, and the ops inside of a module may be others: there whole modules count.
    """
    places = {node.place for node in ranges.nodes.values()}
    modules = {node.module for node in ranges.nodes.values()}
    here = {(node.name, ir.module_path(node)): node for node in graph.nodes if _is_measured(node)}
    new = [place for place in here if place not in places and not (is_preview and place[1] in modules)]
    if not new:
        return ""
    lost = [node.name for node in ranges.nodes.values() if node.place not in here]
    unfit = ranges.deny(low)
    denied = [name for name in lost if name in unfit]
    names = [f"{name} of {module}" if module else name for name, module in new]
    return (
        f"the ranges do not fit this model: {len(new)} of {len(here)} nodes were not measured "
        f"({listed(names, _NAMED)}), and {len(lost)} of the {len(ranges.nodes)} that were measured have no place among "
        "them"
        + (f": {listed(lost, _NAMED)}" if lost else "")
        + (f" ({dtype_name(low)} does not hold {listed(denied, _NAMED)})" if denied else "")
        + ". What was not measured is decided as without ranges. Measure this model, captured as here: "
        "fxamp.profile(converted, batches)."
    )


def _is_measured(node: fx.Node) -> bool:
    """Whether `profile` looks at such nodes: they compute float32 values."""
    computes = node.op not in ("placeholder", "get_attr", "output")
    return computes and any(found.dtype == torch.float32 for found in tensors_in(ir.mark(node).type))
