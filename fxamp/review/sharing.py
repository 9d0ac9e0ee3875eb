"""Graphs that Dynamo runs for several equal modules: what was decided for the first of them holds for all."""

import fnmatch
from collections.abc import Mapping
from typing import Any

from fxamp.model.engine import Engine
from fxamp.tree import without_common_end
from fxamp.words import listed

_NAMED = 3
"""Modules that are named; the rest is counted."""


def shared_modules(engine: Engine) -> dict[str, str]:
    """Module -> the equal module whose graph runs it: {"blocks.2": "blocks.1"}."""
    found: dict[str, str] = {}
    for other, own in engine.way.shared.items():
        path, own_path = without_common_end(other, own)
        if path and own_path:
            found[path] = own_path
    return found


def sharing(engine: Engine) -> list[str]:
    """A sentence for each module whose graph others run."""
    others: dict[str, list[str]] = {}
    for other, own in shared_modules(engine).items():
        others.setdefault(own, []).append(other)
    return [
        f"Dynamo runs the graph of {own} for {listed(names, _NAMED)} too: what is shown and decided for {own} holds "
        f"for them. Convert with boundaries= to decide for each by itself."
        for own, names in others.items()
    ]


def overrides_without_effect(engine: Engine) -> list[str]:
    """A sentence for each weight's module that the user gave another colour than the module whose graph runs it."""
    overrides: Mapping[str, Any] = engine.options.overrides
    found: dict[str, str] = {}
    for other, own in engine.way.shared.items():
        wanted, given = _override_of(other, overrides), _override_of(own, overrides)
        if wanted != given:
            module, first = other.rpartition(".")[0], own.rpartition(".")[0]
            asked = f"overrides give {module} {wanted or 'no colour'} and {first} {given or 'no colour'}"
            found[module] = (
                f"{asked}, but Dynamo runs the graph of {first} for both, as decided for {first}: "
                "give both the same, or convert with boundaries= to decide for each by itself"
            )
    return list(found.values())


def _equal_blocks(engine: Engine) -> dict[str, str]:
    """Block that is converted by itself and has no graph of its own -> the equal block whose graphs run it."""
    graphs = [variant for variant in engine.graphs() if variant.blocks]
    made = {variant.blocks[0] for variant in graphs}
    return {path: variant.blocks[0] for variant in graphs for path in variant.blocks[1:] if path not in made}


def _override_of(weight: str, overrides: Mapping[str, Any]) -> Any:
    """The colour that overrides give to the module that holds a weight: the innermost path, then a glob."""
    parts = weight.split(".")[:-1]
    paths = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    exact = next((path for path in paths if path in overrides), None)
    glob = next((key for key in overrides if any(fnmatch.fnmatchcase(path, key) for path in paths)), None)
    return overrides.get(exact or glob or "")


def run_as(engine: Engine, name: str) -> str | None:
    """The name, inside the module whose graph runs it, of what stands in a module that has no graph of its own."""
    for other, own in (*shared_modules(engine).items(), *_equal_blocks(engine).items()):
        if name == other or name.startswith(f"{other}."):
            return own + name.removeprefix(other)
    return None
