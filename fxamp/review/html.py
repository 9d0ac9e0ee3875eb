"""A report as one self-contained page: modules that open and close, before and after side by side."""

import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from fxamp.model.variant import Variant
from fxamp.review.advice import region_advice
from fxamp.review.chain import Rows, by_name, chain_of
from fxamp.review.code import expressions, graph_title
from fxamp.review.counted import is_cast
from fxamp.review.regions import Region
from fxamp.review.report import Report
from fxamp.review.rows import Row
from fxamp.words import bytes_in_words

HERE = Path(__file__).parent
_OPEN_ALL = 250
"""Lines that are shown at once; in larger graphs the modules below the first two levels start closed."""
_REGIONS = 8
_LINES = 3
"""Source lines of a region that are named."""


def missing_jinja() -> bool:
    """Whether the template engine is not installed."""
    return importlib.util.find_spec("jinja2") is None


@dataclasses.dataclass
class Line:
    """One node as the page shows it.

    Attributes:
        kind: "low" | "high" | "none" | "cast" | "weight" | "pad" | "made" (by a pass, for a cast).
        before, after: its code; "" on the side where it does not exist.
        tip: what hovering shows.
    """

    name: str
    kind: str
    badge: str
    before: str
    after: str
    shape: str
    line: str
    tip: str
    search: str


@dataclasses.dataclass
class Group:
    """A module's stretch of the graph: lines and inner groups, in order.

    Attributes:
        path: dotted, "" for the root.
    """

    path: str
    name: str
    module_class: str
    depth: int
    items: list[Any] = dataclasses.field(default_factory=list)

    def lines(self) -> Iterator[Line]:
        """Every line, those of inner groups included."""
        for item in self.items:
            if isinstance(item, Group):
                yield from item.lines()
            else:
                yield item

    def count(self, *kinds: str) -> int:
        """Lines of these kinds."""
        return sum(line.kind in kinds for line in self.lines())


def as_html(built: Report, variants: Sequence[Variant]) -> str:
    """The page. It asks nothing from the network.

    Raises:
        ImportError: jinja2 is not installed; see `missing_jinja`.
    """
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((HERE / "report.html.j2").read_text(encoding="utf-8"))
    graphs = [
        {
            "title": graph_title(variant) + _times(built.runs[number]),
            "root": _tree(variant, by_name(built.rows, number), _classes(built)),
        }
        for number, variant in enumerate(variants)
    ]
    told = {region_advice(region) for region in built.regions}  # the page has a section of its own for them
    total = sum(1 for row in built.rows if _kind(row) != "weight")
    return template.render(
        report=built,
        graphs=graphs,
        open_depth=99 if total <= _OPEN_ALL else 2,
        regions=[(region, _lines_of(region)) for region in built.regions[:_REGIONS]],
        advice=[text for text in built.advice if text not in told],
        words=bytes_in_words,
    )


def _times(runs: int) -> str:
    return f", {runs} times in one forward" if runs > 1 else ""


def _classes(built: Report) -> dict[str, str]:
    """Module path -> class name; what a report does not know of the model it leaves out."""
    return {path: type(module).__name__ for path, module in built._model.named_modules()} if built._model else {}


def _lines_of(region: Region) -> str:
    lines = [PurePath(source).name for source in region.sources]
    return ", ".join(lines[:_LINES]) + (" ..." if len(lines) > _LINES else "")


def _tree(variant: Variant, rows: Rows, classes: Mapping[str, str]) -> Group:
    before, after = expressions(variant, rows, with_weights=True)
    root = Group("", variant.captured.root.__class__.__name__, "", 0)
    stack = [root]
    weights: list[Row] = []
    for row in rows.values():
        if _kind(row) == "weight":  # stands with what follows it, where it is read: hidden lines part no module
            weights.append(row)
            continue
        parts = row.module.split(".") if row.module else []
        depth = _shared(stack, parts)
        del stack[depth + 1 :]
        for end in range(depth + 1, len(parts) + 1):
            path = ".".join(parts[:end])
            group = Group(path, parts[end - 1], classes.get(path, ""), end)
            stack[-1].items.append(group)
            stack.append(group)
        stack[-1].module_class = stack[-1].module_class or row.module_class
        stack[-1].items += [_line(found, rows, before, after) for found in (*weights, row)]
        weights.clear()
    root.items += [_line(found, rows, before, after) for found in weights]
    return root


def _shared(stack: Sequence[Group], parts: Sequence[str]) -> int:
    """How many open groups the next line stays in, the root not counted."""
    depth = 0
    while depth < min(len(stack) - 1, len(parts)) and stack[depth + 1].name == parts[depth]:
        depth += 1
    return depth


def _line(row: Row, rows: Rows, before: dict[str, str], after: dict[str, str]) -> Line:
    shape = "" if row.shape is None else " x ".join(map(str, row.shape)) or "scalar"
    fallback = f"{row.op}({', '.join(row.inputs)})" if row.inputs else row.op
    return Line(
        name=row.name,
        kind=_kind(row),
        badge=_badge(row),
        before="" if row.role else before.get(row.name, fallback),
        after=after.get(row.name, fallback),
        shape=shape,
        line=row.line,
        tip=_tip(row, rows, after.get(row.name, fallback)),
        search=" ".join((row.name, row.op, row.module, row.module_class, row.line, row.reason, row.role)).lower(),
    )


def _kind(row: Row) -> str:
    if row.role == "weight cast" or row.op in ("parameter", "buffer"):
        return "weight"
    if row.role:
        return "cast" if is_cast(row) else "pad" if row.role in ("pad", "slice") else "made"
    return row.precision


def _badge(row: Row) -> str:
    if row.role == "cast" and not is_cast(row):
        return row.op
    if row.role in ("cast", "weight cast"):
        return ("\N{DOWNWARDS ARROW} " if row.precision == "low" else "\N{UPWARDS ARROW} ") + row.dtype.split("/")[0]
    return row.role or row.dtype.split("/")[0] or "-"


def _tip(row: Row, rows: Rows, code: str) -> str:
    chain = [f"{link.name}: {link.reason} [{link.reason_kind}]" for link in chain_of(row, rows)]
    size = f"{bytes_in_words(row.nbytes)}" if row.nbytes is not None else "size unknown"
    head = f"{row.name} - {row.role or row.op} ({row.colour}), {row.runs_in}, {size}"
    return "\n".join([head, *chain, "", code, *([row.source] if row.source else [])])
