"""Rewrite in-place ops that could not keep their meaning under mixed precision."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxamp import ir
from fxamp.inplace import INPLACE_FLAG, mutated
from fxamp.passes.alias import Storage, may_share
from fxamp.passes.base import Pass
from fxamp.passes.literals import Fit
from fxamp.passes.policy import Policy
from fxamp.passes.rules import apply_rules
from fxamp.passes.ruling import Ruling


@dataclasses.dataclass(frozen=True)
class SettleWrites(Pass):
    """Make sure that a written storage can have one precision, and no write is lost.

        y = linear(x, w); y.exp_(); z = y + 1          # linear is low, exp_ must be float32
        y = linear(x, w); c = y.clone(); c.exp_(); z = c + 1

    1. A low GEMM result that is later written by a float32 op, or shares storage with such a value, is copied
       first; every reader reads the copy, so every reader sees the write.
    2. An in-place GEMM on storage that is float32 is computed aside and copied in; so is a float32 op on a buffer that
       is stored low (O3).
    """

    policy: Policy
    fit_of: Callable[[fx.Node], Fit]

    def apply(self, graph: fx.Graph) -> bool:
        ruling = apply_rules(graph, self.policy, self.fit_of)
        split = [node for storage in ruling.aliases.storages for node in _to_separate(ruling, storage)]
        for node in split:
            _separate(graph, node)
        return bool(split)


def _to_separate(ruling: Ruling, storage: Storage) -> list[fx.Node]:
    """The nodes that make low values in a storage that must be high, and float32 writes into one that is stored low."""
    nodes = [node for node in storage.nodes if node in ruling.participants]
    if _is_stored_low(storage):
        return [node for node in nodes if mutated(node) and ruling.is_fixed(node, "high") and can_separate(node)]
    if not must_be_high(ruling, storage):
        return []
    return [node for node in nodes if ruling.is_fixed(node, "low") and can_separate(node)]


def must_be_high(ruling: Ruling, storage: Storage) -> bool:
    """Whether a written storage is float32: it is the caller's, or a rule says so of a node in it.

    A buffer that is stored low (O3) is not.
    """
    if _is_stored_low(storage):
        return False
    return storage.external or any(
        ruling.is_fixed(node, "high") for node in (*storage.nodes, *storage.writers) if node in ruling.participants
    )


def _is_stored_low(storage: Storage) -> bool:
    return any(node.meta.get("stored_low") for node in storage.nodes)


def can_separate(node: fx.Node) -> bool:
    """Whether a low node can be freed from its storage: it makes a new value, or has an out-of-place twin."""
    if node.op in ("placeholder", "get_attr"):
        return False
    written = mutated(node)
    if written:
        return _twin(node) is not None
    return not may_share(node, []) and (not ir.is_tuple(node) or all(_place(user) is not None for user in node.users))


def _place(user: fx.Node) -> int | None:
    """Which of several results a node takes, counted from the first; None where it takes them in any other way."""
    if ir.mark(user).op != "getitem" or not isinstance(user.args[1], int):
        return None
    results: Any = ir.mark(user.args[0]).type  # type: ignore[arg-type]
    return int(user.args[1] % len(results))


def _separate(graph: fx.Graph, node: fx.Node) -> None:
    if mutated(node):
        _compute_aside(graph, node)
    elif ir.is_tuple(node):
        items: dict[int | None, fx.Node] = {}
        for item in [user for user in graph.nodes if user in node.users]:
            if items.setdefault(_place(item), item) is not item:
                item.replace_all_uses_with(items[_place(item)])  # one copy of each, which all of its readers see
                graph.erase_node(item)
        for item in items.values():
            _copy_result(graph, item)
    else:
        _copy_result(graph, node)


def _copy_result(graph: fx.Graph, node: fx.Node) -> None:
    users = list(node.users)
    with graph.inserting_after(node):
        copy = graph.call_method("clone", (node,))
    copy.meta.update(node.meta)
    ir.set_mark(copy, op="clone")
    for user in users:
        user.replace_input_with(node, copy)


def _compute_aside(graph: fx.Graph, node: fx.Node) -> None:
    """`x.addmm_(a, b)` -> `x.copy_(x.addmm(a, b))`."""
    written, twin = mutated(node)[0], _twin(node)
    assert twin is not None
    kwargs = {name: value for name, value in node.kwargs.items() if name not in ("out", "inplace")}
    args = _without_inplace_flag(node)
    with graph.inserting_before(node):
        if isinstance(twin, str):
            result = graph.call_method(twin, args, kwargs)
        else:
            result = graph.call_function(twin, args, kwargs)
        copied = graph.call_method("copy_", (written, result))
    for made in (result, copied):
        made.meta.update(node.meta)
        made.meta.pop(ir.WRITES, None)  # that was of the node that is gone
    ir.set_mark(copied, op="copy")
    node.replace_all_uses_with(copied)
    graph.erase_node(node)
    result.name = node.name  # overrides speak of it


def _without_inplace_flag(node: fx.Node) -> tuple[Any, ...]:
    place = INPLACE_FLAG.get(ir.mark(node).op)
    if place is None or len(node.args) <= place or node.op != "call_function":
        return node.args
    return (*node.args[:place], False, *node.args[place + 1 :])


_OUT_OF_PLACE = {getattr(operator, f"i{name}"): getattr(operator, name) for name in "add sub mul".split()} | {
    operator.itruediv: operator.truediv,
    operator.ipow: operator.pow,
}


def _twin(node: fx.Node) -> Any:
    """The out-of-place form of what an in-place node calls, None where none is known."""
    if len(mutated(node)) != 1 or node.target is operator.setitem or ir.mark(node).op == "copy":
        return None
    if node.op == "call_method":
        name = str(node.target).removesuffix("_")
        return name if hasattr(torch.Tensor, name) else None
    if node.op != "call_function":
        return None
    name = getattr(node.target, "__name__", "")
    if "out" in node.kwargs or (ir.mark(node).op in INPLACE_FLAG and not name.endswith("_")):
        return node.target
    name = name.removesuffix("_")
    return _OUT_OF_PLACE.get(node.target) or getattr(torch, name, None) or getattr(torch.nn.functional, name, None)
