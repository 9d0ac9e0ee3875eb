"""Whether a function under `torch.vmap` may run low as a whole, as far as its own graph tells.

Nothing inside is cast, so that nothing inside may need float32: one operand that float16 does not hold, or one result
that rounding makes another, keeps the whole function in float32. What the lists say of its ops is the rules' to ask.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.dtypes import LOW_DTYPES, is_inexact
from fxamp.fakes import UNKNOWN
from fxamp.lists import DOMAIN_SENSITIVE, TRAITS
from fxamp.opnames import canonical_name

_OTHER_DTYPES = TRAITS["factory"] | {"to", "type", "type_as", "float", "double", "half", "bfloat16", "as_tensor"}
"""Ops that give another dtype than that of what they read."""

_SELECTIONS = frozenset("embedding gather getitem index_select one_hot scatter take take_along_dim where".split())
"""Their integers select, and take part in no arithmetic."""

_ADDENDS = frozenset({"add", "sub", "rsub"})
_SMALLEST_ADDEND = max(torch.finfo(low).eps for low in LOW_DTYPES) / 2
"""A smaller number is lost beside 1."""


def ops_inside(graph: fx.Graph) -> tuple[ir.OpInside, ...]:
    """The ops of one sample's graph, each once."""
    ops: dict[ir.OpInside, None] = {}
    for node in _calls(graph):
        modules = tuple((node.meta.get("nn_module_stack") or {}).values())
        ops.update(dict.fromkeys(node.meta.get(ir.INSIDE, [ir.OpInside(canonical_name(node.target), modules)])))
    return tuple(ops)


def all_may_be_low(graph: fx.Graph) -> bool:
    """Whether nothing in one sample's graph is known to need float32.

    Args:
        graph: as traced: what lies around it is still read from there.
    """
    return all(node.meta[ir.MAY_BE_LOW] if ir.INSIDE in node.meta else _may_be_low(node) for node in _calls(graph))


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op.startswith("call") and ir.SAMPLE not in node.meta]


def _may_be_low(node: fx.Node) -> bool:
    op = canonical_name(node.target)
    given = pytree.tree_leaves((node.args, node.kwargs))
    is_of_another_dtype = op in _OTHER_DTYPES or any(isinstance(each, torch.dtype) for each in given)
    if is_of_another_dtype or node.meta.get("autocast") == "off":
        return False
    numbers = [each for each in given if type(each) in (int, float)]
    return (
        all(_is_held(number, op) for number in numbers)
        and not _computes_with_numbers(node, op)
        and not any(isinstance(ir.argument_of(node, at, ""), fx.Node) for at in DOMAIN_SENSITIVE.get(op, ()))
        and not _decides(node)
        and not (op == "mul" and _multiplies_itself(node))
        and not _is_dot_product(node, op)
    )


def _is_held(number: float, op: str) -> bool:
    held = torch.finfo(torch.float16)
    smallest = _SMALLEST_ADDEND if op in _ADDENDS else held.tiny
    return number == 0 or smallest <= abs(number) <= held.max


def _computes_with_numbers(node: fx.Node, op: str) -> bool:
    """Whether it reads a number that another call may change, or integers as numbers."""
    if op in TRAITS["view"] | TRAITS["shape_result"] | _SELECTIONS:
        return False
    for value in map(_value_of, node.all_input_nodes):
        if type(value) in (int, float):
            return True
        if isinstance(value, torch.Tensor) and not is_inexact(value.dtype) and value.dtype != torch.bool:
            return True
    return False


def _decides(node: fx.Node) -> bool:
    """Whether it tells where values lie, or on which side of a bound: rounded ones lie elsewhere."""
    are_rounded = any(found.is_floating_point() for each in node.all_input_nodes for found in _tensors(each))
    return are_rounded and any(not is_inexact(found.dtype) for found in _tensors(node))


def _multiplies_itself(node: fx.Node) -> bool:
    """Whether it is a square, which overflows float16 from 256."""
    one, other = (ir.argument_of(node, *place) for place in ((0, "input"), (1, "other")))
    return isinstance(one, fx.Node) and isinstance(other, fx.Node) and _behind_views(one) is _behind_views(other)


def _behind_views(node: fx.Node) -> fx.Node:
    while node.op.startswith("call") and canonical_name(node.target) in TRAITS["view"] - {"getitem", "dropout"}:
        if not (node.args and isinstance(node.args[0], fx.Node)):
            break
        node = node.args[0]
    return node


def _is_dot_product(node: fx.Node, op: str) -> bool:
    """Whether products are added up to one number, or by an equation that may do so."""
    value = _value_of(node)
    return op == "einsum" or (op in ("matmul", "inner", "dot", "vdot") and not getattr(value, "ndim", 0))


def _value_of(node: fx.Node) -> Any:
    return node.meta.get("val", UNKNOWN)


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    return (each for each in pytree.tree_leaves(_value_of(node)) if isinstance(each, torch.Tensor))
