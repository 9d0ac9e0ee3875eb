"""Measured ranges as decisions about nodes: what low precision would not hold runs in float32."""

import os
from typing import Any, Literal

import torch
from torch import fx

from fxamp.errors import OptionError
from fxamp.ir import Reason
from fxamp.numerics.ranges import Ranges, load_ranges


def as_ranges(given: Any) -> Ranges | None:
    """The `ranges=` of convert(): what fxamp.profile gave, the path it was saved at, or None.

    Raises:
        OptionError: anything else, or a file that holds no ranges.
    """
    if given is None or isinstance(given, Ranges):
        return given
    if isinstance(given, (str, os.PathLike)):
        return load_ranges(os.fspath(given))
    raise OptionError(f"ranges is a {type(given).__qualname__}. Give what fxamp.profile gave, or its file.")


def ranges_pins(ranges: Ranges, graph: fx.Graph, low: torch.dtype) -> dict[str, tuple[Literal["low", "high"], Reason]]:
    """The nodes that must be float32: their values do not fit, or they read values that overflow.

    A value that overflows is no better for being computed in float32 if its reader rounds it.
    """
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
