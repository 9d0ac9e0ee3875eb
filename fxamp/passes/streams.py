"""Sums that go on: in a dtype with fewer bits than TF32 a residual stream stays float32.

A residual stream is x + f(x) + g(x) + ...: each sum is an operand of the next, itself, scaled or behind a norm. In
bfloat16 every one of them would round the whole stream to 8 bits, once a block, while autocast adds in float32, because
what begins the stream (embedding rows, a norm, a positional parameter) is float32 there. The branches stay low: the sum
reads them as they are. float16 keeps the 11 bits of TF32, and its streams are left to the cut.
"""

from collections.abc import Container

import torch
from torch import fx

from fxamp import ir
from fxamp.dtypes import dtype_name
from fxamp.lists import TRAITS
from fxamp.passes.ruling import Ruling

SUMS = frozenset({"add", "sub", "rsub", "addcmul"})
_NORMS = frozenset(
    """_fused_rms_norm batch_norm group_norm instance_norm layer_norm native_batch_norm native_group_norm
    native_layer_norm rms_norm""".split()
)
TF32_EPS = 2.0**-10


def protect_streams(ruling: Ruling) -> None:
    """Fix the sums of streams that autocast adds in float32, and what begins them, high (level balanced).

    1. A sum counts where it is part of a chain of two at least, with nothing but clear ops, norms and products with a
       number or a weight (a residual that is scaled) between.
    2. What autocast adds in low precision (a residual network's convolutions) is free.
    3. Up from the sums, infer and clear nodes are high too, but for what a branch makes of its GEMM (a layer scale).
    4. A sum that the user has spoken of, by an override or the lists, is left to that.
    """
    if ruling.policy.level != "balanced" or torch.finfo(ruling.policy.low).eps <= TF32_EPS:
        return
    low = low_under_autocast(ruling)
    sums = _sums_that_go_on(ruling, low)
    text = f"adds to a residual stream, which {dtype_name(ruling.policy.low)} would round anew at each sum"
    for node in sums:
        if node not in ruling.fixed:
            ruling.fix(node, "high", "stream", text)
    _protect_what_begins_them(ruling, low, sums)


def low_under_autocast(ruling: Ruling) -> set[fx.Node]:
    """GEMM results, inputs that come in low, and what is made of them alone by ops that autocast leaves in the dtype of
    their operands."""
    found: set[fx.Node] = set()
    for node in ruling.graph.nodes:
        if node in ruling.fixed:
            is_low = (ruling.is_fixed(node, "low") and not ir.is_weight(node)) or ir.PROMOTED in node.meta
        else:
            op = ir.mark(node).op
            is_low = bool(ruling.reads[node]) and op not in TRAITS["strict_deny"] and _all_in(ruling, node, found)
        if is_low:
            found.add(node)
    return found


def _all_in(ruling: Ruling, node: fx.Node, found: set[fx.Node]) -> bool:
    is_free = node.op.startswith("call") and ruling.colours[node] in ("infer", "clear")
    return is_free and all(source in found for source in ruling.sources(node))


def _sums_that_go_on(ruling: Ruling, low: set[fx.Node]) -> dict[fx.Node, None]:
    """Sums of two values in float32 under autocast, one of which is such a sum too, and that one."""
    sums: dict[fx.Node, None] = {}
    last: dict[fx.Node, fx.Node] = {}
    for node in ruling.graph.nodes:
        if not node.op.startswith("call") or not ruling.is_reader(node) or node in low:
            continue
        before = ruling.first_source(node, last)
        if _is_sum(ruling, node):
            if before is not None:
                sums |= dict.fromkeys((last[before], node))
            last[node] = node
        elif before is not None and _passes_on(ruling, node):
            last[node] = last[before]
    return sums


def _is_sum(ruling: Ruling, node: fx.Node) -> bool:
    """Whether a node adds two values that are computed: a bias or a positional parameter makes no stream."""
    op = ir.mark(node).op
    if op not in SUMS or node in ruling.chosen or ruling.policy.is_users_choice(op):
        return False
    return len(_computed(ruling, node)) >= 2


def _passes_on(ruling: Ruling, node: fx.Node) -> bool:
    """Whether a node's result goes on with the stream that it reads: viewed, normed or scaled."""
    op = ir.mark(node).op
    if op in ("mul", "div"):
        return len(_computed(ruling, node)) == 1
    return ruling.colours[node] == "clear" or op in _NORMS


def _computed(ruling: Ruling, node: fx.Node) -> list[fx.Node]:
    """What a node reads that is no weight."""
    return [read.value for read in ruling.reads[node] if not ir.is_weight(_viewed(read.value))]


def _viewed(node: fx.Node) -> fx.Node:
    """What a view is a view of; rows of a table are no view of it."""
    while ir.mark(node).op in TRAITS["view"] and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _protect_what_begins_them(ruling: Ruling, low: set[fx.Node], sums: Container[fx.Node]) -> None:
    untouched = low | branches(ruling, low) | ruling.chosen.keys()
    reaches: dict[fx.Node, fx.Node] = {}
    for node in reversed(ruling.graph.nodes):
        end = node if node in sums else reaches.get(node)
        if end is None or not node.op.startswith("call"):
            continue
        if node not in sums:
            if node in untouched or node in ruling.fixed:
                continue
            ruling.fix(node, "high", "stream", f"begins the residual stream that {end.name} adds to", end)
        for source in ruling.sources(node):
            reaches.setdefault(source, end)


def branches(ruling: Ruling, low: set[fx.Node], ends: Container[str] = SUMS) -> set[fx.Node]:
    """What is made of a GEMM's result and of weights, by ops that are none of `ends`.

    Rounding it again is little beside the stream that it is added to.
    """
    found = {node for node in low if ir.mark(node).op not in ends}
    for node in ruling.graph.nodes:
        op, sources = ir.mark(node).op, ruling.sources(node)
        is_free = node.op.startswith("call") and node not in ruling.fixed and ruling.colours[node] in ("infer", "clear")
        if not is_free or op in ends or not any(source in found for source in sources):
            continue
        if all(source in found or ir.is_weight(source) for source in sources):
            found.add(node)
    return found
