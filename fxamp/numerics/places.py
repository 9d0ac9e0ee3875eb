"""Where nodes stand in a model, so that what was measured at one is found again in another graph of the same code.

Names are of one graph: where it has one more `add`, those behind it are called `add_2`, `add_3`... instead.
"""

import linecache
import re
from collections import Counter
from typing import NamedTuple

from torch import fx

from fxamp import ir


class Place(NamedTuple):
    """Where a node stands.

    Attributes:
        module: path of the innermost module whose forward made it.
        stem: its name without a number. Where several ops are read as one, that has the name of the last.
        text: of its line, "" where it is not known.
        number: among the nodes of this module, stem and line.
    """

    module: str
    stem: str
    text: str
    number: int


def places_in(graph: fx.Graph) -> dict[fx.Node, Place]:
    """The places of what a graph computes: not of inputs, weights, casts and pads."""
    found: dict[fx.Node, Place] = {}
    counts: Counter[tuple[str, str, str]] = Counter()
    for node in graph.nodes:
        mark = ir.mark(node)
        if node.op not in ("placeholder", "get_attr", "output") and not mark.role:
            shared = (ir.module_path(node), stem_of(node.name), text_of(ir.source_line(node)))
            found[node] = Place(*shared, counts[shared])
            counts[shared] += 1
    return found


def stem_of(name: str) -> str:
    """The name of a node without its number: "add" of "add_3"."""
    return re.sub(r"_\d+$", "", name)


def text_of(source: str) -> str:
    """What stands at "file.py:12"."""
    file, _, line = source.rpartition(":")
    return " ".join(linecache.getline(file, int(line)).split()) if line.isdigit() else ""
