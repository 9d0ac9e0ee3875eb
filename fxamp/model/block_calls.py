"""The calls of blocks, which are converted by themselves, in the graph around them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fxamp import ir
from fxamp.model.variant import Variant


def calls_of_blocks(variant: Variant, device: torch.device) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Path, arguments and keywords of each boundary that a graph calls, tensors as empty ones of their types.

    Calls with values whose types are not known are left out.
    """
    for node in nodes_of_blocks(variant):
        with contextlib.suppress(LookupError):
            yield str(node.target), *arguments_of(node, device)


def nodes_of_blocks(variant: Variant) -> list[fx.Node]:
    """The nodes of a graph that call a boundary."""
    return [node for node in variant.graph.nodes if node.op == "call_module" and node.meta.get("boundary")]


def arguments_of(node: fx.Node, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keywords of a call, tensors as empty ones of their types.

    Raises:
        LookupError: the type of one is not known.
    """
    args = tuple(_as_called(each, device) for each in node.args)
    return args, {name: _as_called(each, device) for name, each in node.kwargs.items()}


def _as_called(argument: Any, device: torch.device) -> Any:
    if isinstance(argument, fx.Node):
        return _empty(ir.mark(argument).type, device)
    if isinstance(argument, (list, tuple)) and type(argument) is not torch.Size:
        return (list if isinstance(argument, list) else tuple)(_as_called(each, device) for each in argument)
    if isinstance(argument, dict):
        return {name: _as_called(each, device) for name, each in argument.items()}
    return argument


def _empty(kind: Any, device: torch.device) -> Any:
    if isinstance(kind, tuple):
        return tuple(_empty(each, device) for each in kind)
    if kind is None or kind.dtype is None or kind.shape is None:
        raise LookupError("a value whose type is not known crosses a boundary")
    return torch.empty(kind.shape, dtype=kind.dtype, device=device).requires_grad_(kind.requires_grad)
