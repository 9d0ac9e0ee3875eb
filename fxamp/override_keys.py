"""Paths of modules; which of the user's overrides holds for one, and what they are for a part of a model by itself."""

import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import nn

from fxamp.ir import Colour
from fxamp.tree import every_module


def around(path: str) -> Iterator[str]:
    """ "a.b.c" -> "a", "a.b", "a.b.c"."""
    yield from (path[:place] for place, letter in enumerate(path) if letter == ".")
    yield path


def is_within(path: str, outer: str) -> bool:
    """Whether a module is another one, or inside of it; all are inside of the model ("")."""
    return not outer or path == outer or path.startswith(f"{outer}.")


def within(path: str, outer: str) -> str:
    """The path that a module has inside of another one."""
    return path.removeprefix(outer).lstrip(".")


def inside(outer: str, path: str) -> str:
    """The path of a module that stands at `path` in another one."""
    return f"{outer}.{path}".strip(".")


def override_of(paths: Sequence[str], name: str, overrides: Mapping[str, Colour]) -> str | None:
    """The key that holds for a node: its name, then its innermost module, then a glob.

    Args:
        paths: of the modules it is in, outermost first.
        name: "" for what has none.
    """
    exact = next((each for each in (name, *reversed(paths)) if each in overrides), None)
    if exact is not None:
        return exact
    names = (*paths, name) if name else paths
    return next((key for key in overrides if any(fnmatch.fnmatchcase(each, key) for each in names)), None)


def overrides_within(
    part: nn.Module, path: str, overrides: Mapping[str, Colour], modules: Collection[str]
) -> dict[str, Colour]:
    """The overrides of a model as a part of it is to have them: by paths inside the part, "*" for all of it.

        overrides_within(model.a.b, "a.b", {"a": "deny", "a.b.fc": "allow"}, ...) == {"*": "deny", "fc": "allow"}

    Those of node names stay as they are, but for one that is the path of a module of the part.

    Args:
        modules: the paths of all modules of the model.
    """
    if not overrides:
        return {}
    inside = [inner for inner, _ in every_module(part)]
    found: dict[str, Colour] = {}
    for inner in inside:
        key = override_of(list(around(f"{path}.{inner}".strip("."))), "", overrides)
        found |= {} if key is None else {inner or "*": overrides[key]}
    names = [key for key in overrides if not any(fnmatch.fnmatchcase(each, key) for each in modules)]
    return found | {key: overrides[key] for key in names if key not in inside}
