"""What a plan or ranges say of nodes that no graph holds, because forward runs as it is written around its parts."""

from collections.abc import Collection, Iterator

from fxamp.dtypes import dtype_name
from fxamp.model.engine import Engine
from fxamp.override_keys import around
from fxamp.words import listed, plural

_NAMED = 5


def decided_in_vain(engine: Engine) -> list[str]:
    """Sentences for who converted the model by them; none where a graph holds its own forward.

    What ran at all is known of the forwards around graphs alone: of the model, and of modules in which there are some.
    """
    parts = [path for variant in engine.graphs() for path in variant.blocks]
    if not getattr(engine.dynamo, "runs", "") or not parts or not all(each.blocks for each in engine.graphs()):
        return []
    return list(_told(engine, {"", *(above for path in parts for above in around(path) if above != path)}))


def _told(engine: Engine, modules: Collection[str]) -> Iterator[str]:
    plan, ranges, low = engine.options.plan, engine.options.ranges, engine.options.low
    how = f"forward runs {engine.dynamo.runs} around its parts"
    planned = [] if plan is None else plan.keys_in(modules)
    if planned:
        yield (
            f"the plan of {plan.model} speaks of {plural(len(planned), 'node')} that no graph holds "
            f"({listed(planned, _NAMED)}): {how}. Save it again from this model as it runs."
        )
    unfit = [] if ranges is None else [each for each in map(ranges.nodes.get, ranges.deny(low)) if each is not None]
    measured = [f"{node.name} at {node.source.rpartition('/')[2]}" for node in unfit if node.module in modules]
    if measured:
        yield (
            f"by the ranges {dtype_name(low)} does not hold {listed(measured, _NAMED)}, which no graph holds: {how}, "
            "and ranges decide about these alone. Switch autocast off around it, or deny the part that reads it."
        )
