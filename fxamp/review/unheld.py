"""What a plan or ranges say of nodes that no graph holds, because forward runs as it is written around its parts."""

from collections.abc import Collection, Container, Iterator

from torch import nn

from fxamp.dtypes import dtype_name
from fxamp.model.engine import Engine
from fxamp.override_keys import around
from fxamp.tree import every_module
from fxamp.words import listed, plural

_NAMED = 5


def decided_in_vain(engine: Engine, model: nn.Module) -> list[str]:
    """Sentences for who converted the model by them; none where a graph holds its own forward.

    1. What ran at all is known of the forwards around graphs alone: of the model, and of modules in which there are
       some; where there is no graph at all, of every module.
    2. A part has what is said of itself: of modules that are gone it knows nothing.
    """
    graphs, runs = engine.graphs(), engine.way.runs
    parts = [path for variant in graphs for path in variant.blocks]
    if not parts and (graphs or not runs):
        return []
    modules = dict(every_module(model))
    found = list(_gone(engine, modules))
    if runs and all(each.blocks for each in graphs):
        above = {"", *(path for part in parts for path in around(part) if path != part)} if parts else modules.keys()
        found += _told(engine, above, f"forward runs {runs}{' around its parts' if parts else ''}")
    return found


def _gone(engine: Engine, modules: Container[str]) -> Iterator[str]:
    plan, ranges, low = engine.options.plan, engine.options.ranges, engine.options.low
    lost = [] if plan is None else [path for path in plan.modules if path not in modules]
    if lost:
        yield (
            f"the plan of {plan.model} speaks of modules that this model has not ({listed(lost, _NAMED)}). What has "
            "taken their place is decided as without a plan; save it again when that is right."
        )
    unfit = [] if ranges is None else [ranges.nodes[name] for name in ranges.deny(low)]
    denied = [f"{node.name} of {node.module}" for node in unfit if node.module not in modules]
    if denied:
        yield (
            f"by the ranges {dtype_name(low)} does not hold {listed(denied, _NAMED)}, and this model has no such "
            "modules: measure it again (fxamp.profile)."
        )


def _told(engine: Engine, modules: Collection[str], how: str) -> Iterator[str]:
    plan, ranges, low = engine.options.plan, engine.options.ranges, engine.options.low
    planned = [] if plan is None else plan.keys_in(modules)
    if planned:
        yield (
            f"the plan of {plan.model} speaks of {plural(len(planned), 'node')} that no graph holds "
            f"({listed(planned, _NAMED)}): {how}. Save it again from this model as it runs."
        )
    unfit = [] if ranges is None else [ranges.nodes[name] for name in ranges.deny(low)]
    measured = [f"{node.name} at {node.source.rpartition('/')[2]}" for node in unfit if node.module in modules]
    if measured:
        yield (
            f"by the ranges {dtype_name(low)} does not hold {listed(measured, _NAMED)}, which no graph holds: {how}, "
            "and ranges decide about these alone. Switch autocast off around it, or deny the part that reads it."
        )
