"""Which graphs are for which of the blocks that are converted by themselves."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from fxamp.ir import BLOCK_CLASS, BLOCK_PATH
from fxamp.model.variant import Variant
from fxamp.model.views import base_of
from fxamp.tree import every_module


def mark_block(variant: Variant, paths: tuple[str, ...]) -> None:
    """Note on a graph, and on its nodes, which blocks of the model it is for."""
    variant.blocks = paths
    name = base_of(variant.captured.root).__name__
    for node in variant.graph.nodes:
        node.meta[BLOCK_PATH], node.meta[BLOCK_CLASS] = paths[0], name


def mark_blocks(module: nn.Module, blocks: Mapping[str, Any]) -> None:
    """Note on Dynamo's graphs for blocks which of them each is for.

    1. Dynamo makes graphs for each of equal blocks; one that has none is taken to run those of the first.
    2. Those that ran on fake tensors are gone: they are taken to have been called in their order.

    Args:
        blocks: the engines of the blocks inside `module`, by path; equal blocks share one.
    """
    parts = dict(every_module(module))  # a block may have been taken out since
    for engine in {id(inner): inner for inner in blocks.values()}.values():
        places = {id(parts[path]): path for path, inner in blocks.items() if inner is engine and path in parts}
        made = [variant for variant in engine.all_variants() if variant.maker is not None or not variant.blocks]
        makers = list(dict.fromkeys(variant.maker for variant in made))
        known = {maker: places.get(id(maker and maker()), "") for maker in makers}
        if not any(known.values()):
            known |= dict(zip(makers, places.values(), strict=False))
        first = next(filter(None, known.values()), "")
        others = tuple(path for path in places.values() if path not in known.values())
        for variant in made:
            if path := known[variant.maker]:
                mark_block(variant, (path, *others) if path == first else (path,))
