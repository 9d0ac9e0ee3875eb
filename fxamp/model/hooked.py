"""Models that have much of their weights in modules with hooks: a graph runs those whole, in float32."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from fxamp.errors import CaptureError
from fxamp.ir import ENGINE
from fxamp.model.variant import Variant
from fxamp.model.ways import Way
from fxamp.words import listed, percent

MUCH = 0.1
"""Share of the weights from which on a forward runs as it is written, so that graphs hold what stands behind hooks."""
NAMED = 3
"""Modules that are named."""


def matrices(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights that GEMMs read, of tied ones the first; all parameters where there are none."""
    named = list(model.named_parameters())
    yield from [(name, weight) for name, weight in named if weight.dim() > 1] or named


def hooked(variant: Variant, model: nn.Module) -> dict[str, None]:
    """The paths of the modules that hooks keep whole in a graph, and in which nothing is converted by itself."""
    nodes = variant.graph.nodes if variant.captured.method == "symbolic" else ()
    paths = {str(node.target): None for node in nodes if node.op == "call_module" and node.meta.get("hooked")}
    return {path: None for path in paths if not _holds_converted(model.get_submodule(path))}


def _holds_converted(module: nn.Module) -> bool:
    return any(ENGINE in part.__dict__ for part in module.modules())


def multiplied(model: nn.Module) -> dict[str, int]:
    """Numbers in each matrix, but for tables of embeddings, which nothing multiplies."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    named = list(model.named_parameters())
    return {name: weight.numel() for name, weight in named if weight.dim() > 1 and id(weight) not in tables}


def share_in(sizes: dict[str, int], paths: dict[str, None]) -> float:
    """Of weights, whose sizes are given by name, those that are inside of modules."""
    inside = [size for name, size in sizes.items() if name.startswith(tuple(f"{path}." for path in paths))]
    return sum(inside) / max(1, sum(sizes.values()))


def check_hooks(variant: Variant, model: nn.Module, options: Any, way: Way) -> None:
    """Refuse a graph for which `why_as_written` has a reason.

    Raises:
        CaptureError: the reason.
    """
    if reason := why_as_written(variant, model, options, way):
        way.prefer_written()
        raise CaptureError(reason)


def why_as_written(variant: Variant, model: nn.Module, options: Any, way: Way) -> str:
    """Why a forward runs as written though there is a graph: it leaves much of the weights in float32, for modules with
    hooks; "" where the graph runs.

    Not at O3, where modules with hooks run low.

    Args:
        way: what calls that no graph holds run through.
    """
    paths = hooked(variant, model)
    if not way.may_be_written or options.opt_level == "O3" or not paths:
        return ""
    share = share_in(multiplied(model), paths)
    held = f"modules with hooks hold {percent(share)} of the weights ({listed(paths, NAMED)})"
    if share < MUCH:
        return ""
    named = [*map(repr, list(paths)[:NAMED]), *(["..."] if len(paths) > NAMED else [])]
    alone = f"; convert(model, boundaries=[{', '.join(named)}]) converts those by themselves, and their hooks run"
    return f"{held}, and a graph runs those whole{alone if options.opt_level == 'O1' else ''}"
