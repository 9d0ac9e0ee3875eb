"""Every node's value, and every gradient, in fp32 against the same in mixed precision, worst first."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tabulate import tabulate
from torch import fx, nn

from fxamp import ir
from fxamp.capture.traces import Attribute, State
from fxamp.errors import OptionError
from fxamp.model.engine import engine_of
from fxamp.model.rebuild import training_flags
from fxamp.model.unconverted import check_left
from fxamp.numerics.distance import (
    are_alike,
    error_of,
    error_of_all,
    holds_all_of,
    introduced,
    largest_difference,
    share_flushed,
    share_not_finite,
)
from fxamp.numerics.extent import check_not_empty
from fxamp.numerics.kept import state_kept
from fxamp.numerics.losses import floats_in, loss_of
from fxamp.numerics.modes import usable
from fxamp.numerics.recording import Recorded, record
from fxamp.numerics.run import Call, arguments, call_of, check_module, in_float32
from fxamp.numerics.runner import Part
from fxamp.numerics.underflow import Underflow, underflows
from fxamp.numerics.weight_errors import WeightError, weight_errors, weight_table
from fxamp.value_types import tensors_in
from fxamp.words import listed

Loss = Callable[[Any], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class NodeError:
    """How far a node's value is from its fp32 value.

    Attributes:
        error: norm of the difference by the norm of the fp32 value; inf where the mixed value alone is not finite.
        introduced: how much larger that is than the largest error among its inputs: what the node itself adds.
        largest: largest absolute difference.
        flushed: share of the non-zero fp32 values that are zero in mixed precision.
        gradient: as `error`, of the loss's gradient with respect to the value; None without a loss.
        graph: number of the node's graph in `fxamp.report(converted)`; -1 where that shows none of the part.
        part: where forward runs as it is written, the path of the module that it calls as a graph.
    """

    name: str
    op: str
    colour: str
    precision: str
    module: str
    source: str
    error: float
    introduced: float
    largest: float
    flushed: float
    gradient: float | None
    graph: int = 0
    part: str = ""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A whole comparison; `str()` is a table, worst node first.

    Attributes:
        rows: worst first.
        output: largest error among the outputs.
        loss: the two losses (fp32, mixed), None without a loss function.
        not_finite: share of the outputs' numbers that are finite in neither run, and so are not compared.
        other_flags: paths of modules that are in training mode in one of the models only: both ran as `converted` has
            them.
        underflows: the first node that loses a tenth of its values to zero, and the first that so loses gradients.
        weights: the gradients of the parameters, worst first; empty without a loss function.
    """

    rows: tuple[NodeError, ...]
    output: float
    loss: tuple[float, float] | None
    underflows: tuple[Underflow, ...] = ()
    not_finite: float = 0.0
    other_flags: tuple[str, ...] = ()
    weights: tuple[WeightError, ...] = ()

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.rows)} nodes; print() gives the table>"

    def __str__(self) -> str:
        has_parts = any(row.part for row in self.rows)
        many = not has_parts and any(row.graph for row in self.rows)
        lines = [
            (
                *((row.part,) if has_parts else (row.graph,) if many else ()),
                row.name,
                row.op,
                row.precision,
                f"{row.error:.2e}",
                f"{row.introduced:.2e}",
                f"{row.largest:.2e}",
                f"{row.flushed:.1%}",
                "" if row.gradient is None else f"{row.gradient:.2e}",
                row.source.rpartition("/")[2],
            )
            for row in self.rows
        ]
        headers = (
            *(("part",) if has_parts else ("graph",) if many else ()),
            *("node", "op", "precision", "error", "introduced", "largest", "to 0", "gradient", "line"),
        )
        head = f"largest relative error of an output: {self.output:.2e}"
        if self.loss is not None:
            head += f"; loss {self.loss[0]:.6g} in float32, {self.loss[1]:.6g} in mixed precision"
        if self.not_finite:
            head += f"; {self.not_finite:.1%} of the outputs is finite in neither run and not compared: fxamp.find_nan"
        if self.other_flags:
            names = listed([name or "the model itself" for name in self.other_flags], 3)
            head += f"; train() or eval() differs in {names}: both ran as the converted model has it"
        tables = [tabulate(lines, headers=headers, disable_numparse=True)] if lines else []
        tables += [weight_table(self.weights)] if self.weights else []
        return "\n".join([head, *map(str, self.underflows), *tables])

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values; numbers that JSON does not know, such as an infinite error, as text."""
        return finite(dataclasses.asdict(self))  # type: ignore[no-any-return]


def finite(value: Any) -> Any:
    """Plain values with "inf" and "nan" as text."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def compare(
    model: nn.Module, converted: nn.Module, inputs: Any, loss_fn: Loss | None = None, scale: float = 1.0
) -> Comparison:
    """Compare a converted model with its fp32 run, node by node.

        print(fxamp.compare(model, converted, (x,), loss_fn=lambda output: output.float().pow(2).mean()))

    Args:
        model: the fp32 model; its parameters are used for the fp32 run.
        converted: what fxamp.convert gave for it.
        inputs: of one call, as `example_inputs` of convert().
        loss_fn: gives a scalar of the output; with it gradients are compared too, of the values and of the parameters.
        scale: loss scale of the mixed run; its gradients are divided by it again.

    Returns:
        The relative error of every node, the largest first; `str()` is a table. Where forward runs as it is written,
        of the nodes of each module that it calls as a graph, and of each linear layer and convolution. What data made
        of other sizes in the two runs (rows that a gate has sent elsewhere) has no row, and as an output an infinite
        error. Of a model that convert() was asked to leave as it is, the outputs' error alone.

    Raises:
        OptionError: `converted` is not converted, or not from such a model; no inputs, or a scale that is not positive.
    """
    if not (isinstance(scale, (int, float)) and 0 < scale < math.inf):
        raise OptionError(f"scale={scale!r} is not allowed. Give a positive, finite number, such as LossScaler's.")
    check_pair(model, converted)
    if engine_of(converted) is None:
        check_left(converted, "compare looks at its outputs only")
        return _compare_whole(model, converted, inputs, loss_fn)
    call = call_of(converted, inputs)
    mixed = record(call, None, loss_fn, scale, counting=True)
    with flags_of(converted, model) as flags, _attributes_of(call, model):
        other = dataclasses.replace(call, weights=model)
        exact = record(other, in_float32(call), loss_fn, as_float32=True, counting=True)
    lost = underflows(exact.flow, mixed.flow) if exact.flow and mixed.flow else ()
    rows = _rows(exact, mixed)
    output = error_of_all(exact.outputs, mixed.outputs)
    losses = None if exact.loss is None or mixed.loss is None else (exact.loss, mixed.loss)
    weights = tuple(weight_errors(exact, mixed, model))
    bad = share_not_finite(exact.outputs, mixed.outputs)
    return Comparison(tuple(rows), output, losses, lost, bad, flags, weights)


@contextlib.contextmanager
def _attributes_of(call: Call, model: nn.Module) -> Iterator[None]:
    """The model with what the converted one has in attributes that forward sets, such as a hidden state."""
    places = [] if call.variant is None else [place for place, _ in call.variant.captured.places_set]
    before = State(model)
    try:
        for place in places:
            if isinstance(place, Attribute) and not place.is_buffer:  # what an item held is not read
                place.put_back(model, place.held_in(call.model))
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def flags_of(converted: nn.Module, model: nn.Module) -> Iterator[tuple[str, ...]]:
    """The model in the modes, training or not, in which the converted one's modules are; gives paths that differ."""
    own = dict(model.named_modules())
    flags = tuple((path, part.training) for path, part in converted.named_modules() if path in own)
    differing = tuple(path for path, flag in flags if own[path].training != flag)
    with training_flags(model, flags):
        yield differing


def check_pair(model: nn.Module, converted: nn.Module) -> None:
    """Raise an OptionError where the two are no modules, in the wrong order, or have other parameters."""
    check_module(model, "model")
    check_module(converted, "converted")
    if engine_of(converted) is None and engine_of(model) is not None:
        raise OptionError(
            "the first model is converted and the second is not: compare takes (model, converted, inputs)."
        )
    one, other = ({name: tuple(value.shape) for name, value in m.named_parameters()} for m in (model, converted))
    differing = [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]
    if differing:
        name = differing[0]
        shapes = " and ".join(
            str(list(shape)) if shape is not None else "none" for shape in (one.get(name), other.get(name))
        )
        raise OptionError(
            f"the two models differ in {len(differing)} parameters, such as {name!r} ({shapes}): "
            f"give the {type(converted).__qualname__} that was converted, or one like it."
        )


def _compare_whole(model: nn.Module, other: nn.Module, inputs: Any, loss_fn: Loss | None) -> Comparison:
    """Two models without graphs: what they give, and no row."""
    args, kwargs = arguments(usable(inputs))
    check_not_empty((args, kwargs), "the inputs are")
    given, losses = [], []
    with flags_of(other, model) as flags:
        for each in (model, other):
            with state_kept(each), torch.no_grad():
                given.append(each(*args, **kwargs))
                losses.append(None if loss_fn is None else float(loss_of(given[-1], loss_fn)))
    output = error_of_all(*map(floats_in, given))
    one, two = losses
    return Comparison((), output, None if one is None or two is None else (one, two), other_flags=flags)


def _rows(exact: Recorded, mixed: Recorded) -> list[NodeError]:
    rows: list[NodeError] = []
    for number, part in exact.parts.items():
        other = mixed.parts.get(number)
        if other is not None and other.identity == part.identity:
            rows += _rows_of(part, other, exact, mixed)
    return sorted(rows, key=lambda row: -row.error)


def _rows_of(fp32: Part, part: Part, exact: Recorded, mixed: Recorded) -> Iterator[NodeError]:
    nodes = {node.name: node for node in part.variant.graph.nodes}
    errors: dict[str, float] = {}
    for node in fp32.variant.graph.nodes:
        name, real, key = node.name, nodes.get(node.name), (part.identity, node.name)
        if real is None or not exact.values.get(key) or not mixed.values.get(key):
            continue
        are_comparable = holds_all_of if _is_padded(node, real) else are_alike
        if not all(map(are_comparable, exact.values[key], mixed.values[key])):
            continue
        errors[name] = max(map(error_of, exact.values[key], mixed.values[key]))
        read = [_made_by(exact, fp32, given, node) for given in node.all_input_nodes]
        before = max((errors.get(writer, errors.get(given, 0.0)) for given, writer in read), default=0.0)
        mark = ir.mark(real)
        gradients = exact.gradients.get(key), mixed.gradients.get(key)
        yield NodeError(
            name,
            mark.op,
            mark.colour,
            mark.precision,
            part.module_path(real),
            ir.source_line(real),
            error=errors[name],
            introduced=introduced(errors[name], before),
            largest=max(map(largest_difference, exact.values[key], mixed.values[key])),
            flushed=max(map(share_flushed, exact.values[key], mixed.values[key])),
            gradient=error_of(gradients[0][0], gradients[1][0]) if gradients[0] and gradients[1] else None,
            graph=part.graph,
            part=part.turn.path if part.turn is not None else "",
        )


def _is_padded(exact: fx.Node, mixed: fx.Node) -> bool:
    """Whether the mixed graph holds what an fp32 node gives with a padding."""
    shapes = [[part.shape for part in tensors_in(ir.mark(node).type)] for node in (exact, mixed)]
    return shapes[0] != shapes[1]


def _made_by(recorded: Recorded, part: Part, given: fx.Node, reader: fx.Node) -> tuple[str, str]:
    """The value's node, and the one that made what is read of it: the last that wrote it in place, or itself."""
    return given.name, recorded.writers.get(((part.identity, given.name), reader.name), given.name)
