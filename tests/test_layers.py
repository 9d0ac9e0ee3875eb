"""Imports point one way (the table is the rule)."""

import ast
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent / "fxamp"

# What each room may import, besides itself. A file of its own line comes before its folder's.
GROUND = {"errors", "dtypes", "logs", "patched", "randomness", "references", "tree", "words"}
NAMES = GROUND | {"opnames", "paths", "spellings"}
CALLED = {"switches", "checks", "draws", "authors", "derived", "function_modes"}
FAKES = {"fake_limits", "grouped", "leaf_fakes", "recurrent_fakes", "sparse_fakes"}
GRAPH = (
    NAMES
    | CALLED
    | FAKES
    | {
        "canonical",
        "fakes",
        "inplace",
        "ir",
        "lists",
        "module_hooks",
        "override_keys",
        "powers",
        "recorded",
        "sparse",
        "value_types",
    }
)
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "logs": {"errors"},
    "tree": set(),
    "paths": {"tree"},
    "words": set(),
    "patched": set(),
    "randomness": set(),
    "references": set(),
    "dtypes": {"errors"},
    "spellings": set(),
    "opnames": GROUND | {"spellings"},
    "lists": NAMES,
    "switches": set(),
    "checks": set(),
    "draws": set(),
    "authors": set(),
    "derived": set(),
    "function_modes": set(),
    "value_types": set(),
    "sparse": set(),
    "recorded": {"errors"},
    "ir": NAMES | {"value_types"},
    "override_keys": {"ir", "tree"},
    "inplace": NAMES | {"ir"},
    "canonical": NAMES | {"inplace", "ir", "switches"},
    "grouped": set(),
    "powers": set(),
    "teachers": {"sparse", "tree"},
    "module_hooks": set(),
    "recurrent_fakes": set(),
    "sparse_fakes": {"sparse"},
    "fake_limits": set(),
    "leaf_fakes": NAMES | {"derived", "fake_limits", "ir", "module_hooks", "recurrent_fakes"},
    "fakes": NAMES | FAKES | {"authors", "draws", "function_modes", "sparse"},
    "data": GROUND,
    "whole": GROUND,
    "capability": set(),
    "passes": GRAPH | {"capability", "runtime"},
    "runtime": GROUND | {"recorded", "whole"},
    "capture": GRAPH,
    "model": GRAPH | {"capability", "capture", "runtime"},
    "numerics": GRAPH | {"capture", "model", "runtime", "whole"},
    "review": GRAPH | {"capability", "capture", "data", "model", "numerics", "passes", "runtime", "whole"},
}
# Rooms that put things together may import anything below them.
ABOVE = {
    "options",
    "boundaries",
    "lowering",
    "otherwise",
    "weight_fits",
    "number_fits",
    "dynamo",
    "convert",
    "pipeline",
    "instruments",
    "cli",
    "demo",
    "counting",
}
# The apex interface calls convert() when it is used, and looks then at what it has made.
LATE = {("runtime", "convert"), ("runtime", "ir"), ("runtime", "model")}


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
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            names = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            names = ["fxamp.convert" if name == "fxamp" else name for name in names]
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
        ("runtime", "def f():\n    importlib.import_module('fxamp').convert", []),
        ("runtime", "def f():\n    importlib.import_module('fxamp.passes.pad')", ["passes"]),
        ("passes", "from fxamp import review", ["review"]),
    ],
)
def test_the_check_can_fail(own, source, culprits):
    assert violations(own, source) == culprits


def test_no_file_leads_back_to_itself():
    """Inside a room, too, imports point one way; those in functions, and for type checkers, are no matter."""
    files = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
    edges = nx.DiGraph()
    for name, path in files.items():
        edges.add_edges_from((name, other) for other in top_imports(path.read_text()) if other in files)
    assert edges.number_of_edges() > len(files)
    assert not [group for group in nx.strongly_connected_components(edges) if len(group) > 1]


def top_imports(source: str) -> set[str]:
    """Modules that a file imports when it is imported."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found
