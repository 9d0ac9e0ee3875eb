"""What real data makes of a model's values: exponents of every activation and its gradient, in an fp32 run."""

import dataclasses
import functools
import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from fxamp.dtypes import LOW_DTYPES, dtype_name
from fxamp.numerics.histogram import Histogram
from fxamp.numerics.places import Place, stem_of
from fxamp.override_keys import inside, is_within, within
from fxamp.runtime.scale_rule import choose_scale
from fxamp.whole import checked_path, write_whole
from fxamp.words import listed

FLUSH_LIMIT = 0.01
"""Share of a node's non-zero values that may round to zero before the node is suggested for float32."""

_NAMED = 5
"""Nodes that are named below the table."""


@dataclasses.dataclass
class NodeRange:
    """One node's values over all batches.

    Attributes:
        name: the node's; "linear (2)" where another graph of the model has a different `linear`.
        text: of its line, as it was when it was measured; `number`: see `Place`.
        served: path of the equal module for which Dynamo made the graph that ran it, "" where it has its own.
        values: of its output; `gradients`: of the loss with respect to it.
    """

    name: str
    op: str
    module: str
    source: str
    text: str = ""
    number: int = 0
    served: str = ""
    values: Histogram = dataclasses.field(default_factory=Histogram)
    gradients: Histogram = dataclasses.field(default_factory=Histogram)

    @property
    def place(self) -> Place:
        """By which it is found again in another capture."""
        return Place(self.module, stem_of(self.name.partition(" (")[0]), self.text, self.number)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        names = ("name", "op", "module", "source", "text", "number", "served")
        plain = {field: getattr(self, field) for field in names}
        return {**plain, "values": self.values.as_dict(), "gradients": self.gradients.as_dict()}


@dataclasses.dataclass
class Ranges:
    """What `profile` measured; `convert(..., ranges=...)` uses it.

    Attributes:
        nodes: by node name.
        batches: how many were seen.
        low: the dtype that shares are told for.
        weight_gradients: of the loss with respect to the parameters, and to inputs that want gradients.
        path: of the part of the model that they are of, "" for the model.
    """

    nodes: dict[str, NodeRange]
    batches: int
    low: torch.dtype
    weight_gradients: Histogram = dataclasses.field(default_factory=Histogram)
    path: str = ""

    def within(self, path: str) -> "Ranges":
        """Those of one part of the model, as ranges of that part by itself."""
        found = {
            name: dataclasses.replace(node, module=within(node.module, path), served="")
            for name, node in self.nodes.items()
            if is_within(node.module, path)
        }
        return dataclasses.replace(self, nodes=found, path=inside(self.path, path))

    def shared_with(self, name: str) -> list[str]:
        """The name, and those of what was measured at its place in each equal module that shared a graph with its."""
        place = self.nodes[name].place
        others = self._shared.get(place.module, ())
        return [name, *(other for path in others if (other := self._by_place.get(place._replace(module=path))))]

    @functools.cached_property
    def _by_place(self) -> dict[Place, str]:
        return {node.place: name for name, node in self.nodes.items()}

    @functools.cached_property
    def _shared(self) -> dict[str, tuple[str, ...]]:
        """Path of a module -> those of the other modules that shared a graph with it."""
        groups: dict[str, dict[str, None]] = {}
        for node in self.nodes.values():
            if node.served:
                groups.setdefault(node.served, {node.served: None})[node.module] = None
        return {path: tuple(each for each in group if each != path) for group in groups.values() for path in group}

    def content(self, low: torch.dtype) -> Hashable:
        """Equal for ranges by which the same nodes run in float32."""
        unfit = self.deny(low)
        return frozenset((node.place, name in unfit) for name, node in self.nodes.items())

    @property
    def gradients(self) -> Histogram:
        """All activation gradients together."""
        whole = Histogram()
        for node in self.nodes.values():
            whole.merge(node.gradients)
        return whole

    @property
    def loss_scale(self) -> float | None:
        """The guide's static scale: the largest power of two that keeps every gradient below 65,504.

        That is each activation's, and each parameter's: a weight's is a sum over the batch, and is made low too.
        """
        largest = max(self.gradients.largest, self.weight_gradients.largest)
        return choose_scale(largest) if largest > 0 else None

    def deny(self, low: torch.dtype | None = None) -> dict[str, str]:
        """Nodes that should run in float32, and why: {"exp": "its largest value 9.7e+04 overflows float16"}.

        `convert(..., ranges=ranges)` denies each where it was measured. As a key of `overrides=` a name means all nodes
        of that name; of "linear (2)", which no override knows, `nodes[name].module` tells the module.
        """
        chosen = low or self.low
        found = {}
        for node in self.nodes.values():
            evidence = _evidence(node.values, chosen)
            if evidence:
                found[node.name] = evidence
        return found

    def save(self, path: str | Path) -> None:
        """Write as JSON, complete or not at all.

        Raises:
            OptionError: it cannot be written.
        """
        write_whole(checked_path(path, "the ranges cannot be written"), json.dumps(self.as_dict()), "the ranges")

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        nodes = [node.as_dict() for node in self.nodes.values()]
        return {
            "low_dtype": dtype_name(self.low),
            "batches": self.batches,
            "loss_scale": self.loss_scale,
            "deny": self.deny(),
            "nodes": nodes,
            "weight_gradients": self.weight_gradients.as_dict(),
        }

    def plot(self, path: str | Path) -> Path:
        """Write the picture of the guide's Figures 2 and 3; needs matplotlib.

        Raises:
            OptionError: matplotlib is not installed, or the file cannot be written.
        """
        from fxamp.numerics.plots import plot_ranges

        return plot_ranges(self, path)

    def __str__(self) -> str:
        return ranges_table(self)

    def __repr__(self) -> str:
        return f"<Ranges of {len(self.nodes)} nodes; print() gives the table>"


def _evidence(values: Histogram, low: torch.dtype) -> str:
    name = dtype_name(low)
    if values.overflows(low):
        return f"its largest value {values.largest:.3g} overflows {name}"
    flushed = values.share_flushed(low)
    if flushed > FLUSH_LIMIT:
        return f"{flushed:.1%} of its non-zero values round to 0 in {name}"
    return ""


# -------------------------------------------------------------------------------------------------------- text


def ranges_table(ranges: Ranges) -> str:
    """A line for each node, those that low precision would hurt first; with its module, where nodes share a name.

    A layer that is a graph by itself has no line of the user's, but a path.
    """
    bad, has_gradients = ranges.deny(), any(node.gradients.total for node in ranges.nodes.values())
    has_modules = any(node.name.endswith(")") for node in ranges.nodes.values())
    rows = [
        (
            *(node.name, node.op, *((node.module,) if has_modules else ())),
            *(node.source.rpartition("/")[2] or node.module, f"{node.values.largest:.3g}"),
            *(f"{node.values.share_flushed(dtype):.2%}" for dtype in LOW_DTYPES),
            *(f"{node.values.share_overflown(dtype):.2%}" for dtype in LOW_DTYPES),
            *(_gradient_cells(node.gradients) if has_gradients else ()),
            bad.get(node.name, ""),
        )
        for node in sorted(ranges.nodes.values(), key=lambda node: (node.name not in bad, -node.values.largest))
    ]
    headers = (
        *(
            "node",
            "op",
            *(("module",) if has_modules else ()),
            "line",
            "largest",
            "to 0 in fp16",
            "in bf16",
            "to inf in fp16",
            "in bf16",
        ),
        *(("largest grad", "to 0 in fp16", "in bf16") if has_gradients else ()),
        f"evidence for deny in {dtype_name(ranges.low)}",
    )
    scale = ranges.loss_scale
    tail = f"{ranges.batches} batches"
    if scale is not None:
        lost = ranges.gradients.share_flushed(ranges.low)
        kept = ranges.gradients.share_flushed(ranges.low, scale)
        tail += f"; loss scale {scale:g}: gradients lost {lost:.2%} without it, {kept:.2%} with it"
        largest = ranges.gradients.largest, ranges.weight_gradients.largest
        tail += "; largest gradient of an activation {:.3g}, of a weight {:.3g}".format(*largest)
    return "\n".join(filter(None, (tabulate(rows, headers=headers, disable_numparse=True), tail, _not_finite(ranges))))


def _not_finite(ranges: Ranges) -> str:
    """The nodes that have NaNs or infinities in float32, which no precision is the reason of; those with NaNs first."""
    bad = [node for node in ranges.nodes.values() if node.values.nan or node.values.infinite]
    texts = [
        f"{node.name} ({' and '.join(f'{count} {word}' for count, word in counts if count)})"
        for node in sorted(bad, key=lambda node: not node.values.nan)
        if (counts := ((node.values.nan, "nan"), (node.values.infinite, "inf")))
    ]
    return f"not finite in float32 already: {listed(texts, _NAMED)}" if texts else ""


def _gradient_cells(gradients: Histogram) -> tuple[str, ...]:
    """Empty where none came through the node."""
    if not gradients.total:
        return ("",) * (1 + len(LOW_DTYPES))
    return f"{gradients.largest:.3g}", *(f"{gradients.share_flushed(dtype):.2%}" for dtype in LOW_DTYPES)
