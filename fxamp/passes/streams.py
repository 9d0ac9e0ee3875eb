"""Sums that go on: in a dtype with fewer bits than TF32 a residual stream stays float32.

A residual stream is x + f(x) + g(x) + ...: each sum is an operand of the next, itself, scaled or behind a norm. A
highway, the state of a recurrent cell (f * c + i * g) and a running mean are streams too. In bfloat16 every one of
these sums would round the whole stream to 8 bits, once a block, while autocast adds in float32, because what begins the
stream (embedding rows, a norm, a positional parameter) is float32 there. The branches stay low: the sum reads them as
they are. What scales and shifts the norm at the end of a stream, before the last GEMM, rounds all of it too. float16
keeps the 11 bits of TF32, and its streams are left to the cut.
"""

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence

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
_SCALES = SUMS | {"mul", "div"}
TF32_EPS = 2.0**-10


def protect_streams(ruling: Ruling) -> None:
    """Fix the sums of streams that autocast adds in float32, and what begins them, high (level balanced).

    1. A sum counts where it is part of a chain of two at least, with nothing but clear ops, norms and products between.
    2. What autocast adds in low precision (a residual network's convolutions) is free.
    3. Up from the sums, infer and clear nodes are high too, but for what a branch makes of its GEMM (a layer scale).
    4. A sum that the user has spoken of, by an override or the lists, is left to that.
    5. What scales and shifts a norm of a float32 value, and is read by the model's last GEMM, counts like a sum.
    """
    if ruling.policy.level != "balanced" or torch.finfo(ruling.policy.low).eps <= TF32_EPS:
        return
    low = low_under_autocast(ruling)
    weights = made_of_weights(ruling.graph)
    sums = _sums_that_go_on(ruling, low, weights)
    text = f"adds to a residual stream, which {dtype_name(ruling.policy.low)} would round anew at each sum"
    for node in sums:
        if node not in ruling.fixed:
            ruling.fix(node, "high", "stream", text)
    _protect_what_begins_them(ruling, low, sums, "begins the residual stream that {} adds to")
    scaled = _scale_the_last_norm(ruling, low | weights)
    for node, norm in scaled.items():
        text = f"scales or shifts {norm.name} for the last GEMM, and so all that is returned"
        ruling.fix(node, "high", "stream", text)
    _protect_what_begins_them(ruling, low, scaled, "leads to {}, which scales or shifts the last norm")


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


@dataclasses.dataclass(frozen=True)
class _Part:
    """What goes on with a stream: made of its last sum by clear ops, norms and products alone."""

    sum: fx.Node
    is_normed: bool = False
    is_gated: bool = False  # multiplied by what is computed
    is_modulated: bool = False  # and that behind a norm


def _sums_that_go_on(ruling: Ruling, low: set[fx.Node], weights: set[fx.Node]) -> dict[fx.Node, None]:
    """Sums of two values in float32 under autocast, one of which is such a sum too, and that one.

    Where a norm and a product stand between two sums, the second may be a branch's own (a modulation, whose next reader
    is a GEMM); a third behind it tells that it is the state of a recurrent cell: c = norm(f * c + i * g).
    """
    sums: dict[fx.Node, None] = {}
    modulated: dict[fx.Node, fx.Node] = {}  # a sum -> the one before it, behind a norm and a product
    parts: dict[fx.Node, _Part] = {}
    for node in ruling.graph.nodes:
        if not node.op.startswith("call") or not ruling.is_reader(node) or node in low:
            continue
        computed = [read for read in ruling.reads[node] if read.value not in weights]
        given = [_part_of(ruling.sources_of(read, node), parts) for read in computed]
        before = min(filter(None, given), key=lambda part: part.is_modulated, default=None)
        is_sum = ir.mark(node).op in SUMS and len(computed) >= 2 and not ruling.is_spoken_of(node)
        if is_sum and not _is_mix(given):
            if before is not None and before.is_modulated:
                modulated[node] = before.sum
                if before.sum in modulated:
                    sums |= dict.fromkeys((modulated[before.sum], before.sum, node))
            elif before is not None:
                sums |= dict.fromkeys((before.sum, node))
            parts[node] = _Part(node)
        elif before is not None and (part := _passed_on(ruling, node, before, len(computed))) is not None:
            parts[node] = part
    return sums


def made_of_weights(graph: fx.Graph) -> set[fx.Node]:
    """Weights and what is made of them alone: a bias or a positional parameter makes no stream.

    Their views are, whatever says which part; rows of a table are not.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        given = node.args[:1] if ir.mark(node).op in TRAITS["view"] else node.all_input_nodes
        if ir.is_weight(node) or (given and found.issuperset(given)):
            found.add(node)
    return found


def _part_of(sources: Iterable[fx.Node], parts: Mapping[fx.Node, _Part]) -> _Part | None:
    return next((parts[source] for source in sources if source in parts), None)


def _is_mix(given: Sequence[_Part | None]) -> bool:
    """Whether a sum adds nothing to a stream: it is of one value, moved and scaled, several times (a token shift)."""
    return len(set(given)) == 1 and given[0] is not None and not given[0].is_gated


def _passed_on(ruling: Ruling, node: fx.Node, part: _Part, operands: int) -> _Part | None:
    """What a node that reads a part of a stream makes of it, None where that is another value.

    A product with what is computed gates a stream; of what a norm made, it may be a branch's own (a modulation).
    """
    op = ir.mark(node).op
    if op in ("mul", "div") and operands > 1:
        return dataclasses.replace(part, is_gated=True, is_modulated=part.is_modulated or part.is_normed)
    if op in _NORMS:
        return _Part(part.sum, is_normed=True, is_modulated=part.is_modulated)
    return part if op in _SCALES or ruling.colours[node] == "clear" else None


def _scale_the_last_norm(ruling: Ruling, rounded: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Free products and sums between a norm of a float32 value and the last GEMM -> that norm.

    Args:
        rounded: low values and weights.
    """
    ahead = _gemms_ahead(ruling)
    behind: dict[fx.Node, fx.Node] = {}
    scaled: dict[fx.Node, fx.Node] = {}
    for node in ruling.graph.nodes:
        if ahead.get(node) != 1 or not ruling.is_reader(node) or not node.op.startswith("call"):
            continue
        op, before = ir.mark(node).op, ruling.first_source(node, behind)
        if op in _NORMS and any(read.value not in rounded for read in ruling.reads[node]):
            behind[node] = node
        elif before is not None and (op in _SCALES or ruling.colours[node] == "clear"):
            behind[node] = behind[before]
            if op in _SCALES and node not in ruling.fixed and not ruling.is_spoken_of(node):
                scaled[node] = behind[node]
    return scaled


def _gemms_ahead(ruling: Ruling) -> dict[fx.Node, int]:
    """How many allow ops stand, at most, between each value and what is returned."""
    ahead: dict[fx.Node, int] = {}
    for node in reversed(ruling.graph.nodes):
        readers = [user for user in node.users if user.op == "output" or user in ruling.participants]
        ahead[node] = max((ahead[user] + (ruling.colours[user] == "allow") for user in readers), default=0)
    return ahead


def _protect_what_begins_them(ruling: Ruling, low: set[fx.Node], sums: Container[fx.Node], text: str) -> None:
    untouched = low | branches(ruling, low) | ruling.chosen.keys()
    reaches: dict[fx.Node, fx.Node] = {}
    for node in reversed(ruling.graph.nodes):
        end = node if node in sums else reaches.get(node)
        if end is None or not node.op.startswith("call"):
            continue
        if node not in sums:
            if node in untouched or node in ruling.fixed:
                continue
            ruling.fix(node, "high", "stream", text.format(end.name), end)
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
