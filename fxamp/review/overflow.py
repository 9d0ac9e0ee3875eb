"""Numbers that float32 holds on the given inputs and float16 would not: who makes them, and whom that harms."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from fxamp.numerics.extent import Extent
from fxamp.review.match import is_widening
from fxamp.review.op_table import LEFT_ALONE, autocast_policies
from fxamp.review.rows import Row

FP16_INF = 65520.0
"""The smallest number that is inf in float16: those from its largest, 65504, up to here are rounded down."""
_LOWERS = "lower_precision_fp"
_MADE_OF = {
    "square": ("pow",),
    "inner": ("matmul",),
    "tensordot": ("mm",),
    "cross_entropy": ("cross_entropy_loss", "nll_loss"),
}
"""Ops that torch.autocast does not list where it lists one that they are made of, which it then meets."""


def largest(extent: Extent) -> float:
    """The largest finite size in it."""
    return max(abs(extent.low or 0.0), abs(extent.high or 0.0))


def overflows(rows: Sequence[Row], seen: Mapping[str, Extent]) -> Iterator[tuple[Row, str, str]]:
    """Every node that makes numbers beyond float16, with the severity and whom it harms, in words.

    "error" where torch.autocast has such a number in float16, on CUDA or on the CPU, or the model itself has; "warning"
    where it would as a whole in float16 (`model.half()`). What only passes on such numbers is not told again.

    Args:
        rows: of one graph.
        seen: extents of its nodes, of a run in float32.
    """
    edges = _Edges(rows)
    beyond = {name for name, extent in seen.items() if largest(extent) >= FP16_INF and name in edges.readers}
    runs = {device: _Run.of(edges, autocast_policies(device)) for device in ("cuda", "cpu")}
    halved = _Run.of(edges, {}, sources_are_low=True)
    for row in edges.rows:
        if row.name not in beyond or beyond & {given.name for given in edges.given[row.name]}:
            continue
        if row.is_source and (seen[row.name].high or 0.0) <= 0:
            continue  # an additive mask
        if row.precision == "none":
            if row.dtype == "float16":
                yield row, "error", f"the model itself runs it in float16, which makes it inf{_SIZE}"
            continue
        told = _for_autocast(row, runs, edges, beyond)
        if told:
            yield row, "error", told
        elif not row.is_source and halved.harmed(row, edges, beyond) is not None:
            yield row, "warning", f"torch.autocast keeps it in float32, model.half() makes it inf{_SIZE}"


_SIZE = " (float16 ends at 65504)"


def _for_autocast(row: Row, runs: Mapping[str, "_Run"], edges: "_Edges", beyond: set[str]) -> str:
    """What torch.autocast does with a value that float16 does not hold; "" where it stays in float32."""
    on_cuda, on_cpu = (runs[device].harmed(row, edges, beyond) for device in ("cuda", "cpu"))
    if on_cuda is row:
        return f"torch.autocast runs it in float16, which makes it inf{_SIZE}, as model.half() does"
    if on_cuda is not None:
        return f"torch.autocast casts it to float16 for {on_cuda.name}, which makes it inf{_SIZE}"
    if on_cpu is not None:
        how = "runs it in float16" if on_cpu is row else f"casts it to float16 for {on_cpu.name}"
        return f"torch.autocast keeps it in float32 on CUDA, but {how} on the CPU: inf{_SIZE}, as in model.half()"
    return ""


class _Edges:
    """The model's own nodes of one graph, and which reads which: casts and pads are looked through."""

    def __init__(self, rows: Sequence[Row]) -> None:
        by_name = {row.name: row for row in rows}
        self.rows = [row for row in rows if not row.role and row.op != "output"]
        self.given = {row.name: [_behind(by_name[name], by_name) for name in row.inputs] for row in self.rows}
        self.readers: dict[str, list[Row]] = {row.name: [] for row in self.rows}
        for row in self.rows:
            for given in self.given[row.name]:
                self.readers[given.name].append(row)


def _behind(row: Row, by_name: Mapping[str, Row]) -> Row:
    while row.role and row.inputs:
        row = by_name[row.inputs[0]]
    return row


def _policy(row: Row, policies: Mapping[str, str]) -> str:
    names = (row.op, *_MADE_OF.get(row.op, ()))
    return next((policies[name] for name in names if name in policies), LEFT_ALONE)


@dataclasses.dataclass(frozen=True)
class _Run:
    """Which nodes hold float16 when torch.autocast runs the model by these policies."""

    low: frozenset[str]
    policies: Mapping[str, str]

    @classmethod
    def of(cls, edges: _Edges, policies: Mapping[str, str], sources_are_low: bool = False) -> "_Run":
        low = set[str]()
        for row in edges.rows:
            floats = [given for given in edges.given[row.name] if "float" in given.dtype]
            wide = [given for given in floats if given.shape != ()] or floats  # a number beside a tensor does not widen
            policy = _policy(row, policies)
            if row.precision == "none":
                is_low = row.dtype == "float16"
            elif row.is_source:
                is_low = sources_are_low
            elif is_widening(row):
                is_low = False
            elif policy in (LEFT_ALONE, "promote") or row.reason_kind == "user region":
                is_low = bool(wide) and all(given.name in low for given in wide)
            else:
                is_low = policy == _LOWERS
            if is_low:
                low.add(row.name)
        return cls(frozenset(low), policies)

    def harmed(self, row: Row, edges: _Edges, beyond: set[str]) -> Row | None:
        """The first node that holds the row's numbers in float16, or reads them cast to it."""
        ahead, met = [row], {row.name}
        while ahead:
            here = ahead.pop(0)
            if here.name in self.low and not here.is_source:
                return here
            for reader in edges.readers[here.name]:
                if _policy(reader, self.policies) == _LOWERS and reader.reason_kind != "user region":
                    return reader
                if reader.name in beyond - met:
                    met.add(reader.name)
                    ahead.append(reader)
        return None
