"""Configurations of omegaconf's (and Hydra's), which keep what they hold in nodes that stand for one value each.

What they hold matters, and not what their code does: it parses the interpolations of each read (`${model.width}`), by
way of thousands of functions that no model has written.
"""

import re
from collections.abc import Iterator
from typing import Any

PACKAGES = ("omegaconf", "antlr4")
"""Whose code is not looked into."""

_HELD = ("_content", "_val")  # of a container's node and of a value's; a text with an interpolation stands in either
_RESOLVER = re.compile(r"\$\{.*:")


def is_config(value: Any) -> bool:
    """Whether it is a node of a configuration: a container, or one that stands for a value."""
    kind = type(value)
    return str(kind.__module__).partition(".")[0] == PACKAGES[0] and place_of(value) is not None


def place_of(config: Any) -> str | None:
    """The name under which its `__dict__` has what it holds."""
    held = getattr(config, "__dict__", None)
    return next((name for name in _HELD if name in held), None) if isinstance(held, dict) else None


def held_by(config: Any) -> Any:
    """A dictionary or a list of nodes, a value, or a text that is interpolated."""
    return vars(config)[place_of(config) or ""]


def parts_of_config(config: Any) -> list[tuple[Any, Any]]:
    """What it stands for, by keys: its nodes, or its value; of an interpolated one also what that may be taken from;
    of a container its flags (`OmegaConf.set_struct`).
    """
    held = held_by(config)
    flags = [("flags", getattr(vars(config).get("_metadata"), "flags", None))]
    if isinstance(held, dict):
        return [*held.items(), *flags]
    if isinstance(held, list):
        return [*enumerate(held), *flags]
    return [("value", held), *(("taken from", each) for each in _taken_from(config, held))]


def _taken_from(config: Any, held: Any) -> Iterator[Any]:
    """The whole configuration; where a resolver may be asked, all of them, and the user's own objects in these."""
    if not isinstance(held, str) or "${" not in held:
        return
    root = config
    while (above := vars(root).get("_parent")) is not None:
        root = above
    yield root
    if _RESOLVER.search(held):
        resolvers = getattr(type(root), "_resolvers", {})
        yield resolvers
        for resolver in resolvers.values():
            for cell in getattr(resolver, "__closure__", None) or ():
                yield cell.cell_contents
