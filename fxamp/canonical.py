"""Text of a graph by which two graphs are compared: of one that a capture made twice, and in tests."""

from typing import Any

import torch
from torch import fx

from fxamp.inplace import mutated
from fxamp.opnames import canonical_name
from fxamp.switches import set_switches, switches_found


def canonical_text(graph: fx.Graph) -> str:
    """Text of a graph that depends neither on node names nor on the order of nodes without effects.

    y = linear(x, w) and z = linear(x, w) give the same text. Nodes are numbered as they are reached from what has
    effects (writes, modes, unknown calls), in order, and from the outputs; what nothing reaches is left out.
    """
    numbers: dict[fx.Node, str] = {}
    lines: list[str] = []
    for root in (node for node in graph.nodes if node.op in ("placeholder", "output") or _has_effects(node)):
        pending = [root]
        while pending:
            missing = [given for given in pending[-1].all_input_nodes if given not in numbers]
            if pending[-1] in numbers or not missing:
                node = pending.pop()
                if node not in numbers:
                    numbers[node] = f"%{len(numbers)}"
                    lines.append(_line(node, numbers))
            else:
                pending += reversed(missing)
    return "\n".join(lines)


def _has_effects(node: fx.Node) -> bool:
    if node.op == "call_module":
        return True  # it may keep state
    return node.op.startswith("call") and (node.is_impure() or bool(mutated(node)) or _is_mode(node))


def _is_mode(node: fx.Node) -> bool:
    return node.target in (torch._C._set_grad_enabled, torch.is_grad_enabled, switches_found, set_switches)


def _line(node: fx.Node, numbers: dict[fx.Node, str]) -> str:
    args = fx.node.map_arg(node.args, lambda value: _Named(numbers[value]))
    kwargs = fx.node.map_arg(dict(node.kwargs), lambda value: _Named(numbers[value]))
    target = node.target if isinstance(node.target, str) else canonical_name(node.target)
    if node.op == "placeholder":
        target, args = "", ()
    described = ", ".join([*(_text(part) for part in args), *(f"{k}={_text(v)}" for k, v in kwargs.items())])
    return f"{numbers[node]} = {node.op} {target}({described})"


class _Named(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _text(argument: Any) -> str:
    return str(argument) if isinstance(argument, _Named) else repr(argument)
