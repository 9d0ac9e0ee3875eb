"""Which of its arguments a node writes into."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxamp import ir

# Tensors have no __imatmul__: x @= w makes a new value.
INPLACE_OPERATORS: frozenset[Any] = frozenset(
    getattr(operator, name)
    for name in ("iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split())
)
_INPLACE_METHODS = frozenset({"__setitem__", *(f"__{function.__name__}__" for function in INPLACE_OPERATORS)})
_NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size)
# Functions with an `inplace` argument, and the position it has when it is not a keyword.
INPLACE_FLAG = {
    "relu": 1,
    "relu6": 1,
    "hardswish": 1,
    "hardsigmoid": 1,
    "mish": 1,
    "silu": 1,
    "elu": 2,
    "selu": 1,
    "celu": 2,
    "leaky_relu": 2,
    "rrelu": 4,
    "hardtanh": 3,
    "threshold": 3,
    "dropout": 3,
    "alpha_dropout": 3,
    "dropout1d": 3,
    "dropout2d": 3,
    "dropout3d": 3,
    "feature_dropout": 3,
    "feature_alpha_dropout": 3,
}


def mutated(node: fx.Node) -> list[fx.Node]:
    """The argument nodes whose storage this node writes into.

    A number has none: `rows += 1` makes a new one.
    """
    written: list[fx.Node] = []
    if "out" in node.kwargs:
        written += ir.nodes_in(node.kwargs["out"])
    if node.op == "call_method":
        name = str(node.target)
        if _is_inplace_name(name) or name in _INPLACE_METHODS:
            written += ir.nodes_in(node.args[:1])
    elif node.op == "call_function":
        written += _mutated_by_function(node, node.target)
    elif node.op == "call_module" and ir.mark(node).op in INPLACE_FLAG and node.meta.get("inplace"):
        written += ir.nodes_in(node.args[:1])
    if places := node.meta.get(ir.WRITES):
        given = node.all_input_nodes
        written += [given[place] for place in places if place < len(given)]
    return [each for each in dict.fromkeys(written) if not isinstance(each.meta.get("val"), _NUMBERS)]


# Ops that give a tensor other sizes where it stands; its views keep theirs.
_RESHAPING = frozenset(
    f"{name}_" for name in ("as_strided resize resize_as set squeeze swapaxes swapdims t transpose unsqueeze".split())
)


def reshaped(graph: fx.Graph) -> set[fx.Node]:
    """The values that have other sizes later than where they are made (`x.t_()`), under all names of the same tensor.

    What reads them sees one size or the other, by where it stands.
    """
    first: dict[fx.Node, fx.Node] = {}  # a node that gives the tensor that another has given
    found: set[fx.Node] = set()
    for node in graph.nodes:
        written = mutated(node)
        if len(written) == 1 and node.args and written[0] is node.args[0]:
            first[node] = first.get(written[0], written[0])
            if _name_of(node) in _RESHAPING:
                found.add(first[node])
    values = {id(node.meta["val"]) for node in found if isinstance(node.meta.get("val"), torch.Tensor)}
    return {
        node for node in graph.nodes if found and (first.get(node, node) in found or id(node.meta.get("val")) in values)
    }


def _name_of(node: fx.Node) -> str:
    return ir.target_name(node).partition(".")[0]  # of an overload: "t_.default"


def run_and_note_writes(node: fx.Node, values: dict[fx.Node, Any], run: Callable[..., Any]) -> Any:
    """What a node gives for the `values` of its operands; which of them it writes is marked on it.

    torch's own ops tell by their names, others only so.
    """
    given = [values[operand] for operand in node.all_input_nodes]
    versions = list(map(_version, given))
    result = run(node, values.__getitem__)
    written = [place for place, value in enumerate(given) if _version(value) != versions[place]]
    node.meta.pop(ir.WRITES, None)
    if written:
        node.meta[ir.WRITES] = tuple(written)
    return result


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, torch.Tensor) else None


def _mutated_by_function(node: fx.Node, target: Any) -> list[fx.Node]:
    if isinstance(target, torch._ops.OpOverload):
        return _mutated_by_schema(node, target)
    name = getattr(target, "__name__", "")
    if target in INPLACE_OPERATORS or target is operator.setitem or (_is_inplace_name(name) and not _is_word(target)):
        return ir.nodes_in(node.args[:1] or ir.argument_of(node, 0, "input"))
    if _asks_inplace(node, name):
        return ir.nodes_in(ir.argument_of(node, 0, "input"))
    if name in ("batch_norm", "instance_norm"):
        first = 1 if str(getattr(target, "__module__", "")).endswith("functional") else 3
        return ir.nodes_in(
            (ir.argument_of(node, first, "running_mean"), ir.argument_of(node, first + 1, "running_var"))
        )
    if name in ("embedding", "embedding_bag") and ir.argument_of(node, 3, "max_norm") is not None:
        return ir.nodes_in(ir.argument_of(node, 1, "weight"))
    return []


def _mutated_by_schema(node: fx.Node, overload: torch._ops.OpOverload) -> list[fx.Node]:
    written: list[fx.Node] = []
    for position, argument in enumerate(overload._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += ir.nodes_in(ir.argument_of(node, position, argument.name))
    return written


def _is_inplace_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _is_word(target: Any) -> bool:
    """Whether a function's name ends as it does because it would be a word of Python: `operator.and_`."""
    return getattr(target, "__module__", None) == operator.add.__module__


def _asks_inplace(node: fx.Node, name: str) -> bool:
    return name in INPLACE_FLAG and ir.argument_of(node, INPLACE_FLAG[name], "inplace") is True
