"""What a padded value holds, and what ops that work element by element make of it.

A padded value has `extra` more elements in one dimension, all of them the same finite number (`content`). That an
op's result there, and its slope, are finite is not looked up: the op is run on the number.
"""

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fxamp import ir
from fxamp.lists import TRAITS
from fxamp.passes.gemm_types import Place
from fxamp.passes.static_dims import Static, is_static
from fxamp.value_types import TensorType


@dataclasses.dataclass(frozen=True)
class Padding:
    """How a value is padded.

    Attributes:
        dim: from the front.
        extra: elements added at its end.
        content: the number in each of them.
        masked: they hold the lowest number of the dtype, so that a softmax over `dim` gives them zero.
        blocks: equal parts of the dimension, each of which has `extra` elements at its end.
    """

    dim: int
    extra: int
    content: float = 0.0
    masked: bool = False
    blocks: int = 1


@dataclasses.dataclass(frozen=True)
class Kept:
    """An op reads a padded value and gives a padded one.

    Attributes:
        pads: arguments that are parameters and must be padded with zeros.
        grown: index of the size argument of a reshape that grows by `extra`, None where no argument does.
        with_stats: it is a batch norm, whose statistics and weights are padded inside it.
    """

    padding: Padding
    pads: tuple[Place, ...] = ()
    grown: int | None = None
    with_stats: bool = False


# Each element of the result depends on one element of each operand. What they give at the padding is computed.
_PER_ELEMENT_OPS = """
    abs add asin asinh atan celu clamp cos cosh deg2rad div elu erf erfc exp exp2 expm1 float_power gelu
    hardshrink hardsigmoid hardswish hardtanh leaky_relu log1p logsigmoid maximum minimum mish mul neg pow
    relu relu6 rsub selu sigmoid sign silu sin sinh softplus softshrink softsign square sub tan tanh
    tanhshrink threshold xlogy
"""
PER_ELEMENT = frozenset(_PER_ELEMENT_OPS.split())

# Ops whose result holds the numbers of their first argument, in another dtype, layout or place.
_SAME_OPS = """
    alias bfloat16 clone contiguous cpu cuda detach double float half identity to type_as
"""
SAME = frozenset(_SAME_OPS.split())


def per_element(node: fx.Node, given: Mapping[fx.Node, Padding], static: Mapping[fx.Node, Static]) -> Kept | str:
    """The padding that is left behind an op that works element by element, or why none can be."""
    op, out = ir.mark(node).op, ir.shape_of(node)
    placed = {value: _dim_in_result(value, padding.dim, out) for value, padding in given.items()}
    dims = set(placed.values())
    extras = {padding.extra for padding in given.values()}
    if out is None or len(dims) != 1 or len(extras) != 1:
        return f"{op} reads values that are padded differently"
    if any(padding.masked for padding in given.values()):
        return f"{op} would change the mask that hides the padding from the loss"
    dim, values = dims.pop(), {value: padding.content for value, padding in given.items()}
    pads = []
    for operand in ir.arguments(node):
        answer = _other_operand(node, operand, given, values, dim - len(out), static)
        if isinstance(answer, str):
            return answer
        pads += [answer] if answer is not None else []
    content = _value_at(node, values)
    if content is None:
        return f"{op} is not finite, or has no finite gradient, at the padding"
    return Kept(Padding(dim, extras.pop(), content), tuple(pads))


def _dim_in_result(value: fx.Node, dim: int, out: tuple[int, ...] | None) -> int:
    return dim + len(out or ()) - len(ir.shape_of(value) or ())


def _other_operand(
    node: fx.Node,
    operand: ir.Operand,
    given: Mapping[fx.Node, Padding],
    values: dict[fx.Node, float],
    back: int,
    static: Mapping[fx.Node, Static],
) -> Place | str | None:
    """How an operand takes part: None as it is, a Place to pad, or the reason why not; sets its value."""
    value, op = operand.value, ir.mark(node).op
    if value in given:
        return None
    shape = ir.shape_of(value)
    if shape is None:
        number = value.meta.get("val")
        if isinstance(number, (int, float)) and op in ("mul", "div"):
            return None
        return f"{op} reads {value.name}, whose value is not known"
    if len(shape) < -back or (shape[back] == 1 and is_static(static, value, back)):
        if op == "mul" and not any(values[source] for source in given) and _is_always_finite(value):
            values[value] = 1.0
            return None
        return f"{op} reads {value.name}, which could be infinite where the padding is zero, or make it so"
    if is_parameter(value):
        values[value] = 0.0
        return Place(operand.position, operand.keyword, len(shape) + back)
    return f"{op} reads {value.name}, which is not padded"


def is_parameter(value: fx.Node) -> bool:
    """Whether a value is a parameter or buffer, or the cast of one."""
    return ir.is_weight(value) or ir.mark(value).role == "weight cast"


def _is_always_finite(value: fx.Node) -> bool:
    """Whether a value is finite whatever the data: a parameter, a gate, a mask."""
    kind = ir.mark(value).type
    if is_parameter(value) or ir.mark(value).op in TRAITS["bounded"]:
        return True
    if isinstance(kind, TensorType) and kind.dtype is not None and not kind.dtype.is_floating_point:
        return True
    source = value.args[0] if value.args else None
    moves = ir.mark(value).op in SAME or ir.mark(value).op in TRAITS["view"]
    return moves and isinstance(source, fx.Node) and _is_always_finite(source)


def _value_at(node: fx.Node, values: Mapping[fx.Node, float]) -> float | None:
    """What a per-element op gives for these numbers; None where that, or a gradient of it, is not finite."""
    with _disable_current_modes(), torch.enable_grad(), torch._C.DisableTorchFunction():
        leaves = {value: _scalar(value, number) for value, number in values.items()}
        copies = lambda value: leaves[value] * 1 if value in leaves else value.meta.get("val")  # noqa: E731
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), copies)
        try:
            call = getattr(args[0], node.target) if isinstance(node.target, str) else node.target
            result = call(*args[1:], **kwargs) if isinstance(node.target, str) else call(*args, **kwargs)
            slopes = torch.autograd.grad(result, list(leaves.values()), allow_unused=True)
        except Exception:
            return None
    numbers = [float(result.detach()), *(float(slope) for slope in slopes if slope is not None)]
    return numbers[0] if all(map(math.isfinite, numbers)) else None


def _scalar(value: fx.Node, number: float) -> torch.Tensor:
    kind = ir.mark(value).type
    dtype = kind.dtype if isinstance(kind, TensorType) and kind.dtype is not None else torch.float32
    floating = dtype.is_floating_point
    return torch.tensor(number, dtype=dtype if floating else torch.float32, device="cpu", requires_grad=True)
