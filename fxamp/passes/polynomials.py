"""Expressions of additions and products as polynomials, so that every way to write one is the same."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import fx

from fxamp import ir
from fxamp.inplace import mutated

Powers = tuple[int, int]
Polynomial = dict[Powers, float]
"""Coefficients by the powers of two variables: {(1, 0): 0.5, (1, 1): 0.5} is x / 2 + x * y / 2."""

_OPS = frozenset({"add", "sub", "mul", "div", "neg", "pow", "square"})
_DEPTH = 8
_HIGHEST = 4


def polynomial(value: Any, variables: Mapping[fx.Node, Powers], depth: int = _DEPTH) -> Polynomial | None:
    """The polynomial that `value` computes of the variables; None where it computes something else.

    Args:
        depth: of the expression; a deeper one counts as something else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {(0, 0): float(value)}
    if not isinstance(value, fx.Node):
        return None
    if value in variables:
        return {variables[value]: 1.0}
    if not depth or not is_term(value):
        return None
    operands = [polynomial(given, variables, depth - 1) for given in value.args]
    known = [operand for operand in operands if operand is not None]
    return _combine(ir.mark(value).op, known) if len(known) == len(operands) else None


def is_term(node: fx.Node) -> bool:
    """Whether a node adds or multiplies, out of place, and does nothing else."""
    return ir.mark(node).op in _OPS and not node.kwargs and len(node.args) <= 2 and not mutated(node)


def terms_below(node: fx.Node, stop: Collection[fx.Node] = (), depth: int = _DEPTH) -> dict[fx.Node, None]:
    """The node and those it is computed from by adding and multiplying, down to `stop`, which is left out.

    Nodes that do neither are left out too: they are what the expression is of.
    """
    if node in stop or not is_term(node) or not depth:
        return {}
    found = {node: None}
    for given in node.all_input_nodes:
        found.update(terms_below(given, stop, depth - 1))
    return found


def _combine(op: str, operands: list[Polynomial]) -> Polynomial | None:
    if op == "neg" and len(operands) == 1:
        return _times(operands[0], {(0, 0): -1.0})
    if op == "square" and len(operands) == 1:
        return _times(operands[0], operands[0])
    if len(operands) != 2:
        return None
    left, right = operands
    if op in ("add", "sub"):
        return _plus(left, right if op == "add" else _times(right, {(0, 0): -1.0}))
    if op == "mul":
        return _times(left, right)
    number = _number(right)
    if op == "div" and number:
        return _times(left, {(0, 0): 1 / number})
    if op == "pow" and number is not None and number.is_integer() and 0 < number <= _HIGHEST:
        result = left
        for _ in range(int(number) - 1):
            result = _times(result, left)
        return result
    return None


def _number(found: Polynomial) -> float | None:
    return found[(0, 0)] if found.keys() == {(0, 0)} else None


def _plus(left: Polynomial, right: Polynomial) -> Polynomial:
    return {powers: left.get(powers, 0.0) + right.get(powers, 0.0) for powers in {**left, **right}}


def _times(left: Polynomial, right: Polynomial) -> Polynomial:
    result: Polynomial = {}
    for (a, b), one in left.items():
        for (c, d), other in right.items():
            result[(a + c, b + d)] = result.get((a + c, b + d), 0.0) + one * other
    return result
