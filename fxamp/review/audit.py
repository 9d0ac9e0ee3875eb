"""The numeric linter: what low precision would do to a model's numbers, for people who do not convert it."""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import fx, nn

from fxamp import ir
from fxamp.model.variant import Variant
from fxamp.numerics.extent import Extent, check_finite, joined
from fxamp.numerics.flow import CallFlow, Flow
from fxamp.numerics.losses import floats_in
from fxamp.numerics.run import Call, Rewriter, call_of, in_float32
from fxamp.numerics.twin import twins
from fxamp.numerics.watcher import watch_flow
from fxamp.review.gemms import Gemm
from fxamp.review.overflow import FP16_INF, largest, overflows
from fxamp.review.regions import regions_of
from fxamp.review.report import Report, build_report
from fxamp.review.rows import Row
from fxamp.review.sarif import sarif_log
from fxamp.words import bytes_in_words, plural

REGION_BYTES = 1 << 20
"""Float32 regions below this are not worth a finding."""

PATTERNS: Mapping[str, str] = {
    "mask": "a mask is filled with a number that low precision does not hold",
    "literal": "a literal that low precision does not hold",
    "epsilon": "an epsilon that vanishes in low precision",
    "taint": "values beyond the low range go on",
    "square": "a square, which overflows float16 from 256",
    "overflow": "numbers that are inf in float16",
    "integers": "exact integers become floats",
    "domain": "rounding before an op with a bounded domain",
    "protected": "a region where the model's author switched autocast off",
    "gemm": "a matrix product whose sizes do not suit Tensor Cores",
    "region": "a large part that stays in float32",
}
"""What each pattern is, in words."""
REMEDIES: Mapping[str, str] = {
    "mask": "fill with torch.finfo(x.dtype).min, or float('-inf') where no row is masked as a whole",
    "literal": "use a literal that float16 holds, or keep the op in float32 (autocast(enabled=False), or .float())",
    "epsilon": "use an epsilon of at least 1e-3 in float16, or add it in float32",
    "taint": "keep it in float32 down to the softmax or the GEMM that reads it",
    "square": "square in float32: x.float().pow(2), or divide by the largest value first",
    "overflow": "scale it down before (by its largest size, or the number of its terms), or keep it in float32",
    "integers": "keep positions and counts in float32 or in integers until after the trigonometric or GEMM op",
    "domain": "compute the argument in float32, or use a fused form where there is one (log_softmax, "
    "logsigmoid, rms_norm, binary_cross_entropy_with_logits)",
    "protected": "nothing: the model's author keeps it in float32; keep it so",
    "gemm": "use sizes that are multiples of 8; fxamp.convert pads them without touching parameters",
    "region": "let the op that begins it run low where its values allow it: see fxamp.what_if, fxamp.compare",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that low precision would do.

    Attributes:
        pattern: "mask", "literal", "epsilon", "taint", "square", "overflow", "integers", "domain", "protected", "gemm",
            "region".
        severity: "error" where the numbers seen show it, "warning" where they may, "note" where only speed is at stake.
        evidence: the rule that found it; `values`: what the node held on the given inputs.
    """

    pattern: str
    severity: str
    node: str
    op: str
    source: str
    module: str
    evidence: str
    values: str
    remedy: str

    def __str__(self) -> str:
        place = PurePath(self.source).name or self.module or "?"
        seen = f" (seen: {self.values})" if self.values else ""
        return f"{place}: {self.severity}: {self.pattern}: {self.node}: {self.evidence}{seen}. {self.remedy}"


@dataclasses.dataclass(frozen=True)
class Audit:
    """All findings, gravest first. `str()` is text, `to_json()` and `to_sarif()` are for programs."""

    model: str
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        head = f"{self.model}: {plural(len(self.findings), 'finding')}"
        return "\n".join([head, *map(str, self.findings)])

    def to_json(self) -> str:
        """JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def to_sarif(self) -> str:
        """SARIF 2.1.0, as code review on GitHub and elsewhere reads it."""
        return json.dumps(sarif_log(self.findings, PATTERNS, REMEDIES), indent=2)


_ORDER = ("error", "warning", "note")


def audit_converted(converted: nn.Module, inputs: Any) -> Audit:
    """The findings of a model that has been converted for the purpose; it is run once in fp32 on `inputs`.

    Raises:
        OptionError: the inputs hold NaN, or infinities that are no mask's.
    """
    call = call_of(converted, inputs, only_fp32=True)
    check_finite(floats_in((call.args, call.kwargs)), "audit was given")
    fp32 = in_float32(call)
    watched = watch_flow(call, None, fp32, as_float32=True)
    if watched.error is not None:
        raise watched.error
    runs = _runs_of(call, fp32, watched)
    built = build_report([variant for variant, _ in runs], call.engine.options, converted)
    found = [
        dataclasses.replace(finding, module=_module_of(finding, flows))
        for number, (variant, flows) in enumerate(runs)
        for finding in _of_graph(built, number, _joined(flows), _powers(variant.graph))
    ]
    return Audit(built.model, tuple(sorted(found, key=lambda finding: _ORDER.index(finding.severity))))


def _runs_of(call: Call, fp32: Rewriter, exact: CallFlow) -> Sequence[tuple[Variant, list[Flow]]]:
    """Each graph that low precision would run, with all runs of its fp32 twin.

    Where forward runs as it is written, which these are shows in a run of them.
    """
    found: dict[int, tuple[Variant, list[Flow]]] = {}
    if call.turns is None:
        lows = {id(twin): variant for variant, twin in fp32.made.values()}
        pairs = [(flow, lows[id(flow.variant)]) for flow in exact.parts if id(flow.variant) in lows]
    else:
        pairs = [(high, low.variant) for high, low in twins(exact, watch_flow(call, None))]
    for flow, variant in pairs:
        found.setdefault(id(variant), (variant, []))[1].append(flow)
    return list(found.values())


def _joined(flows: Sequence[Flow]) -> dict[str, Extent]:
    names = dict.fromkeys(name for flow in flows for name in flow.values)
    return {name: joined(flow.values[name] for flow in flows if name in flow.values) for name in names}


def _module_of(finding: Finding, flows: Sequence[Flow]) -> str:
    """Where a finding is: of equal modules, which share a graph, the one with the largest numbers."""
    seen = [flow for flow in flows if finding.node in flow.values]
    if len(seen) < 2:
        return finding.module
    worst = max(seen, key=lambda flow: _size(flow.values[finding.node]))
    node = next(node for node in worst.variant.graph.nodes if node.name == finding.node)
    return worst.part.module_path(node)


def _size(extent: Extent) -> tuple[int, int, float]:
    return extent.nans, extent.infs, largest(extent)


def _of_graph(built: Report, number: int, seen: Mapping[str, Extent], powers: Collection[str]) -> Iterator[Finding]:
    rows = [row for row in built.rows if row.graph == number]
    harms = {row.name: (severity, told) for row, severity, told in overflows(rows, seen)}
    for row in rows:
        yield from _of_node(row, seen.get(row.name), row.name in powers, harms.get(row.name))
    yield from _of_gemms([gemm for gemm in built.gemms if gemm.graph == number])
    yield from _of_regions(rows)


# ---------------------------------------------------------------------------------------------------- single nodes


def _of_node(row: Row, extent: Extent | None, is_power: bool, harm: tuple[str, str] | None) -> Iterator[Finding]:
    judge = _JUDGES.get(row.reason_kind) or (_JUDGES["square"] if is_power and row.precision != "none" else None)
    if row.reason_kind == "integers" and extent is not None and largest(extent) <= 1:
        return  # a mask: 0 and 1 are exact
    if row.role:
        return
    values = str(extent) if extent is not None else ""
    if judge is not None:
        pattern, severity = judge(row, extent)
        told = f"; {harm[1]}" if pattern == "square" and harm is not None else ""
        yield _finding(pattern, severity, row, row.reason + told, values)
    elif harm is not None:
        yield _finding("overflow", harm[0], row, harm[1], values)


def _powers(graph: fx.Graph) -> set[str]:
    """The nodes that square, or raise to a power above 1, or to one that is not known before it runs."""
    return {node.name for node in graph.nodes if _is_power(node)}


def _is_power(node: fx.Node) -> bool:
    op = ir.mark(node).op
    exponent = ir.argument_of(node, 1, "exponent") if op == "pow" else 2
    return op in ("pow", "square", "var") and not (isinstance(exponent, (int, float)) and exponent <= 1)


def _finding(pattern: str, severity: str, row: Row, evidence: str, values: str) -> Finding:
    return Finding(pattern, severity, row.name, row.op, row.source, row.module, evidence, values, REMEDIES[pattern])


_FILLS = ("masked_fill", "where", "full", "full_like", "new_full", "fill")


def _literal(row: Row, extent: Extent | None) -> tuple[str, str]:
    if "largest number" in row.reason:
        is_negative = "literal -" in row.reason or "number -" in row.reason
        is_mask = row.op in _FILLS or is_negative  # (1 - mask) * -1e9 is how many models write it
        # As torch.finfo(x.dtype).min reads while the model is in float32: it follows the dtype.
        is_limit = str(torch.finfo(torch.float32).max) in row.reason
        return ("mask" if is_mask else "literal"), "note" if is_limit else "error"
    return ("epsilon" if row.op in ("add", "sub", "clamp", "clamp_min", "rsub") else "literal"), "warning"


def _by_size(pattern: str, limit: float) -> Callable[[Row, Extent | None], tuple[str, str]]:
    """An error where the values seen reach `limit`, else a warning."""

    def judge(row: Row, extent: Extent | None) -> tuple[str, str]:
        return pattern, "error" if extent is not None and largest(extent) >= limit else "warning"

    return judge


_JUDGES: Mapping[ir.Rule, Callable[[Row, Extent | None], tuple[str, str]]] = {
    "literal": _literal,
    "taint": lambda row, extent: ("taint", "warning"),
    "square": _by_size("square", FP16_INF),
    "integers": _by_size("integers", 2049.0),
    "upstream": lambda row, extent: ("domain", "warning"),
    "user region": lambda row, extent: ("protected", "note"),
}


# ------------------------------------------------------------------------------------------------------- graphs


def _of_gemms(gemms: list[Gemm]) -> Iterator[Finding]:
    for gemm in gemms:
        if gemm.unaligned:
            evidence = f"{', '.join(gemm.unaligned)}: no multiple of 8, so Tensor Cores run less than full"
            size = f"{gemm.batch} x ({gemm.m} x {gemm.k}) @ ({gemm.k} x {gemm.n})"
            yield Finding(
                *("gemm", "note", gemm.node, gemm.op, gemm.source, gemm.module, evidence, size, REMEDIES["gemm"])
            )


def _of_regions(rows: list[Row]) -> Iterator[Finding]:
    by_name = {row.name: row for row in rows}
    for region in regions_of(rows):
        if region.nbytes >= REGION_BYTES:
            row = by_name[region.cause]
            evidence = (
                f"{bytes_in_words(region.nbytes)} stay float32 in {plural(len(region.nodes), 'node')}: {row.reason}"
            )
            yield _finding("region", "note", row, evidence, "")
