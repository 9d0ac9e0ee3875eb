"""A report as a picture: the graph in Graphviz's language."""

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from fxamp.review.rows import Row

_FILL = {"low": "#bfe5d2", "high": "#f6d6a8", "none": "#e4e7ec"}
_CAST_FILL = "#d9c8f5"
_SECONDS = 20
"""How long Graphviz may take for a picture; graphs of thousands of nodes take it minutes."""


def as_dot(rows: Iterable[Row]) -> str:
    """The graphs in dot, nodes in boxes of their modules, coloured by precision; parameters are left out."""
    shown = [row for row in rows if not (row.op in ("parameter", "buffer") or row.role == "weight cast")]
    names = {(row.graph, row.name) for row in shown}
    lines = [
        "digraph fxamp {",
        '  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=10];',
        '  graph [fontname="Helvetica", fontsize=10, color="#98a2b3"];',
    ]
    lines += _clusters(shown)
    for row in shown:
        for given in row.inputs:
            if (row.graph, given) in names:
                lines.append(f"  {_id(row.graph, given)} -> {_id(row.graph, row.name)};")
    return "\n".join([*lines, "}"]) + "\n"


def _clusters(rows: list[Row]) -> Iterator[str]:
    homes: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        homes.setdefault((row.graph, row.module), []).append(row)
    for number, ((graph, module), members) in enumerate(homes.items()):
        if module:
            yield f"  subgraph cluster_{number} {{ label={_quoted(module)};"
        yield from (f"  {_id(graph, row.name)} [{_attributes(row)}];" for row in members)
        if module:
            yield "  }"


def _attributes(row: Row) -> str:
    fill = _CAST_FILL if row.role else _FILL[row.precision]
    label = f"{'cast to ' + row.dtype if row.role == 'cast' else row.op}\\n{row.name}"
    return f'label="{label}", fillcolor="{fill}", tooltip={_quoted(row.reason)}'


def _id(graph: int, name: str) -> str:
    return f"g{graph}_{name}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def draw(dot_file: Path, svg_file: Path) -> bool:
    """Write the picture as SVG where Graphviz is installed and the graph is small enough for it."""
    if shutil.which("dot") is None:
        return False
    try:
        command = ["dot", "-Tsvg", str(dot_file), "-o", str(svg_file)]
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
    except (subprocess.SubprocessError, OSError):
        svg_file.unlink(missing_ok=True)
        return False
    return True
