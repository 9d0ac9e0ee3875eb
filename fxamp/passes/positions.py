"""Values that are asked which is largest, in which order they stand, or which integer they are (level balanced).

Rounded, they answer otherwise: `topk(probabilities + bias)` picks other experts, a bin holds other points. What
torch.autocast has in float32 there is float32 here too, however little rounding it would do elsewhere.
"""

from collections.abc import Iterator

from torch import fx

from fxamp import ir
from fxamp.lists import TRAITS
from fxamp.passes.reads import READ_NO_NUMBER, is_exact_question, picks_positions
from fxamp.passes.ruling import EXACT_CREATORS, Ruling, gives_exact
from fxamp.passes.streams import SUMS, branches, low_under_autocast
from fxamp.value_types import tensors_in

# What they give jumps where their operand is rounded across an integer, a boundary or zero.
_STEPS = frozenset(
    "bucketize ceil floor floor_divide fmod frac heaviside histc remainder round searchsorted sgn sign trunc".split()
)
_RANDOM = frozenset({"rand_like", "randint_like", "randn_like"})


def protect_positions(ruling: Ruling) -> None:
    """Fix what leads to a question about positions high, where autocast has it in float32.

    1. Up from the question through infer and clear nodes that are float32 under autocast, to a sum that adds something
       low: what comes into that (a residual stream) is left to the other rules.
    2. Down again, a node is high if it reads something float32 that is more than one number, or if autocast's lists
       make it float32 (a softmax).
    """
    if ruling.policy.level != "balanced":
        return
    asked = _asked(ruling)
    for node in ruling.graph.nodes:
        if node not in asked:
            continue
        source = next(_wide_sources(ruling, node), None)
        if source is not None or ir.mark(node).op in TRAITS["strict_deny"]:
            end = asked[node]
            what = "its result" if end is node else f"what `{ir.mark(end).op}` ({end.name}) says of it"
            why = "torch.autocast has it in float32" if source is None else f"{source.name} is float32"
            ruling.fix(node, "high", "position", f"{what} is decided by the last bits, and {why}", end)


def _asked(ruling: Ruling) -> dict[fx.Node, fx.Node]:
    """Free nodes that lead to a question, each with it; what autocast has low is none of them."""
    questions = {node for node in ruling.graph.nodes if ruling.reads[node] and _is_question(ruling, node)}
    if not questions:
        return {}
    low = low_under_autocast(ruling)
    made_low = low | branches(ruling, low, SUMS | TRAITS["strict_deny"])
    asked: dict[fx.Node, fx.Node] = {}
    reaches: dict[fx.Node, fx.Node] = {}
    for node in reversed(ruling.graph.nodes):
        end = node if node in questions else reaches.get(node)
        if end is None:
            continue
        if _is_free(ruling, node) and node not in low:
            asked[node] = end
        elif node not in questions:
            continue
        sources = ruling.sources(node)
        is_sum = ir.mark(node).op in SUMS and len(sources) > 1
        if not is_sum or not any(source in made_low for source in sources):
            reaches |= {source: end for source in sources if source not in reaches}
    return asked


def _is_question(ruling: Ruling, node: fx.Node) -> bool:
    is_step = ir.mark(node).op in _STEPS
    return is_step or is_exact_question(node, ruling.policy.lists) or picks_positions(node)


def _is_free(ruling: Ruling, node: fx.Node) -> bool:
    is_followed = node.op.startswith("call") and ruling.colours[node] in ("infer", "clear")
    passes_on = ir.mark(node).op not in READ_NO_NUMBER | _RANDOM
    return is_followed and passes_on and node not in ruling.fixed and ir.holds_float32(node)


def _wide_sources(ruling: Ruling, node: fx.Node) -> Iterator[fx.Node]:
    """Sources that promote under autocast, and hold numbers that low precision rounds."""
    for source in ruling.sources(node):
        verdict = ruling.fixed.get(source)
        if verdict is None or verdict.precision != "high" or gives_exact(source):
            continue
        is_exact = verdict.reason.kind == "creation" and ir.mark(source).op in EXACT_CREATORS
        is_mask = verdict.reason.kind == "conversion" and source in ruling.born
        if not (is_exact or is_mask or _is_one_number(source)):
            yield source


def _is_one_number(node: fx.Node) -> bool:
    return all(found.shape == () for found in tensors_in(ir.mark(node).type))
