"""What stayed outside, and what would make a converted model faster, in sentences."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from fxamp import ir
from fxamp.dtypes import LOW_DTYPES, dtype_name
from fxamp.model.engine import engine_of
from fxamp.model.state_dicts import was_lowered
from fxamp.model.variant import Variant
from fxamp.paths import attribute_at
from fxamp.review.gemms import ALIGNMENT, Gemm
from fxamp.review.regions import Region
from fxamp.review.rows import Row
from fxamp.tree import every_module
from fxamp.words import bytes_in_words, listed, percent, plural

_MANY = 3
"""Entries of one kind of advice that are named; the rest is counted."""
_WORTH = 1 << 20
"""Bytes: a float32 region below this is not worth a line of advice."""


def outside_of(rows: Iterable[Row]) -> list[str]:
    """Nodes that run as the user wrote them although they hold weights or are unknown, with why."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.reason_kind == "unlisted" or (row.reason_kind == "type" and "inside the module" in row.reason):
            found.setdefault(f"{row.op}: {row.reason}", []).append(row.name)
    return [f"{text} ({plural(len(names), 'node')}: {listed(names, _MANY)})" for text, names in found.items()]


def unread_parameters(model: nn.Module, variants: Sequence[Variant]) -> list[str]:
    """One sentence on the parameters that no graph reads, by themselves or inside a module that stays whole.

    Of what Dynamo captured, one graph of which may serve many modules, and of forwards that no graph holds,
    fxamp.review.uncaptured tells.
    """
    engine = engine_of(model)
    if engine is not None and (engine.fallbacks or engine.way.calls):
        return []
    read: set[int] = set()
    parts = dict(every_module(model))
    for variant in variants:
        # copies of a model share graphs, and so do equal blocks
        owners = [model, *(parts[path] for path in variant.blocks if path in parts)]
        for node in variant.graph.nodes:
            if node.op == "call_module":
                for owner in (variant.captured.root, *owners):
                    with contextlib.suppress(AttributeError):
                        read.update(map(id, owner.get_submodule(str(node.target)).parameters()))
            elif ir.is_weight(node):
                weights = (attribute_at(owner, ir.weight_path(node)) for owner in owners)
                read.update(map(id, (variant.captured.weight(node), *weights)))
    left = {name: weight for name, weight in model.named_parameters() if id(weight) not in read}
    if not left or not variants:
        return []
    size = bytes_in_words(sum(weight.numel() * weight.element_size() for weight in left.values()))
    count = plural(len(left), "parameter")
    return [
        f"{count} ({size}) that no graph reads: {listed(left, _MANY)}. No call has used them so far, or what uses them "
        "runs as it is written"
    ]


def low_already(model: nn.Module) -> str:
    """What to know about a model whose own weights are low (`model.half()`), "" for any other."""
    floats = [weight for weight in model.parameters() if weight.is_floating_point()]
    dtypes = {weight.dtype for weight in floats}
    if not floats or not dtypes <= {*LOW_DTYPES} or was_lowered(model):
        return ""
    names = " and ".join(sorted(map(dtype_name, dtypes)))
    if any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__):
        return (
            f"FSDP2 gathers every parameter of {type(model).__qualname__} in {names}, by its MixedPrecisionPolicy: "
            "nothing is left to convert; the shards keep their dtype."
        )
    return (
        f"every parameter of {type(model).__qualname__} is {names} by itself, so nothing is left to convert. Convert a "
        "float32 model (model.float()); opt_level='O2' stores weights low and keeps float32 masters of them."
    )


def advice_of(
    rows: Sequence[Row], gemms: Sequence[Gemm], regions: Sequence[Region], low_nodes: int, options: Any
) -> Iterator[str]:
    """Sentences, the most important first."""
    if not rows:
        yield "no graph was captured yet: call the model once, or pass example_inputs to fxamp.convert."
        return
    if not low_nodes:
        yield (
            "no node runs in low precision, so no graph gains anything. Most common reasons: "
            + _common_reasons(rows)
            + "."
        )
    yield from _high_gemms(gemms)
    yield from _unaligned(gemms, options.pad_to or ALIGNMENT)
    yield from (region_advice(region) for region in regions[:_MANY] if region.nbytes >= _WORTH)
    unlisted = Counter(row.op for row in rows if row.reason_kind == "unlisted")
    if unlisted:
        ops, remedy = listed(unlisted, _MANY), f"FXAMP_INFERLIST_ADD={','.join(unlisted)}"
        yield f"unlisted ops run in float32: {ops}. {remedy} lets them run low."
    if not gemms and any(row.colour == "allow" for row in rows) and not any(row.shape for row in rows):
        yield "sizes are not known: pass example_inputs to fxamp.convert, or call the model once."


def _common_reasons(rows: Iterable[Row]) -> str:
    kinds = Counter(row.reason for row in rows if row.precision == "high" and not row.role and not row.is_source)
    return "; ".join(f"{reason} ({count})" for reason, count in kinds.most_common(_MANY)) or "there is no float32 op"


def _high_gemms(gemms: Sequence[Gemm]) -> Iterator[str]:
    high = [gemm for gemm in gemms if gemm.precision != "low"]
    if high:
        share = sum(gemm.work for gemm in high) / max(1, sum(gemm.work for gemm in gemms))
        names = listed([gemm.node for gemm in sorted(high, key=lambda gemm: -gemm.work)], _MANY)
        count = plural(sum(gemm.runs for gemm in high), "GEMM")
        yield f"{count} ({percent(share)} of GEMM work) in float32: {names}; ask fxamp.explain why."


def _unaligned(gemms: Sequence[Gemm], alignment: int) -> Iterator[str]:
    """One line for each kind of dimension, with the number to use instead."""
    found: dict[str, list[str]] = {}
    for gemm in gemms:
        if gemm.precision == "low":
            for text in gemm.unaligned:
                found.setdefault(text, []).append(gemm.node)
    lines = sorted(found.items(), key=lambda entry: -len(entry[1]))
    for text, nodes in lines[: 2 * _MANY]:
        size = int(text.split("=")[1].split("(")[0])
        better = -(-size // alignment) * alignment
        where = f"{text} is no multiple of {alignment} in {listed(dict.fromkeys(nodes), _MANY)}"
        yield f"{where}: {better} lets Tensor Cores run full."


def region_advice(region: Region) -> str:
    """A sentence on one float32 region."""
    return (
        f"{bytes_in_words(region.nbytes)} of float32 values in {plural(len(region.nodes), 'node')} around "
        f"{region.cause}: {region.reason}."
    )
