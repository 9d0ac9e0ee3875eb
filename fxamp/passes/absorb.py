"""Remove casts that a kernel can do inside: a table of rules, each with its exactness."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import fx

from fxamp import ir
from fxamp.dtypes import dtype_name
from fxamp.inplace import mutated
from fxamp.ir import Reason
from fxamp.passes.base import Pass
from fxamp.passes.reads import is_mask_in_float32, only_converts
from fxamp.passes.verify import casts_minimal, operands_agree
from fxamp.value_types import TensorType, converted

Exactness = Literal["exact", "one rounding"]

# In all three tables a gradient is as far from float32 as with the casts: shown for every op by a test too.

# Ops with a `dtype=` argument: they read low input and accumulate and give float32. On CUDA the cast is then part
# of the kernel (softmax and log_softmax for float16, reductions for both dtypes); elsewhere it is made inside.
# Not here: cumsum and cumprod, whose backward adds up in the low dtype then.
TAKES_DTYPE: dict[str, Exactness] = {
    "softmax": "exact",
    "log_softmax": "exact",
    "sum": "exact",
    "nansum": "exact",
    "mean": "exact",
    "prod": "exact",
}
# Pointwise ops of two tensors that promote inside the kernel: a low operand beside a float32 one is read as it is.
# Not here: atan2, whose backward squares the low operand.
PROMOTES: dict[str, Exactness] = {
    "add": "exact",
    "sub": "exact",
    "mul": "exact",
    "div": "exact",
    "maximum": "exact",
    "minimum": "exact",
}
# Pointwise ops whose low kernel computes in float32 and rounds once: what cast, op, cast back do. Shown on the CPU
# over all 65,536 patterns of both dtypes. Not here: erf and gelu, which differ by more than one rounding; and what
# computes its gradient of the rounded result or of a low input by ops that overflow or cancel, where float32 does not:
# reciprocal and rsqrt (powers of the result), expm1, tanh and sigmoid (result + 1, 1 - result**2), inverse functions
# (1 - x**2), log2 and log10 (x times a constant), digamma, erfc, exp2, lgamma and tan.
_EXACT = "cosh elu exp hardswish log log1p logsigmoid neg selu silu sinh softplus square"
_ONE_ROUNDING = "cos mish sin sqrt"
ROUNDS_ONCE: dict[str, Exactness] = {
    **{op: "exact" for op in _EXACT.split()},
    **{op: "one rounding" for op in _ONE_ROUNDING.split()},
}
# Why a node is float32 that absorption may set aside: its kernel computes in float32 all the same.
_BY_LIST: frozenset[ir.Rule] = frozenset({"list", "downstream", "upstream", "cut"})


@dataclasses.dataclass(frozen=True)
class Absorb(Pass):
    """Let kernels read low values where a cast would only feed them.

        softmax(x.to(float32))                # x is low
        softmax(x, dtype=float32)

    1. low -> float32 -> low is the low value.
    2. cast up, one pointwise op, cast down is the op on the low value, where its kernel rounds once.
    3. An op with `dtype=` takes the cast of its input.
    4. A promoting op with another float32 operand, which it may write into, reads a low operand as it is.
    5. A mask in float32 that is only cast down is made low at once: `mask.float()` -> `mask.to(low)`.
    6. A cast that serves anybody else stays, and so does every other cast the user wrote.
    7. An op that the user has put on the deny list himself keeps its casts: in float32 it saves float32 for backward.

    Args:
        is_users_choice: whether the user has put an op on its list.
    """

    ensures: ClassVar = (operands_agree, casts_minimal)
    low: torch.dtype
    is_users_choice: Callable[[str], bool] = lambda op: False

    def apply(self, graph: fx.Graph) -> bool:
        changed = False
        for node in list(graph.nodes):
            changed = self._drop_pair(graph, node) or self._make_low(graph, node) or changed
            changed = self._run_low(graph, node) or changed
        for node in list(graph.nodes):
            if self._is_up(node) and can_absorb(node):
                _absorb(graph, node)
                changed = True
        return changed

    def _drop_pair(self, graph: fx.Graph, node: fx.Node) -> bool:
        """Rule 1: a cast down of what was cast up, by us or by the user."""
        if not self._is_down(node):
            return False
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if not self._is_up(source) and not self._is_users_up(source):
            return False
        origin = source.args[0]
        assert isinstance(origin, fx.Node)
        node.replace_all_uses_with(origin)
        graph.erase_node(node)
        _erase_unused(graph, [source])
        return True

    def _make_low(self, graph: fx.Graph, node: fx.Node) -> bool:
        """Rule 5."""
        if not self._is_down(node):
            return False
        (mask,) = node.all_input_nodes
        mark = ir.mark(mask)
        if not is_mask_in_float32(mask) or mark.reason.kind != "conversion" or len(mask.users) > 1:
            return False
        mask.target, mask.args, mask.kwargs = "to", (mask.args[0], self.low), {}
        text = f"{mark.reason.text}, and it is read in {dtype_name(self.low)} alone"
        ir.set_mark(mask, op="to", precision="low", type=ir.mark(node).type, reason=Reason("absorbed", text))
        node.replace_all_uses_with(mask)
        graph.erase_node(node)
        return True

    def _run_low(self, graph: fx.Graph, node: fx.Node) -> bool:
        """Rule 2."""
        mark = ir.mark(node)
        if mark.precision != "high" or mark.role or mark.reason.kind not in _BY_LIST or not _rounds_once(node):
            return False
        if mark.reason.kind == "list" and self.is_users_choice(mark.op):
            return False
        casts = node.all_input_nodes
        if not casts or not all(map(self._is_up, casts)) or not node.users or not all(map(self._is_down, node.users)):
            return False
        exactness = ROUNDS_ONCE[mark.op]
        for cast in casts:
            node.replace_input_with(cast, cast.args[0])  # type: ignore[arg-type]
        for user in list(node.users):
            user.replace_all_uses_with(node)
            graph.erase_node(user)
        text = (
            f"its {dtype_name(self.low)} kernel computes in float32 and rounds once, as the two casts did ({exactness})"
        )
        lowered = converted(mark.type, self.low)
        ir.set_mark(node, precision="low", type=lowered, reason=Reason("absorbed", text))
        _erase_unused(graph, casts)
        return True

    def _is_up(self, node: fx.Node) -> bool:
        return _is_cast(node, torch.float32) and ir.dtype_of(node.args[0]) == self.low

    def _is_down(self, node: fx.Node) -> bool:
        return _is_cast(node, self.low) and ir.dtype_of(node.args[0]) == torch.float32

    def _is_users_up(self, node: fx.Node) -> bool:
        """`x.float()` in the user's code, of a value that is low."""
        return only_converts(node, torch.float32) and ir.dtype_of(node.args[0]) == self.low


def _is_cast(node: fx.Node, dtype: torch.dtype) -> bool:
    return node.target == "to" and ir.mark(node).role == "cast" and node.args[1] == dtype


def _rounds_once(node: fx.Node) -> bool:
    """Whether the node is a listed op of one tensor, out of place, with no other argument that matters."""
    return ir.mark(node).op in ROUNDS_ONCE and not mutated(node) and len(list(ir.arguments(node))) == 1


# ------------------------------------------------------------------------------------- rules 3 and 4, by reader

Rewrite = Callable[[fx.Node, fx.Node], None]


def can_absorb(cast: fx.Node) -> bool:
    """Whether every reader of a cast takes it inside, and backward does not pay for it.

    A reader's backward casts the gradient itself: with several readers that would be one cast each, and a sum in low
    precision, where the cast's own backward sums in float32 and casts once.
    """
    has_gradient = ir.has_gradient(cast)
    if not cast.users or (has_gradient and len(cast.users) > 1):
        return False
    return all(_rule(user, cast) is not None for user in cast.users)


def _rule(reader: fx.Node, cast: fx.Node) -> Rewrite | None:
    """How a reader can take a cast inside, None where it cannot."""
    if ir.mark(reader).precision != "high":
        return None
    if can_take_dtype(reader) and reader.args and reader.args[0] is cast and not mutated(reader):
        return _give_dtype
    if can_promote(reader, cast):
        return _read_as_it_is
    return None


def can_take_dtype(node: fx.Node) -> bool:
    """Whether `dtype=torch.float32` may be added to a call."""
    given = (*node.args, *node.kwargs.values())
    is_call = node.op in ("call_function", "call_method") and ir.mark(node).op in TAKES_DTYPE
    return is_call and node.kwargs.get("dtype") is None and not any(isinstance(a, torch.dtype) for a in given)


def can_promote(node: fx.Node, low: fx.Node) -> bool:
    """Whether a node reads `low` beside a float32 tensor that makes the result float32, or that it writes into.

    A float32 tensor without dimensions does not promote one that has some.
    """
    if ir.mark(node).op not in PROMOTES or node.op not in ("call_function", "call_method") or len(node.args) < 2:
        return False
    first, second = node.args[:2]
    other = second if first is low else first
    if (first is low) == (second is low) or not isinstance(other, fx.Node):
        return False
    if (written := mutated(node)) and (first is low or written != [first]):
        return False
    ours, theirs = ir.mark(low).type, ir.mark(other).type
    if not (isinstance(ours, TensorType) and isinstance(theirs, TensorType)) or theirs.dtype != torch.float32:
        return False
    if ours.shape is None or theirs.shape is None:
        return False
    return len(theirs.shape) > 0 or len(ours.shape) == 0


def _absorb(graph: fx.Graph, cast: fx.Node) -> None:
    for reader in list(cast.users):
        rewrite = _rule(reader, cast)
        assert rewrite is not None
        rewrite(reader, cast)
    _erase_unused(graph, [cast])


def _give_dtype(reader: fx.Node, cast: fx.Node) -> None:
    _read_as_it_is(reader, cast)
    reader.kwargs = {**reader.kwargs, "dtype": torch.float32}


def _read_as_it_is(reader: fx.Node, cast: fx.Node) -> None:
    positions = [position for position, argument in enumerate(reader.args) if argument is cast]
    modes = tuple((p, k, "any" if p in positions else mode) for p, k, mode in ir.mark(reader).modes)
    ir.set_mark(reader, modes=modes)
    reader.replace_input_with(cast, cast.args[0])  # type: ignore[arg-type]


def _erase_unused(graph: fx.Graph, casts: list[fx.Node]) -> None:
    for cast in casts:
        if not cast.users and (ir.mark(cast).role == "cast" or only_converts(cast, torch.float32)):
            graph.erase_node(cast)
