"""Colours that the user gives to module paths, globs and node names."""

import fnmatch
from collections.abc import Collection, Mapping, Sequence

from torch import fx

from fxamp.errors import OptionError, nearest
from fxamp.ir import Colour


def module_paths(node: fx.Node) -> list[str]:
    """Dotted paths of the modules whose forward made the node, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values() if isinstance(entry, tuple)]
    if node.op == "call_module" and str(node.target) not in paths:
        paths.append(str(node.target))
    return [path for path in paths if path]


def override_for(node: fx.Node, overrides: Mapping[str, Colour]) -> str | None:
    """The override key that applies to a node: its name, then its innermost module, then a glob."""
    if node.op in ("placeholder", "get_attr", "output") or not overrides:
        return None
    paths = module_paths(node)
    exact = next((name for name in (node.name, *reversed(paths)) if name in overrides), None)
    if exact is not None:
        return exact
    names = (*paths, node.name)
    return next((key for key in overrides if any(fnmatch.fnmatchcase(name, key) for name in names)), None)


def protected_part(node: fx.Node, protected: tuple[str, ...]) -> str | None:
    """The name in `_keep_in_fp32_modules` that the node's module path holds."""
    if node.op in ("placeholder", "get_attr", "output") or not protected:
        return None
    parts = {part for path in module_paths(node) for part in path.split(".")}
    return next((name for name in protected if name in parts), None)


def check_overrides(
    graphs: fx.Graph | Sequence[fx.Graph], overrides: Mapping[str, Colour], modules: Collection[str] = ()
) -> None:
    """Raise an OptionError for an override that matches no node of any graph.

    Args:
        modules: paths of the model's modules, where the graphs may not be all there are.
    """
    nodes = [node for graph in ((graphs,) if isinstance(graphs, fx.Graph) else graphs) for node in graph.nodes]
    matched = {override_for(node, overrides) for node in nodes}
    known = {name for node in nodes for name in (node.name, *module_paths(node))}
    for key in overrides:
        if key in matched or key in known or any(fnmatch.fnmatchcase(path, key) for path in modules):
            continue
        raise OptionError(
            f"overrides: {key!r} matches no module and no node.{nearest(key, sorted(known))} "
            "Keys are module paths ('encoder.layer.3'), globs ('*.head') or node names (see fxamp.report)."
        )
