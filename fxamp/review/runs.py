"""How often each graph runs in one forward of the model: one graph stands for all blocks that are equal."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fxamp import ir
from fxamp.capture.inputs import call_key
from fxamp.errors import CaptureError
from fxamp.model.block_calls import arguments_of, nodes_of_blocks
from fxamp.model.engine import Engine, engine_of
from fxamp.model.variant import Variant

Call = tuple[str, tuple[Any, ...] | None, dict[str, Any]]
"""Path of a block, arguments (None where their types are not known) and keywords."""


def runs_of(engine: Engine, model: nn.Module) -> tuple[int, ...]:
    """For each graph of `engine.graphs()`: how often one forward runs it.

    1. Each of the model's own graphs is for one kind of call, and runs once in it.
    2. A block's graph runs as often as such a call has blocks that take it; where there are several kinds of call, as
       often as in the one that calls it most.
    3. Around blocks that no graph can hold each block is taken to be called once, by a graph that has run for it.
    """
    found: Counter[int] = Counter()
    own = engine.all_variants()
    written: list[Call] = [(path, None, {}) for path in _outermost(engine)]
    for calls in list(filter(None, (list(_calls(variant)) for variant in own))) or [written]:
        found |= _runs(calls, "", engine, model)
    shared = _shared(engine)
    found.update({id(variant): shared.get(id(variant), 1) for variant in own})
    return tuple(found[id(variant)] or 1 for variant in engine.graphs())


def _outermost(engine: Engine) -> list[str]:
    paths = tuple(engine.blocks)
    return [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]


def _calls(variant: Variant) -> Iterator[Call]:
    """The calls of blocks in a graph."""
    for node in nodes_of_blocks(variant):
        try:
            yield str(node.target), *arguments_of(node, torch.device("meta"))
        except LookupError:
            yield str(node.target), None, {}


def _runs(calls: Sequence[Call], above: str, engine: Engine, model: nn.Module) -> Counter[int]:
    """Runs of the graphs, by identity, that these calls and the calls inside of them make."""
    found: Counter[int] = Counter()
    for path, args, kwargs in calls:
        block = model.get_submodule(above + path)
        inner = engine.blocks.get(above + path) or engine_of(block)
        inside: Counter[int] = Counter()
        for variant in _taken(inner, block, above + path, args, kwargs) if inner is not None else ():
            found[id(variant)] += 1
            inside |= _runs(list(_calls(variant)), f"{above}{path}.", engine, model)  # one of the graphs takes the call
        found.update(inside)
    return found


def _taken(
    engine: Engine, block: nn.Module, path: str, args: tuple[Any, ...] | None, kwargs: dict[str, Any]
) -> list[Variant]:
    """The graphs that take a call of a block: one for training, one for evaluation, and so on."""
    known, inputs = [each for some in engine.variants.values() for each in some], None
    if args is not None:
        with contextlib.suppress(CaptureError):
            key, inputs = call_key(args, kwargs)
            known = engine.variants.get(key, known)
    elif has_run := [variant for variant in known if variant.has_run(block)]:
        known = has_run
    return [variant for variant in known if _fits(variant, block, inputs)] or known or _of_block(engine, path)


def _of_block(engine: Engine, path: str) -> list[Variant]:
    """Dynamo's graphs for a block: it makes them for each of equal blocks, but where those of another hold for it."""
    made: dict[Any, list[Variant]] = {}
    for variant in engine.all_variants():
        made.setdefault(variant.maker, []).append(variant)
    groups = list(made.values()) or [[]]
    place = engine.paths.index(path) if path in engine.paths else 0
    return groups[place if place < len(groups) else 0]


def _fits(variant: Variant, block: nn.Module, inputs: list[Any] | None) -> bool:
    """Whether a graph is for a block as it is, but for its mode."""
    if inputs is not None:
        given = variant.captured.inputs_for(block, inputs)
        if given is None or not variant.captured.holds_for(given):
            return False
    if any(cell.name != "training" for cell in variant.changed_state(block)):
        return False
    return variant.weights is None or variant.weights(block)


def _shared(engine: Engine) -> dict[int, int]:
    """Runs of each graph that Dynamo runs for several equal modules, by identity."""
    others = Counter(engine.way.shared.values())
    found = {}
    for variant in engine.way.variants if others else ():
        weights = {str(node.meta[ir.WEIGHT_PATH]) for node in variant.graph.nodes if ir.WEIGHT_PATH in node.meta}
        found[id(variant)] = 1 + max((others[path] for path in weights), default=0)
    return found
