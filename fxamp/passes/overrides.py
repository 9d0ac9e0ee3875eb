"""Colours that the user gives to module paths, globs and node names."""

import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxamp import ir
from fxamp.errors import OptionError, nearest
from fxamp.ir import Colour
from fxamp.override_keys import around, override_of
from fxamp.passes.policy import Policy


def module_paths(node: fx.Node) -> list[str]:
    """Dotted paths of the modules whose forward made the node, and of the lists that hold them, outermost first."""
    paths = [str(path) for path, _ in _stack(node)]
    if node.op == "call_module" and str(node.target) not in paths:
        paths.append(str(node.target))
    return list(dict.fromkeys(each for path in paths if path for each in around(path)))


def _stack(node: fx.Node) -> list[tuple[Any, Any]]:
    """(path, class) of the modules whose forward made the node."""
    stack = node.meta.get("nn_module_stack") or {}
    return [entry for entry in stack.values() if isinstance(entry, tuple)]


def override_for(node: fx.Node, overrides: Mapping[str, Colour]) -> str | None:
    """The override key that applies to a node: its name, then its innermost module, then a glob."""
    if node.op in ("placeholder", "get_attr", "output") or not overrides:
        return None
    return override_of(module_paths(node), node.name, overrides)


def override_inside(found: ir.OpInside, overrides: Mapping[str, Colour]) -> str | None:
    """The same of an op of a function under torch.vmap, which has no name."""
    paths = [each for path, _ in found.modules if path for each in around(str(path))]
    return override_of(list(dict.fromkeys(paths)), "", overrides)


def protected_part(node: fx.Node, policy: Policy) -> str | None:
    """The name in `_keep_in_fp32_modules` that the node's module path, or that of a weight it reads, holds.

    The model may say so, and a part of it of the modules below.
    """
    if node.op in ("placeholder", "get_attr", "output"):
        return None
    owners = [(str(path), names) for path, kind in _stack(node) if (names := names_kept(kind, policy.low))]
    if policy.protected:
        owners.append(("", policy.protected))
    paths = [*module_paths(node), *map(_weight_path, node.all_input_nodes)] if owners else []
    for owner, names in owners:
        below = [path.removeprefix(owner) for path in paths if path.startswith(f"{owner}." if owner else "")]
        for name in names:
            if any(f".{name}." in f".{path}." for path in below):
                return name
    return None


def names_kept(model: Any, low: torch.dtype) -> tuple[str, ...]:
    """The names of modules and parameters that a model, or a class of models, wants in float32.

    Of transformers: `_keep_in_fp32_modules` speaks of float16 alone, `_keep_in_fp32_modules_strict` of both dtypes. Of
    diffusers the first one speaks of both too.
    """
    owner = model if isinstance(model, type) else type(model)
    of_both = any(base.__module__.partition(".")[0] == "diffusers" for base in owner.__mro__)
    attributes = ["_keep_in_fp32_modules_strict"]
    attributes += ["_keep_in_fp32_modules"] if low == torch.float16 or of_both else []
    given = [getattr(model, attribute, None) for attribute in attributes]
    listed = [(names,) if isinstance(names, str) else names for names in given]
    return tuple(str(name) for names in listed if isinstance(names, Collection) for name in names)


def _weight_path(given: fx.Node) -> str:
    return ir.weight_path(given) if ir.is_weight(given) else ""


def check_overrides(
    graphs: fx.Graph | Sequence[fx.Graph],
    overrides: Mapping[str, Colour],
    modules: Collection[str] = (),
    is_partial: bool = False,
) -> None:
    """Raise an OptionError for an override that matches no node of any graph.

    Args:
        modules: paths of the model's modules, where the graphs may not be all there are.
        is_partial: nodes of later graphs may be meant: only what looks like a misspelt module is wrong then; the rest
            is for `unmatched_overrides` when all graphs are known.
    """
    for key, said in unmatched_overrides(graphs, overrides, modules).items():
        if not is_partial or (nearest(key, modules) and not _is_numbered(key)):
            raise OptionError(
                f"{said} Keys are module paths ('encoder.layer.3'), globs ('*.head') or node names (see fxamp.report)."
            )


def _is_numbered(name: str) -> bool:
    """Whether it looks like the name of a node of which there are several: linear_1."""
    return re.fullmatch(r"\w+_\d+", name) is not None


def unmatched_overrides(
    graphs: fx.Graph | Sequence[fx.Graph], overrides: Mapping[str, Colour], modules: Collection[str] = ()
) -> dict[str, str]:
    """The keys that match no module and no node -> a sentence that says so, with the nearest name."""
    nodes = [node for graph in ((graphs,) if isinstance(graphs, fx.Graph) else graphs) for node in graph.nodes]
    outer = [node for node in nodes if ir.BLOCK_PATH not in node.meta]  # a block's own know paths inside it alone
    matched = {override_for(node, overrides) for node in outer}
    matched |= {override_inside(found, overrides) for node in outer for found in node.meta.get(ir.INSIDE, ())}
    known = {node.name for node in nodes}.union(*map(module_paths, outer))
    return {
        key: f"overrides: {key!r} matches no module and no node.{nearest(key, sorted(known))}"
        for key in overrides
        if key not in matched and key not in known and not any(fnmatch.fnmatchcase(path, key) for path in modules)
    }
