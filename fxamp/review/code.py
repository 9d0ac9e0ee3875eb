"""Graphs as code a person reads: before, after, and the unified diff of the two.

A line is a node, `name = expression  # dtype shape file.py:12`. Parameters stand by their path where they are
read, with `.to(dtype)` where they are cast, so a line differs exactly where a decision changed it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fxamp.model.variant import Variant
from fxamp.review.chain import Rows
from fxamp.review.rows import Row, rows_of
from fxamp.words import plural

_FREED = re.compile(r";  (?:\w+ = )+None\b")
"""`;  x = None` at the end of a line: when a value is dropped, which a reader need not know."""
_ASSIGNMENT = re.compile(r"^ +(\w+)(?:\s*:\s*[^=]+)? = (.*)$")
_NUMBERED = re.compile(r'getattr\(([^(),]+), "(\d+)"\)')
_NAME = re.compile(r"(?<![\w.])([A-Za-z_]\w*)\b(?! ?=[^=])")
_PART = re.compile(r"^(\w+)\[\d+\]$")
_PREFIXES = ("torch.nn.functional.", "torch._C._nn.", "torch._VF.", "torch.ops.aten.")


def texts(variants: Sequence[Variant]) -> tuple[str, str]:
    """before.txt and after.txt: the captured graphs and the rewritten ones."""
    both = [_both(number, variant) for number, variant in enumerate(variants)]
    return "\n".join(before for before, _ in both), "\n".join(after for _, after in both)


def graph_title(variant: Variant) -> str:
    """What calls the graph is for: "symbolic, forward(float32 tensor of 2 dimensions), training"."""
    where = f"{variant.where}: " if variant.where else ""
    return where + call_title(variant.captured) + (", preview" if variant.is_preview else "")


def call_title(captured: Any) -> str:
    """The same of what a capture gave."""
    flags = {flag for _, flag in captured.training}
    mode = {frozenset((True,)): ", training", frozenset((False,)): ", evaluation"}.get(frozenset(flags), "")
    return f"{captured.method}, forward{captured.spec.describe()}{mode}"


def expressions(variant: Variant, rows: Rows, with_weights: bool = False) -> tuple[dict[str, str], dict[str, str]]:
    """Node name -> its expression, before and after; `with_weights` names weights and their casts too."""
    both = [_readable(code, rows) for code in (variant.before, str(variant.graph.python_code("self").src))]
    before, after = ({**weights, **found} if with_weights else found for found, weights in both)
    return before, after


def _both(number: int, variant: Variant) -> tuple[str, str]:
    rows = {row.name: row for row in rows_of(variant.graph)}
    before, after = expressions(variant, rows)
    head = f"# graph {number}: {graph_title(variant)}\n{_signature(variant.before)}\n"
    kept = {name: text for name, text in before.items() if name not in rows or not rows[name].role}
    return head + _listing(kept, rows, True), head + _listing(after, rows, False)


def _signature(code: str) -> str:
    line = next((line for line in code.splitlines() if line.startswith("def ")), "def forward(self):")
    return line.split(" -> ")[0].rstrip(":") + ":"


def _listing(expressions: Mapping[str, str], rows: Rows, is_before: bool) -> str:
    lines = [f"    {text}" if name.startswith("?") else f"    {name} = {text}" for name, text in expressions.items()]
    notes = [_note(rows.get(name), is_before) for name in expressions]
    return "".join(f"{line}{note}\n" for line, note in zip(lines, notes, strict=True))


def _note(row: Row | None, is_before: bool) -> str:
    if row is None:
        return ""
    dtype = "float32" if is_before and row.precision == "low" else row.dtype
    shape = "" if row.shape is None else "x".join(map(str, row.shape)) or "scalar"
    words = " ".join(filter(None, (dtype, shape, row.line)))
    return f"  # {words}" if words else ""


def _readable(code: str, rows: Rows) -> tuple[dict[str, str], dict[str, str]]:
    """Name -> expression with weights inlined, and the weights; lines that assign nothing are called "?12"."""
    found: dict[str, str] = {}
    inlined: dict[str, str] = {}
    for name, text in _statements(code):
        text = _NAME.sub(lambda match: inlined.get(match[1], match[1]), text)
        row = rows.get(name)
        if row is not None and row.op in ("parameter", "buffer"):
            inlined[name] = text
        elif row is not None and row.role == "weight cast":
            inlined[name] = _cast_weight(row, inlined, text)
            if row.op == "packed_cast":
                found[name] = _bucket(text)
        elif row is not None and row.role == "cast" and row.op == "packed_cast":  # of weights that are computed
            found[name] = _bucket(text)
        elif row is not None and row.role == "cast" and (part := _PART.match(text)) and part[1] in found:
            found[name] = f"{row.reason_node}.to({row.dtype})"
        else:
            found[name] = text
    return found, inlined


def _bucket(text: str) -> str:
    return f"{plural(text.count(', '), 'weight')} cast by one copy"


def _cast_weight(row: Row, inlined: Mapping[str, str], text: str) -> str:
    return f"{inlined.get(row.reason_node or '', text)}.to({row.dtype})"


def _statements(code: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(code.splitlines()):
        line = _FREED.sub("", line).rstrip()
        if not line or line.startswith("def "):
            continue
        for prefix in _PREFIXES:
            line = line.replace(prefix, "")
        while (shorter := _NUMBERED.sub(r"\1[\2]", line)) != line:
            line = shorter
        match = _ASSIGNMENT.match(line)
        yield (match[1], match[2]) if match else (f"?{number}", line.strip())
