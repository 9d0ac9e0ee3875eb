"""Change one argument, or the noted shape, of a node that is padded."""

import dataclasses
import math
from typing import Any

from torch import fx

from fxamp import ir
from fxamp.passes.padding_flow import Planned
from fxamp.value_types import TensorType


def keep_scale(planned: Planned) -> None:
    """Attention divides by the root of the head size, which must stay the model's."""
    node = planned.gemm.node
    size = next((dim.size for dim, _ in planned.dims if dim.name == "K"), None)
    if size is not None and node.kwargs.get("scale") is None:
        node.kwargs = {**node.kwargs, "scale": 1 / math.sqrt(size)}


def grow_type(node: fx.Node, dims: dict[int, int], number: int | None = None) -> None:
    """Note that dimensions of a node's value, or of one value of its tuple, are longer."""
    given = ir.mark(node).type
    kind = given if number is None else given[number]  # type: ignore[index]
    assert isinstance(kind, TensorType) and kind.shape is not None
    shape = list(kind.shape)
    for dim, extra in dims.items():
        shape[dim] += extra
    longer = dataclasses.replace(kind, shape=tuple(shape))
    if number is not None:
        assert isinstance(given, tuple)
        ir.set_mark(node, type=(*given[:number], longer, *given[number + 1 :]))
    else:
        ir.set_mark(node, type=longer)


def argument_at(node: fx.Node, at: tuple[int, int | None]) -> fx.Node:
    """An argument, or one of those in a list of them."""
    argument: Any = node.args[at[0]]
    found = argument if at[1] is None else argument[at[1]]
    assert isinstance(found, fx.Node)
    return found


def put_at(node: fx.Node, at: tuple[int, int | None], value: fx.Node) -> None:
    args: list[Any] = list(node.args)
    if at[1] is None:
        args[at[0]] = value
    else:
        parts = list(args[at[0]])
        parts[at[1]] = value
        args[at[0]] = type(args[at[0]])(parts)
    node.args = tuple(args)
