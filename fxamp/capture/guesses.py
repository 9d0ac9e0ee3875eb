"""Values whose sizes depend on data: guessed from full lengths, right in rank and dtype, and asked for nothing else.

    data, batch_sizes = _pack_padded_sequence(x, lengths)     # how many rows follows from the lengths
    chosen = x[x > 0]                                          # as many as are true, all of them at most

A recurrent module behind a packed sequence must know whether its input is batched; costs and paddings behind it want
sizes; which tensors an op gives (`chosen.max(0)`) is known from running it. A decision on sizes never sees a guess, and
none is called static.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from fxamp import ir
from fxamp.fakes import UNKNOWN
from fxamp.opnames import canonical_name
from fxamp.recurrent_fakes import SEQUENCES, like_recurrent


def known_or_guessed(node: fx.Node) -> Any:
    """A node's fake value, or its guess."""
    return node.meta.get("val", node.meta.get(ir.GUESS, UNKNOWN))


def guess(node: fx.Node, run: Callable[[Callable[[fx.Node], Any]], Any]) -> Any:
    """A value with the right rank and dtype for a node that could not be run; UNKNOWN where there is none.

    Args:
        run: runs the node for given values of its inputs.
    """
    values = {given: known_or_guessed(given) for given in node.all_input_nodes}
    try:
        if node.target in _PACKED and _is_packed(node, values):
            return _PACKED[node.target](*fx.node.map_arg(node.args, values.__getitem__))
        if node.target is operator.getitem and _has_numbers(sizes := values[node.all_input_nodes[0]]):
            return sizes[node.args[1]]
        if (chosen := _CHOOSING.get(canonical_name(node.target))) is not None:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            if (found := chosen(*args, **kwargs)) is not UNKNOWN:
                return found
        values = {
            given: int(value) if _has_numbers(value) and not value.dim() else value for given, value in values.items()
        }
        return UNKNOWN if any(value is UNKNOWN for value in values.values()) else run(values.__getitem__)
    except Exception:  # a guess decides nothing that could fail
        return UNKNOWN


def _has_numbers(value: Any) -> bool:
    """Whether it is the guess of a tensor of sizes, which is no fake: a size can be read from it."""
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def _is_packed(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Whether the second argument holds the lengths or batch sizes (of a recurrent kernel: no states)."""
    second = values.get(node.args[1], UNKNOWN) if isinstance(node.args[1], fx.Node) else UNKNOWN
    return isinstance(second, torch.Tensor) and not second.is_floating_point()


def _pack(padded: Any, lengths: Any, batch_first: bool) -> Any:
    steps = padded.shape[1 if batch_first else 0]
    batch = padded.shape[0 if batch_first else 1]
    return padded.flatten(0, 1), torch.full((steps,), int(batch))  # real numbers: first states take a size from them


def _pad(data: Any, batch_sizes: Any, batch_first: bool, *_: Any) -> Any:
    steps = max(int(batch_sizes.shape[0]), 1)
    batch = max(int(data.shape[0]) // steps, 1)
    leading = (batch, steps) if batch_first else (steps, batch)
    return data.new_empty((*leading, *data.shape[1:])), torch.empty(batch, dtype=torch.int64)


def _rows(tensor: Any, index: Any) -> Any:
    """`x[mask]`: rows are chosen, by a mask of the first dimensions."""
    if not isinstance(index, torch.Tensor) or index.dtype not in (torch.bool, torch.uint8) or not index.dim():
        return UNKNOWN
    return tensor.new_empty((index.numel(), *tensor.shape[index.dim() :])).requires_grad_(tensor.requires_grad)


def _places(tensor: Any, as_tuple: bool = False) -> Any:
    if as_tuple:
        return tuple(tensor.new_empty(tensor.numel(), dtype=torch.int64) for _ in tensor.shape)
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _where(condition: Any, *values: Any) -> Any:
    return UNKNOWN if values else _places(condition, as_tuple=True)


def _elements(tensor: Any, mask: Any) -> Any:
    count = torch.broadcast_shapes(tensor.shape, mask.shape).numel()  # type: ignore[no-untyped-call]
    return tensor.new_empty(count).requires_grad_(tensor.requires_grad)


def _unique(
    tensor: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: Any = None
) -> Any:
    many = tensor.numel() if dim is None else tensor.shape[dim]
    values = tensor.new_empty(many if dim is None else tensor.shape)
    inverse = tensor.new_empty(tensor.shape if dim is None else many, dtype=torch.int64)
    parts = (values, *(inverse,) * return_inverse, *(inverse.new_empty(many),) * return_counts)
    return parts if len(parts) > 1 else values


# Ops that give as many values as the data says.
_CHOOSING: dict[str, Callable[..., Any]] = {
    "argwhere": _places,
    "getitem": _rows,
    "masked_select": _elements,
    "nonzero": _places,
    "unique": _unique,
    "where": _where,
}
_PACKED: dict[Any, Callable[..., Any]] = {
    torch._pack_padded_sequence: _pack,
    torch._pad_packed_sequence: _pad,
    **dict.fromkeys(SEQUENCES, like_recurrent),
}
