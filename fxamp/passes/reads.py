"""How a node reads its float32 arguments."""

import dataclasses
from typing import Literal

import torch
from torch import fx

from fxamp import ir
from fxamp.inplace import mutated
from fxamp.lists import TRAITS, OpLists
from fxamp.value_types import tensors_in

# with: cast together with the node; high: keeps float32; low: must be low; any: read as it is.
Mode = Literal["with", "high", "low", "any"]


@dataclasses.dataclass(frozen=True)
class Read(ir.Operand):
    """One float32 argument of a node and the precision it must have."""

    mode: Mode


_IN_8_BITS = frozenset({torch.bool, torch.uint8, torch.int8})
# Conversions the user wrote: the result's dtype is theirs, whatever is read.
CONVERSIONS = frozenset("to float half bfloat16 double long int short bool type type_as _to_copy item tolist".split())


# Of their first argument they take sizes and strides, and its dtype where none is asked for.
READ_NO_NUMBER = frozenset(
    "empty_like full_like ones_like zeros_like new_empty new_full new_ones new_zeros new_tensor".split()
)


def float_reads(node: fx.Node, lists: OpLists, output_mode: Mode = "high") -> list[Read]:
    """Every float32 argument of a node, with how it is read.

    Args:
        output_mode: how the graph's output node reads ("high" for float32 outputs, "any" for as computed).
    """
    found = []
    for argument in ir.arguments(node):
        if ir.holds_float32(argument.value):
            mode = _mode(node, argument, lists, output_mode)
            found.append(Read(argument.position, argument.keyword, argument.value, mode))
    return found


def _mode(node: fx.Node, argument: ir.Operand, lists: OpLists, output_mode: Mode) -> Mode:
    if node.op == "output":
        return "any" if argument.value in ir.as_computed(node) else output_mode
    op = ir.mark(node).op
    if op in TRAITS["shape_result"] or ir.stays_float32(node) or (op == "getattr" and not ir.holds_float32(node)):
        return "any"
    if op in CASTS_INSIDE and asked_dtype(node) == torch.float32:
        return "any"
    if is_exact_question(node, lists):
        return "any"
    if is_conversion(node):
        return "any" if converts_to(node) == torch.float32 else "with"
    row = lists.row(op)
    if row is None or row.operands is None or node.op == "call_module":
        return "with"
    places = {(argument.position, argument.keyword)}
    if ir.KERNEL in node.meta:
        places = node.meta[ir.KERNEL].places.get(argument.position, frozenset())
    named = (at == position or name == keyword for at, name in places for position, keyword in row.operands)
    if argument.value.meta.get("stored_low") and _writes_stored_low(node):
        return "any"
    return "with" if any(named) else "high"


def _writes_stored_low(node: fx.Node) -> bool:
    """Whether the node is a norm at O3: its kernel takes no float32 weights beside low statistics, which it writes."""
    return any(written.meta.get("stored_low") for written in mutated(node))


# Of one value: where it is largest or not zero, or in which order. Rounded values have other positions.
_POSITIONS = frozenset("argmax argmin argsort count_nonzero nonzero nonzero_static".split())
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, *_IN_8_BITS})
_COMPARISONS = frozenset("eq ge gt isin le lt ne".split())
_RELATED = "fxamp_related"  # on a comparison: whether its operands were made of one another
_FAR = 1000  # values looked at for that


def compares(node: fx.Node, lists: OpLists) -> bool:
    """Whether the node compares values that have nothing to do with each other, or one with a number.

    torch promotes what they are, and nothing is rounded for it: a value or a bound that was rounded for one of two
    comparisons alone would be on neither side, or on both. Where one operand was made of the other (`x == x.amax()`)
    both must be read in one precision.
    """
    if ir.mark(node).op not in _COMPARISONS or ir.holds_float32(node):  # `x.lt_(y)` writes floating numbers
        return False
    if _RELATED not in node.meta:
        node.meta[_RELATED] = _share_a_source(ir.nodes_in((node.args, node.kwargs)), lists)
    return not node.meta[_RELATED]


def is_exact_question(node: fx.Node, lists: OpLists) -> bool:
    """Whether the node asks something of float32 values that has no float32 answer, and reads them as they come."""
    if is_conversion(node):
        return converts_to(node) in _INTEGERS or ir.mark(node).op in ("item", "tolist")
    return compares(node, lists) or (ir.mark(node).op in _POSITIONS and not ir.holds_float32(node))


def picks_positions(node: fx.Node) -> bool:
    """Whether the node gives values and the positions they were found at (`topk`), and somebody reads the positions.

    Values are then picked in the precision they have: rounded before, others would be the largest.
    """
    parts = ir.mark(node).type
    if not isinstance(parts, tuple) or not any(found.dtype == torch.int64 for found in tensors_in(parts)):
        return False
    for user in node.users:
        place = user.args[1] if ir.mark(user).op == "getitem" and len(user.args) > 1 else None
        part = parts[place] if isinstance(place, int) and place < len(parts) else parts
        if user.users and any(found.dtype == torch.int64 for found in tensors_in(part)):
            return True
    return False


def sends_gradient_to_positions(node: fx.Node) -> bool:
    """Whether the gradient of each value goes to the place it was found at: of values that rounding made equal, to one.

    (`amax` and `maximum` share it among equal ones, and have no say in this.)
    """
    is_pick = ir.mark(node).op in TRAITS["values_and_indices"]
    return is_pick and ir.has_gradient(node)


def _share_a_source(values: list[fx.Node], lists: OpLists) -> bool:
    """Whether some float32 value went into two of these; a GEMM makes a new one. True where that is far to seek."""
    seen: set[fx.Node] = set()
    for value in values:
        made_of, waiting = {value}, [value]
        while waiting:
            node = waiting.pop()
            if node in seen or len(seen) + len(made_of) > _FAR:
                return True
            given = () if lists.colour(ir.mark(node).op) == "allow" else node.all_input_nodes
            new = [each for each in given if ir.holds_float32(each) and each not in made_of]
            made_of.update(new)
            waiting += new
        seen |= made_of
    return False


def is_conversion(node: fx.Node) -> bool:
    """Whether the user's call may change a dtype: `x.to(device)` moves a value and does not."""
    op = ir.mark(node).op
    if op not in ("to", "_to_copy"):
        return op in CONVERSIONS
    asked = (*node.args[1:], *(value for key, value in node.kwargs.items() if key != "device"))
    return any(isinstance(argument, torch.dtype) or _may_be_dtype(argument) for argument in asked)


def _may_be_dtype(argument: object) -> bool:
    if not isinstance(argument, fx.Node):
        return False
    reads_device = argument.target is getattr and argument.args[1] == "device"
    return not reads_device and not isinstance(argument.meta.get("val"), (torch.device, bool))


# Ops whose kernel converts its input itself when the call names a dtype.
CASTS_INSIDE = frozenset("softmax log_softmax softmin sum mean prod cumsum cumprod nansum nanmean norm".split())


def asked_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype that the user's call names (`softmax(x, -1, dtype=torch.float32)`), None where it names none."""
    named = [argument for argument in (*node.args, *node.kwargs.values()) if isinstance(argument, torch.dtype)]
    return named[0] if named else None


def only_converts(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether the user's call converts to `dtype` and does nothing else: no other device, no memory format."""
    if node.op != "call_method" or ir.mark(node).role:
        return False
    asked = (*node.args[1:], *node.kwargs.values())
    return (node.target == "float" and not asked and dtype == torch.float32) or (
        node.target == "to" and len(asked) == 1 and asked[0] == dtype
    )


def is_mask_in_float32(node: fx.Node) -> bool:
    """Whether the user's call makes float32 of a mask or of bytes, which both low dtypes hold exactly."""
    return only_converts(node, torch.float32) and ir.dtype_of(node.args[0]) in _IN_8_BITS


def converts_to(node: fx.Node) -> torch.dtype | None:
    """The dtype a conversion node's result has; None for what gives no tensor."""
    return next((found.dtype for found in tensors_in(ir.mark(node).type)), None)
