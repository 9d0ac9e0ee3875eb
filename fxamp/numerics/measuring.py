"""Run real data through a model in float32, and record what becomes of its values; see ranges.py."""

import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn

from fxamp import ir
from fxamp.errors import OptionError
from fxamp.model.engine import Engine
from fxamp.numerics.extent import check_finite, check_not_empty
from fxamp.numerics.histogram import Histogram
from fxamp.numerics.kept import state_kept
from fxamp.numerics.losses import floats_in, gradients_of, loss_of
from fxamp.numerics.modes import usable
from fxamp.numerics.places import Place, places_in
from fxamp.numerics.progress import watched
from fxamp.numerics.ranges import NodeRange, Ranges
from fxamp.numerics.run import Call, Rewriter, call_of, in_float32, run
from fxamp.numerics.runner import Part
from fxamp.sparse import held

LossFn = Callable[..., torch.Tensor]


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
