"""Bring the user's graph into the form the other passes read."""

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from fxamp import ir
from fxamp.inplace import mutated
from fxamp.passes.base import Pass
from fxamp.powers import call_power
from fxamp.value_types import TensorType


@dataclasses.dataclass(frozen=True)
class Normalise(Pass):
    """Make what the model reads from values independent of the precision they will have.

        y.to(x.dtype)            # y and x are float32 in an fp32 run: nothing happens there
        y                        # and nothing may depend on the precision x gets

    1. `x.dtype` is what an fp32 run sees.
    2. A conversion relative to another value that changes nothing in an fp32 run disappears.
    3. One that changes something there names its dtype: `mask.to(y)` is `mask.to(float32)`.
       `x.type(dtype)` is another spelling of `x.to(dtype)`; with a type that the user names it stays.
       `1 / x` is `x.__rtruediv__(1)`, a reciprocal times a number: it has lists of its own.
    4. A list of tensors passed whole (`cat(x.chunk(2))`) is passed item by item. A module that stays whole is given a
       tuple of a class (a PackedSequence) as it is: float32, as all that modules give and such classes hold.
    5. Operands that torch knows by position stand there: `torch.add(input=x, other=y)` is `torch.add(x, y)`.
    6. A value that nobody reads is not computed, unless computing it does something else too.
    7. An empty tensor that `cat` skips is none of its operands: it would have a dtype. (A cache of keys begins so.)
    8. What torch.export asserts of a tensor's dtype and strides before each conversion speaks of the fp32 run: it goes.
    9. What a function gives in float32 whatever it reads is read behind a conversion to float32, which is that already.
    10. A power of a negative number is a call: torch.fx writes `-1 ** x`, which Python reads as -(1 ** x).
    """

    def apply(self, graph: fx.Graph) -> bool:
        changed = _drop_unread(graph)
        for node in list(graph.nodes):
            changed = _put_operands_in_place(node) or changed
            changed = _respell(graph, node) or changed
            changed = call_power(node, ir.is_tensor(node)) or changed
            changed = _leave_out_empty(node) or changed
            changed = (
                _drop_relative_conversion(graph, node)
                or _forget_relative_dtype(node)
                or _name_relative_dtype(graph, node)
                or changed
            )
        for node in list(graph.nodes):
            changed = _resolve_dtype(graph, node) or changed
            changed = _item_of_field(node) or changed
            changed = _pass_items(graph, node) or changed
            changed = _convert_what_stays(graph, node) or changed
        return changed


# Parts of the names of ops that draw random numbers, check something, switch a mode or set a tensor's version (Dynamo
# takes back the one that `p.data = ...` counts): they run though nobody reads.
_ACTS = "drop rand bernoulli multinomial normal poisson uniform rrelu exponential geometric cauchy attention lstm gru \
rnn fractional assert check autocast grad print backward sync barrier wait version".split()

_COUNTED_ONLY = frozenset({"_log_api_usage_once"})  # by PyTorch's own builds

_ASSERTS_METADATA = torch.ops.aten._assert_tensor_metadata.default


def _convert_what_stays(graph: fx.Graph, node: fx.Node) -> bool:
    kind = ir.mark(node).type
    if not isinstance(kind, TensorType) or not kind.stays or not node.users:
        return False
    readers = list(node.users)
    with graph.inserting_after(node):
        wide = graph.call_method("to", (node, torch.float32))
    wide.meta.update({key: value for key, value in node.meta.items() if key not in (ir.MARK, ir.WRITES, ir.KERNEL)})
    ir.set_mark(wide, op="to", type=dataclasses.replace(kind, stays=False))
    for reader in readers:
        reader.replace_input_with(node, wide)
    return True


def _drop_unread(graph: fx.Graph) -> bool:
    changed = False
    for node in reversed(list(graph.nodes)):
        if not node.users and (_only_computes(node) or node.target is _ASSERTS_METADATA):
            graph.erase_node(node)
            changed = True
    return changed


def _only_computes(node: fx.Node) -> bool:
    op = ir.mark(node).op
    if node.op not in ("call_function", "call_method", "get_attr") or "." in op or "::" in op or node.is_impure():
        return False
    return not mutated(node) and not any(part in op for part in _ACTS) and not _gives_nothing(node)


def _gives_nothing(node: fx.Node) -> bool:
    """Whether a function is known to return None: it was called for what it does."""
    value = node.meta.get("val", node.meta.get("example_value"))
    is_of_torch = getattr(node.target, "__module__", None) not in ("builtins", "_operator", "math")
    does = is_of_torch and ir.mark(node).op not in _COUNTED_ONLY
    return node.op == "call_function" and does and value is None and ir.mark(node).type is None


# The keywords of leading operands, in the order of their positions; functions with another order are left alone.
_LEADING = ("input", "other")
_OTHER_ORDER = frozenset({"where", "searchsorted", "bucketize", "einsum"})


def _put_operands_in_place(node: fx.Node) -> bool:
    if node.op != "call_function" or ir.mark(node).op in _OTHER_ORDER or "." in ir.mark(node).op:
        return False
    changed = False
    for position, keyword in enumerate(_LEADING):
        if len(node.args) == position and keyword in node.kwargs:
            kwargs = dict(node.kwargs)
            node.args = (*node.args, kwargs.pop(keyword))
            node.kwargs = kwargs
            changed = True
    return changed


def _leave_out_empty(node: fx.Node) -> bool:
    """`cat([torch.tensor([]), x])` -> `cat([x])`, where the result's dtype is that of another operand."""
    operands = ir.argument_of(node, 0, "tensors")
    if ir.mark(node).op != "cat" or node.op != "call_function" or not isinstance(operands, (list, tuple)):
        return False
    kept = [operand for operand in operands if not _is_made_empty(operand)]
    own = ir.dtype_of(node)
    if len(kept) == len(operands) or own is None or own not in map(ir.dtype_of, kept):
        return False
    node.args = (kept, *node.args[1:]) if node.args else ()
    node.kwargs = {**node.kwargs, **({} if node.args else {"tensors": kept})}
    for operand in set(operands) - set(kept):
        if not operand.users:
            operand.graph.erase_node(operand)
    return True


def _is_made_empty(node: Any) -> bool:
    """Whether it is `torch.tensor([])`, or `torch.empty(0)` and its like: one dimension of no elements."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or mutated(node) or len(node.args) != 1:
        return False
    is_list = ir.mark(node).op == "tensor" and node.args[0] == []
    return is_list or (ir.mark(node).op in ("empty", "zeros", "ones") and node.args[0] in (0, (0,), [0]))


def _respell(graph: fx.Graph, node: fx.Node) -> bool:
    """`x.type(dtype)` -> `x.to(dtype)`, `x.type(y.type())` -> `x.type_as(y)`, `1 / x` -> what Python makes of it."""
    if node.target is operator.truediv and type(node.args[0]) in (int, float) and ir.is_tensor(node):
        node.op, node.target, node.args = "call_method", "__rtruediv__", (node.args[1], node.args[0])
        ir.set_mark(node, op="rtruediv")
        return True
    kind = ir.argument_of(node, 1, "dtype")
    if node.op != "call_method" or node.target != "type":
        return False
    if isinstance(kind, torch.dtype) or _is_dtype_read(kind):
        node.target = "to"
    elif isinstance(kind, fx.Node) and kind.op == "call_method" and kind.target == "type" and len(kind.args) == 1:
        node.target = "type_as"
        node.args, node.kwargs = (node.args[0], kind.args[0]), {}
        if not kind.users:
            graph.erase_node(kind)
    else:
        return False
    ir.set_mark(node, op=str(node.target))
    return True


def _drop_relative_conversion(graph: fx.Graph, node: fx.Node) -> bool:
    if node.op != "call_method" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    given, own = ir.mark(node.args[0]).type, ir.mark(node).type
    if not isinstance(given, TensorType) or not isinstance(own, TensorType) or given.dtype != own.dtype:
        return False
    if own.dtype is None or not _is_relative(node) or not _stays_on_device(node):
        return False
    node.args[0].meta[ir.CONVERTED_BACK] = True
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)
    return True


def _forget_relative_dtype(node: fx.Node) -> bool:
    """`x.to(y.device, y.dtype)`, where x and y have one dtype, moves x and does nothing else."""
    if node.op != "call_method" or node.target != "to" or not isinstance(node.args[0], fx.Node):
        return False
    given, own = ir.mark(node.args[0]).type, ir.mark(node).type
    if not isinstance(given, TensorType) or not isinstance(own, TensorType) or given.dtype != own.dtype:
        return False
    reads = [value for value in (*node.args[1:], *node.kwargs.values()) if _is_dtype_read(value)]
    node.args = tuple(value for value in node.args if value not in reads)
    node.kwargs = {key: value for key, value in node.kwargs.items() if value not in reads}
    return bool(reads)


def _name_relative_dtype(graph: fx.Graph, node: fx.Node) -> bool:
    """`mask.to(y)`, `mask.type_as(y)` -> `mask.to(float32)`, on y's device: y may have another dtype by then."""
    own, other = ir.mark(node).type, ir.argument_of(node, 1, "other")
    if node.op != "call_method" or node.target not in ("to", "type_as") or not isinstance(own, TensorType):
        return False
    if own.dtype is None or not isinstance(other, fx.Node) or not ir.is_tensor(other):
        return False
    where: tuple[fx.Node, ...] = ()
    if not _stays_on_device(node):
        with graph.inserting_before(node):
            device = graph.call_function(getattr, (other, "device"))
        ir.set_mark(device, op="getattr", type=None)
        where = (device,)
    node.target = "to"
    node.args = (node.args[0], *where, own.dtype, *node.args[2:])
    node.kwargs = {key: value for key, value in node.kwargs.items() if key != "other"}
    ir.set_mark(node, op="to")
    return True


def _is_relative(node: fx.Node) -> bool:
    """`.type_as(y)`, `.to(y)`, `.to(y.dtype)`: the dtype comes from another value."""
    if node.target == "type_as" or ir.RELATIVE in node.meta:
        return True
    if node.target != "to" or len(node.args) != 2 or node.kwargs:
        return node.target == "to" and len(node.args) == 1 and set(node.kwargs) == {"dtype"} and _reads_dtype(node)
    return isinstance(node.args[1], fx.Node) and (_reads_dtype(node) or ir.is_tensor(node.args[1]))


def _reads_dtype(node: fx.Node) -> bool:
    return _is_dtype_read(ir.argument_of(node, 1, "dtype"))


def _is_dtype_read(value: object) -> bool:
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return False
    return value.target is getattr and value.args[1] == "dtype"


def _stays_on_device(node: fx.Node) -> bool:
    given, own = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
    if isinstance(given, torch.Tensor) and isinstance(own, torch.Tensor):
        return given.device == own.device
    return _reads_dtype(node) or ir.RELATIVE in node.meta


def _resolve_dtype(graph: fx.Graph, node: fx.Node) -> bool:
    if not _is_dtype_read(node) or not isinstance(node.args[0], fx.Node):
        return False
    owner = ir.mark(node.args[0]).type
    if not isinstance(owner, TensorType) or owner.dtype is None:
        return False
    dtype = owner.dtype
    for user in list(node.users):
        put = lambda given: dtype if given is node else given  # noqa: E731
        user.args = fx.node.map_arg(user.args, put)
        user.kwargs = fx.node.map_arg(user.kwargs, put)
    graph.erase_node(node)
    return True


_FIELDS = ("values", "indices")


def _item_of_field(node: fx.Node) -> bool:
    """`x.max(1).values` -> `x.max(1)[0]`: a field of a result is an item like any other."""
    owner, field = (*node.args, None, None)[:2]
    if node.target is not getattr or not isinstance(owner, fx.Node) or not ir.is_tuple(owner):
        return False
    fields = ir.field_names(owner) or _FIELDS
    if field not in fields:
        return False
    node.target = operator.getitem
    node.args = (owner, fields.index(field))
    kinds = ir.mark(owner).type
    assert isinstance(kinds, tuple)
    ir.set_mark(node, op="getitem", type=kinds[fields.index(field)])
    return True


def _pass_items(graph: fx.Graph, node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr") or (
        node.op == "call_function" and node.target in (operator.getitem, len)
    ):
        return False
    wholes = [given for given in node.all_input_nodes if _is_flat_tuple(given)]
    if node.op == "output":
        wholes = [whole for whole in wholes if not ir.is_returned_whole(whole)]
    elif node.op == "call_module":
        wholes = [whole for whole in wholes if not hasattr(whole.meta.get("val", whole.meta.get(ir.GUESS)), "_fields")]
    for whole in wholes:
        _replace_by_items(graph, node, whole)
    return bool(wholes)


def _is_flat_tuple(node: fx.Node) -> bool:
    kind = ir.mark(node).type
    return isinstance(kind, tuple) and all(isinstance(part, TensorType) for part in kind) and ir.holds_float32(node)


def _replace_by_items(graph: fx.Graph, node: fx.Node, whole: fx.Node) -> None:
    types = ir.mark(whole).type
    assert isinstance(types, tuple)
    items = []
    for position, kind in enumerate(types):
        with graph.inserting_before(node):
            item = graph.call_function(operator.getitem, (whole, position))
        item.meta.update({key: value for key, value in whole.meta.items() if key != "val"})
        if "val" in whole.meta:
            item.meta["val"] = whole.meta["val"][position]
        ir.set_mark(item, op="getitem", type=kind)
        items.append(item)
    kept = tuple(items)
    put = lambda given: kept if given is whole else given  # noqa: E731
    node.args = fx.node.map_arg(node.args, put)
    node.kwargs = fx.node.map_arg(node.kwargs, put)
