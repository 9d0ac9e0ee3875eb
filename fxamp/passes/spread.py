"""How far low precision spreads: deny, domains, and the levels."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import fx

from fxamp import ir
from fxamp.inplace import mutated
from fxamp.lists import DOMAIN_SENSITIVE, TRAITS
from fxamp.passes.ruling import EXACT_CREATORS, Ruling, gives_exact, is_bounded
from fxamp.passes.streams import TF32_EPS, made_of_weights


def spread_deny(ruling: Ruling) -> None:
    """Forward: infer nodes below a deny node are high, clear nodes pass that on, allow nodes end it."""
    carries: dict[fx.Node, fx.Node] = {}
    for node in ruling.graph.nodes:
        if not node.op.startswith("call") or not ruling.is_reader(node):
            continue
        colour = ruling.colours[node]
        source = ruling.first_source(node, carries)
        if colour == "deny" and not ruling.is_fixed(node, "low") and not gives_exact(node):
            carries[node] = node
        elif source is not None and colour in ("infer", "clear"):
            origin = carries[node] = carries[source]
            if colour == "infer" and node not in ruling.fixed:
                through = "" if source is origin else f" through {source.name}"
                text = f"downstream of `{ir.mark(origin).op}` ({origin.name}, deny){through}"
                ruling.fix(node, "high", "downstream", text, source)
    if ruling.policy.level == "aggressive":
        _keep_clear_between_deny_nodes(ruling, carries)


def _keep_clear_between_deny_nodes(ruling: Ruling, carries: dict[fx.Node, fx.Node]) -> None:
    """exp -> view -> add: grappler's view is fp32 too. The other levels know it from what is low-born."""
    reaches: set[fx.Node] = set()
    for node in reversed(ruling.graph.nodes):
        if ruling.colours[node] != "clear" or not node.op.startswith("call"):
            continue
        if any(user in reaches or ruling.colours[user] in ("infer", "deny") for user in node.users):
            reaches.add(node)
            if node in carries and node not in ruling.fixed:
                ruling.fix(node, "high", "downstream", f"between deny nodes, below {carries[node].name}", carries[node])


def protect_domains(ruling: Ruling) -> None:
    """Backward: infer nodes that reach a domain-sensitive argument through infer, clear and unlisted nodes are high.

    So are those that are squared where the square is subtracted: 1 - tanh(x)**2 is positive, unless tanh(x) was rounded
    to 1. At level balanced so is a difference of two that saturate, and what leads to it: the probability of an
    interval is sigmoid(x + 0.5) - sigmoid(x - 0.5), and its gradient a difference of those two's.
    """
    reaches: dict[fx.Node, fx.Node] = {}
    differs: set[fx.Node] = set()  # what is subtracted, or is subtracted from, on the way
    for node in reversed(ruling.graph.nodes):
        if node in reaches and ruling.colours[node] == "infer" and node not in ruling.fixed:
            end = reaches[node]
            op = ir.mark(end).op
            text = f"feeds the argument of `{op}` ({end.name}), which must not round to {_EDGES.get(op, _POSITIVE)}"
            if op in _DIFFERENCES:
                text = f"leads to {end.name}, a difference of values between bounds, which rounding may be larger than"
            ruling.fix(node, "high", "upstream", text, end)
        passes_on = node in reaches and (
            ruling.colours[node] in ("infer", "clear", "unlisted") or (node in differs and _is_square(ruling, node))
        )
        is_difference = passes_on and (node in differs or ir.mark(node).op in _DIFFERENCES)
        sensitive = DOMAIN_SENSITIVE.get(ir.mark(node).op, ())
        is_interval = _is_interval(ruling, node)
        if is_interval and node not in ruling.fixed:
            text = "is a difference of values between bounds, which their rounding may be larger than"
            ruling.fix(node, "high", "differences", text)
        for read in ruling.reads[node]:
            ends = read.position in sensitive or is_interval
            end_of_way = node if ends else reaches[node] if passes_on else None
            if end_of_way is not None:
                for source in ruling.sources_of(read, node):
                    reaches.setdefault(source, end_of_way)
                    if is_difference:
                        differs.add(source)


_POSITIVE = "0 or below it"
_EDGES = {
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), "1 or past it"),
    **dict.fromkeys(("binary_cross_entropy", "logit", "special_ndtri"), "0 or 1"),
    **dict.fromkeys(("log1p", "special_xlog1py"), "-1 or below it"),
    **dict.fromkeys(("addcdiv", "div", "floor_divide", "fmod", "reciprocal", "remainder"), "0"),
    **dict.fromkeys(("rfloordiv", "rmod", "rtruediv"), "0"),
    "acosh": "1 or below it",
}
"""Op -> where its domain ends, of those that take not only positive numbers."""

_DIFFERENCES = frozenset({"sub", "rsub"})


_SATURATES = frozenset("erf hardsigmoid sigmoid softmax special_ndtr tanh".split())


def _is_interval(ruling: Ruling, node: fx.Node) -> bool:
    if ruling.policy.level != "balanced" or ir.mark(node).op not in _DIFFERENCES or ruling.is_spoken_of(node):
        return False
    origins = [ruling.through_clear(source) for source in ruling.sources(node)]
    return len(origins) == 2 and all(ir.mark(origin).op in _SATURATES for origin in origins)


def _is_square(ruling: Ruling, node: fx.Node) -> bool:
    verdict = ruling.fixed.get(node)
    return ir.mark(node).op in ("pow", "square") or (verdict is not None and verdict.reason.kind == "square")


# What takes a mean away, and divides by how far the values are from it.
_CENTRES = frozenset(
    "batch_norm group_norm instance_norm layer_norm native_batch_norm native_group_norm native_layer_norm".split()
)
_SOFTMAX = frozenset({"masked_softmax", "softmax", "softmin"})


def protect_differences(ruling: Ruling) -> None:
    """Backward: a softmax that a norm centres, or that goes into one that is centred, is high, and so is the norm.

    `norm(softmax(scores))` is made of what the probabilities differ by. Where the scores differ by a tenth, rounded
    probabilities make it wrong by 3 % in bfloat16 and 0.4 % in float16, eleven times as much as under autocast, which
    has both in float32 on a GPU; where they differ by less, by more.
    """
    if ruling.policy.level != "balanced":
        return
    centred: set[fx.Node] = set()
    for node in reversed(ruling.graph.nodes):
        if (ir.mark(node).op not in _CENTRES and node not in centred) or ruling.is_spoken_of(node):
            continue
        for origin in map(ruling.through_clear, ruling.sources(node)):
            if ir.mark(origin).op not in _SOFTMAX or ruling.is_spoken_of(origin):
                continue
            centred.add(origin)
            text = f"{node.name} goes by the differences of probabilities, which rounding may be larger than"
            for each in (origin, node):
                if each not in ruling.fixed:
                    ruling.fix(each, "high", "differences", text)


def keep_last_sums(ruling: Ruling) -> None:
    """Backward: what mixes a float32 weight into the model's output, and goes nowhere else, is high.

    `conv(h) / 2 + self.mean` comes back in float32 as under autocast, which promotes it: the kernel reads the low value
    beside the weight as it is, so that this costs no cast, and low would round the whole output.
    """
    if ruling.policy.level != "balanced" or ruling.policy.output_mode != "high":
        return
    returned: set[fx.Node] = set()
    for node in reversed(ruling.graph.nodes):
        is_mixed = ruling.colours[node] == "infer" and ir.mark(node).op in _MIXES
        is_passed = ruling.colours[node] == "clear" and ir.mark(node).op in TRAITS["view"]
        if node in ruling.fixed or not node.users or mutated(node) or not (is_mixed or is_passed):
            continue
        if all(user.op == "output" or user in returned for user in node.users):
            returned.add(node)
            origins = [ruling.through_clear(source) for source in ruling.sources(node)] if is_mixed else []
            weight = next((origin for origin in origins if ir.is_weight(origin)), None)
            if weight is not None and len(origins) > 1:
                text = f"{weight.name} is float32, and so is what the model returns (level 'balanced')"
                ruling.fix(node, "high", "not low-born", text, weight)


def keep_differences_of_weights(ruling: Ruling) -> None:
    """`1 - self.decay` may be as small as what rounding takes from a decay of 0.998, which in bfloat16 is 1.

    So may what a batch norm leaves of a filter whose mean it takes off (weight standardisation), and a CPU's has low
    statistics where it has neither weights nor statistics of float32.
    """
    if ruling.policy.level != "balanced":
        return
    for node in made_of_weights(ruling.graph):
        is_difference = ir.mark(node).op in _TAKES_AWAY and ruling.colours.get(node) == "infer"
        if is_difference and ir.holds_float32(node) and node not in ruling.fixed and not ruling.is_spoken_of(node):
            text = "a difference of weights may be as small as what low loses of them (level 'balanced')"
            ruling.fix(node, "high", "not low-born", text)


_TAKES_AWAY = frozenset({"sub", "rsub", "batch_norm", "instance_norm"})
_MIXES = frozenset({"add", "sub", "rsub", "mul", "div"})


def mark_born(ruling: Ruling) -> None:
    """Forward: which values are low-born, and fix the infer nodes that are not eligible for being low."""
    for node in ruling.graph.nodes:
        if not ruling.is_reader(node):
            continue
        if ruling.policy.level == "aggressive" or _is_born(ruling, node):
            ruling.born.add(node)
        if ruling.policy.level != "aggressive" and _is_unfit(ruling, node):
            culprit = next((s for s in ruling.sources(node) if s not in ruling.born), None)
            ruling.fix(node, "high", "not low-born", _unborn_text(ruling, culprit), culprit)
        elif ruling.policy.level != "aggressive" and (source := _rounds_again(ruling, node)) is not None:
            text = f"{source.name} is float32, and what is rounded for a dropout is rounded again by its factor"
            ruling.fix(node, "high", "not low-born", text, source)
    if ruling.policy.level == "aggressive":
        _keep_between_allow_nodes(ruling)
    for storage in ruling.aliases.storages:  # one value of a storage may be read under every name it has
        if any(writer not in ruling.born for writer in storage.writers if ruling.is_reader(writer)):
            ruling.born.difference_update(storage.nodes)


def _is_unfit(ruling: Ruling, node: fx.Node) -> bool:
    """Whether the level forbids a node that is free so far to run low: it would round what is not low-born."""
    if node in ruling.fixed or not (ruling.colours[node] == "infer" or _writes(ruling, node)):
        return False
    if not ruling.reads[node]:
        return node not in ruling.born
    return any(source not in ruling.born for source in ruling.sources(node))


def _writes(ruling: Ruling, node: fx.Node) -> bool:
    """Whether a clear node puts float32 values where others find them (copy_, x[i] = y)."""
    return ruling.colours[node] == "clear" and bool(mutated(node)) and node in ruling.participants


def _rounds_again(ruling: Ruling, node: fx.Node) -> fx.Node | None:
    """The float32 value that a free dropout would scale by a number that is no power of two, None where it does not.

    At level balanced float16, with the bits of TF32, may round it twice.
    """
    if "dropout" not in ir.mark(node).op or ruling.colours[node] != "clear" or node in ruling.fixed:
        return None
    if ruling.policy.level != "strict" and torch.finfo(ruling.policy.low).eps <= TF32_EPS:
        return None
    default = ir.argument_of(node, 1, "p", 0.5), ir.argument_of(node, 2, "training", True)
    p, training = node.meta.get("dropout", default)
    if not training or (isinstance(p, float | int) and math.frexp(1 - p)[0] in (0, 0.5)):
        return None
    origins = map(ruling.through_clear, ruling.sources(node))
    return next((origin for origin in origins if ruling.is_fixed(origin, "high")), None)


def _unborn_text(ruling: Ruling, culprit: fx.Node | None) -> str:
    name = culprit.name if culprit is not None else "its operand"
    if ruling.policy.level == "strict":
        return f"{name} is not already low (level 'strict': the widest operand decides)"
    return f"{name} is float32 by origin, and rounding it would lose digits (level 'balanced')"


def _is_born(ruling: Ruling, node: fx.Node) -> bool:
    verdict, strict = ruling.fixed.get(node), ruling.policy.level == "strict"
    if node in ruling.born:
        return True
    if ir.is_weight(node):
        return not strict and ruling.fit_of(node) == "normal"
    if not node.op.startswith("call"):
        return False
    if verdict is not None and verdict.precision == "low":
        return True
    if (is_bounded(node) or gives_exact(node)) and not strict:
        return True
    if verdict is not None and verdict.reason.kind == "gradient sums":
        return all(
            source in ruling.born for source in ruling.sources(node)
        )  # means of numbers are as low-born as these
    if verdict is not None and verdict.reason.kind == "creation":
        return ir.mark(node).op in EXACT_CREATORS and node not in ruling.tainted
    if verdict is not None or ruling.colours[node] not in ("infer", "clear"):
        return False
    if not ruling.reads[node]:
        return ir.mark(node).op in EXACT_CREATORS
    return all(source in ruling.born for source in ruling.sources(node))


def _keep_between_allow_nodes(ruling: Ruling) -> None:
    """Level 'aggressive': an infer node may be low where an allow node stands on both sides of it."""
    below = _connected(ruling, ruling.graph.nodes, ruling.sources)
    above = _connected(ruling, reversed(ruling.graph.nodes), lambda node: list(node.users))
    for node in ruling.graph.nodes:
        is_free = ruling.colours[node] == "infer" and node not in ruling.fixed
        if is_free and not (node in below and node in above):
            text = "does not stand between two allow nodes (level 'aggressive')"
            ruling.fix(node, "high", "not between", text)


def _connected(ruling: Ruling, nodes: Iterable[fx.Node], step: Callable[[fx.Node], list[fx.Node]]) -> set[fx.Node]:
    """Unfixed infer and clear nodes that a low node reaches through such nodes only."""
    found: set[fx.Node] = set()
    for node in nodes:
        if node not in ruling.fixed and ruling.colours[node] in ("infer", "clear"):
            if any(neighbour in found or ruling.is_fixed(neighbour, "low") for neighbour in step(node)):
                found.add(node)
    return found
