"""Imports point one way (the table is the rule)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "fxamp"

# What each room may import, besides itself. A file of its own line comes before its folder's.
GROUND = {"errors", "dtypes", "references", "words"}
NAMES = GROUND | {"opnames", "spellings"}
GRAPH = NAMES | {"canonical", "inplace", "ir", "lists", "fakes", "recurrent_fakes", "switches"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "words": set(),
    "references": set(),
    "dtypes": {"errors"},
    "spellings": set(),
    "opnames": GROUND | {"spellings"},
    "lists": NAMES,
    "switches": set(),
    "ir": NAMES,
    "inplace": NAMES | {"ir"},
    "canonical": NAMES | {"inplace", "ir", "switches"},
    "recurrent_fakes": set(),
    "fakes": NAMES | {"ir", "recurrent_fakes"},
    "data": GROUND,
    "whole": GROUND,
    "capability": set(),
    "passes": GRAPH | {"capability", "runtime"},
    "runtime": GROUND | {"whole"},
    "capture": GRAPH | {"recompute"},
    "codegen": GRAPH | {"recompute"},
    "recompute": GRAPH,
    "storage": GROUND | {"runtime"},
    "structure": GROUND | {"capture"},
    "unconverted": GROUND | {"ir", "lists"},
    "views": GRAPH | {"capture"},
    "variant": GRAPH | {"capture", "codegen"},
    "changes": {"errors", "capture", "variant"},
    "workshop": {"variant"},
    "autocasting": GRAPH | {"storage", "views"},
    "engine": GRAPH | {"autocasting", "capture", "changes", "structure", "variant", "views", "workshop"},
    "uncalled": GROUND | {"engine"},
    "compiling": GRAPH | {"engine"},
    "converted": GRAPH | {"capture", "compiling", "engine", "storage", "views"},
    "rebuild": GRAPH | {"capture", "engine", "variant", "views"},
    "block_calls": GRAPH | {"variant"},
    "numerics": GRAPH
    | {"engine", "capture", "codegen", "rebuild", "runtime", "unconverted", "variant", "whole"}
    | {"views"},
    "review": GRAPH
    | {"block_calls", "capability", "codegen", "data", "rebuild", "numerics", "runtime", "storage", "unconverted"}
    | {"capture", "engine", "passes", "variant", "views", "whole"},
}
# Rooms that put things together may import anything below them.
ABOVE = {
    "options",
    "boundaries",
    "weight_fits",
    "number_fits",
    "dynamo_variant",
    "dynamo_preview",
    "backend",
    "convert",
    "pipeline",
    "instruments",
    "cli",
    "demo",
    "counting",
}
# The apex interface calls convert() when it is used, not when it is imported.
LATE = {("runtime", "convert")}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(source: str) -> set[tuple[str, bool]]:
    """Rooms of fxamp that a file imports, each with whether it does so inside a function."""
    tree = ast.parse(source)
    late = {
        child
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(function)
    }
    found = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "fxamp" else [f"fxamp.{alias.name}" for alias in node.names]
        found |= {(name.split(".")[1], node in late) for name in names if name.startswith("fxamp.")}
    return found


def violations(own: str, source: str) -> list[str]:
    if own in ABOVE or own in ("__init__", "__main__"):
        return []
    allowed = MAY_IMPORT[own] | {own}
    return [name for name, late in imports(source) if name not in allowed and not (late and (own, name) in LATE)]


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    assert violations(room(path), path.read_text()) == []


def test_every_room_has_its_line():
    assert {room(path) for path in ROOT.rglob("*.py")} <= {*MAY_IMPORT, *ABOVE, "__init__", "__main__"}


@pytest.mark.parametrize(
    ("own", "source", "culprits"),
    [
        ("runtime", "from fxamp.passes.cast import InsertCasts", ["passes"]),
        ("capture", "import fxamp.passes", ["passes"]),
        ("runtime", "def f():\n    from fxamp.convert import convert", []),
        ("runtime", "from fxamp.convert import convert", ["convert"]),
        ("passes", "from fxamp import review", ["review"]),
    ],
)
def test_the_check_can_fail(own, source, culprits):
    assert violations(own, source) == culprits
