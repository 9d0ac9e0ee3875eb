"""What real data makes of a model's values: exponents of every activation and its gradient, in an fp32 run."""

import dataclasses
import functools
import inspect
import itertools
import json
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import fx, nn

from fxamp import ir
from fxamp.dtypes import LOW_DTYPES, dtype_name
from fxamp.errors import OptionError
from fxamp.model.engine import Engine
from fxamp.numerics.extent import check_finite, check_not_empty
from fxamp.numerics.histogram import Histogram
from fxamp.numerics.kept import state_kept
from fxamp.numerics.modes import usable
from fxamp.numerics.places import Place, places_in, stem_of
from fxamp.numerics.progress import watched
from fxamp.numerics.run import Call, Rewriter, call_of, floats_in, gradients_of, in_float32, loss_of, run
from fxamp.numerics.runner import Part
from fxamp.override_keys import inside, is_within, within
from fxamp.runtime.scale_rule import choose_scale
from fxamp.sparse import held
from fxamp.whole import checked_path, write_whole
from fxamp.words import listed

FLUSH_LIMIT = 0.01
"""Share of a node's non-zero values that may round to zero before the node is suggested for float32."""

_NAMED = 5
"""Nodes that are named below the table."""

LossFn = Callable[..., torch.Tensor]


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
        """Nodes that should run in float32, and why: {"exp": "its largest value 9.7e+04 overflows float16"}."""
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


# ---------------------------------------------------------------------------------------------------- measuring


def profile_converted(
    converted: nn.Module, batches: Iterable[Any], loss_fn: LossFn | None, progress: bool = True
) -> Ranges:
    """Measure a converted model's fp32 run; `fxamp.profile` takes any model.

    Args:
        batches: each the inputs of one call; where `loss_fn` takes two arguments, a batch is (inputs, targets).
        loss_fn: gives the loss of (output) or of (output, targets); None: no gradients are recorded.

    Raises:
        OptionError: no batch, or a batch that is empty or whose loss or inputs are not finite.
    """
    ranges, count = Ranges({}, 0, torch.float16), 0
    fp32: tuple[Engine, Rewriter] | None = None
    for batch in watched(check_batches(batches), "profile", progress):
        inputs, criterion = split_batch(usable(batch), loss_fn)
        check_not_empty(inputs, f"batch {count} is")
        check_finite(floats_in(inputs), f"batch {count} holds")
        call = call_of(converted, inputs, only_fp32=True)
        if fp32 is None or fp32[0] is not call.engine:
            fp32 = call.engine, in_float32(call)
        ranges.low = call.engine.options.low
        _measure(call, fp32[1], criterion, ranges, count)
        count += 1
    if count == 0:
        raise OptionError("profile got no batches. Give an iterable with at least one (a generator may be used up).")
    ranges.batches = count
    return ranges


def check_batches(given: Any) -> Iterable[Any]:
    """The batches, where they are something to go through; else an OptionError."""
    if hasattr(given, "__iter__") or hasattr(given, "__getitem__"):
        return given  # type: ignore[no-any-return]
    raise OptionError(
        f"batches is a {type(given).__qualname__}. Give an iterable of batches: a list, a DataLoader, a generator."
    )


def split_batch(batch: Any, loss_fn: LossFn | None) -> tuple[Any, Callable[[Any], torch.Tensor] | None]:
    """A batch's inputs, and its loss as a function of the output alone."""
    if loss_fn is None:
        return batch, None
    if _arguments(loss_fn) < 2:
        return batch, loss_fn
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise OptionError(
            f"loss_fn takes (output, targets), so a batch must be (inputs, targets), not {type(batch).__qualname__}."
        )
    inputs, targets = batch
    return inputs, lambda output: loss_fn(output, targets)


def _arguments(loss_fn: LossFn) -> int:
    """How many positional arguments must be given."""
    try:
        found = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn).parameters.values()
    except (TypeError, ValueError):
        return 2
    needed = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    return len(needed)


def _measure(call: Call, fp32: Rewriter, criterion: Any, ranges: Ranges, number: int) -> None:
    known = {found.place: found for found in ranges.nodes.values()}
    graphs: dict[fx.Graph, dict[fx.Node, Place]] = {}

    def see(part: Part, node: fx.Node, value: Any) -> Any:
        if node.graph not in graphs:
            graphs[node.graph] = places_in(node.graph)
        place = graphs[node.graph].get(node)
        for tensor in floats_in(value) if place is not None else ():
            assert place is not None
            module, made_for = part.module_path(node), ir.module_path(node)
            place = place._replace(module=module)
            if place not in known:
                known[place] = _added(ranges.nodes, node, place)
                known[place].served = made_for if part.moved is not None and made_for != module else ""
            known[place].values.add(tensor)
            if tensor.requires_grad and criterion is not None:
                _watch_gradient(tensor, known[place].gradients)
        return value

    with state_kept(call.model), torch.set_grad_enabled(criterion is not None or call.needs_gradients):
        output = run(call, see, rewritten=fp32, as_float32=True)
        if criterion is not None:
            loss = loss_of(output, criterion)
            if not bool(torch.isfinite(loss)):
                raise OptionError(f"the loss of batch {number} is {float(loss.detach())} in float32: find out why.")
            for gradient in _backward(loss):
                ranges.weight_gradients.add(gradient)


def _watch_gradient(tensor: torch.Tensor, histogram: Histogram) -> None:
    tensor.register_hook(lambda gradient: histogram.add(gradient))  # type: ignore[no-untyped-call]


def _backward(loss: torch.Tensor) -> list[torch.Tensor]:
    """Run the hooks, and give the leaves' gradients; their `.grad` is left as it is."""
    leaves = _leaves(loss)
    found = gradients_of(loss, leaves) if leaves else ()
    return [held(gradient) for gradient in found if gradient is not None]


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """The leaf tensors a loss depends on."""
    found: dict[int, torch.Tensor] = {}
    seen, frontier = set(), [loss.grad_fn]
    while frontier:
        function = frontier.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        variable = getattr(function, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        frontier += [following for following, _ in function.next_functions]
    return list(found.values())


def _added(nodes: dict[str, NodeRange], node: fx.Node, place: Place) -> NodeRange:
    """What is measured at a place from now on."""
    names = itertools.chain((node.name,), (f"{node.name} ({number})" for number in itertools.count(2)))
    name = next(name for name in names if name not in nodes)
    nodes[name] = NodeRange(name, ir.mark(node).op, place.module, ir.source_line(node), place.text, place.number)
    return nodes[name]


# -------------------------------------------------------------------------------------------------------- text


def ranges_table(ranges: Ranges) -> str:
    """A line for each node, those that low precision would hurt first; a layer that is a graph by itself has no line of
    the user's, but a path."""
    bad, has_gradients = ranges.deny(), any(node.gradients.total for node in ranges.nodes.values())
    rows = [
        (
            *(node.name, node.op, node.source.rpartition("/")[2] or node.module, f"{node.values.largest:.3g}"),
            *(f"{node.values.share_flushed(dtype):.2%}" for dtype in LOW_DTYPES),
            *(f"{node.values.share_overflown(dtype):.2%}" for dtype in LOW_DTYPES),
            *(_gradient_cells(node.gradients) if has_gradients else ()),
            bad.get(node.name, ""),
        )
        for node in sorted(ranges.nodes.values(), key=lambda node: (node.name not in bad, -node.values.largest))
    ]
    headers = (
        *("node", "op", "line", "largest", "to 0 in fp16", "in bf16", "to inf in fp16", "in bf16"),
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
