"""Weights that run as they are: of what Dynamo left outside of every graph, and of modules that hooks keep whole."""

from collections.abc import Iterator

from torch import nn

from fxamp import ir
from fxamp.model.engine import Engine, engine_of
from fxamp.model.hooked import hooked, matrices, share_in, why_as_written
from fxamp.model.variant import Variant
from fxamp.words import listed, percent

_NAMED = 3
"""Weights that are named."""
_WHY = (
    "Dynamo gives up a whole frame where it meets what it does not follow: a graph break inside a loop or a with "
    "block, such as hooks on saved tensors, or a sparse tensor among its variables. TORCH_LOGS=graph_breaks names the "
    "line: move it out of there{by_themselves}. Weights that forward does not use count, too"
)
_BY_THEMSELVES = ", or convert what is called there by itself (fxamp.convert(model, boundaries={blocks}))"
_WHY_RECURRENT = (
    "Dynamo takes no recurrent layer on a PackedSequence into a graph, nor what a frame calls that it gives up: "
    "convert the layer by itself (model.lstm = fxamp.convert(model.lstm))"
)


def uncaptured(engine: Engine, model: nn.Module) -> tuple[float, str]:
    """The share of the matrix weights that no graph reads, and what to know about them ("" where there are none).

    Only of models that Dynamo has been asked to capture, or that run as written around blocks or parts; a symbolic
    graph holds all of forward. It says nothing of other calls: where Dynamo made no graph, or is asked in training and
    the symbolic graph is one for evaluation, what that reads does not count.
    """
    if runs := engine.way.runs:
        return _around_parts(engine, model, runs)
    if not engine.way.calls:
        return 0.0, ""
    variants = engine.all_variants()
    alike = [variant for variant in variants if not (engine.way.trains and _is_for_evaluation(variant))]
    is_apart = holds_other_calls(engine)
    read = set() if is_apart else set(engine.way.weights).union(*map(_weights_read, alike))
    sizes = {name: weight.numel() for name, weight in matrices(model)}
    left = [name for name in sizes if name not in read]
    share = sum(sizes[name] for name in left) / max(1, sum(sizes.values()))
    if not left:
        return 0.0, ""
    given_up = [f"Dynamo gave up {function}: {why}" for function, why in engine.way.given_up.items()]
    why = "; ".join(given_up) or (_WHY_RECURRENT if all(_is_recurrent(model, name) for name in left) else _why(left))
    names = listed(left, _NAMED)
    where = "in calls that are left to Dynamo " if is_apart or len(alike) < len(variants) else ""
    return share, f"{where}{percent(share)} of the weights are read by no graph and run as they are ({names}): {why}."


def _why(weights: list[str]) -> str:
    """The reason, and a remedy: the blocks that the weights are of, elements of lists or else the model's own parts."""
    patterns: dict[str, None] = {}
    for name in weights:
        parts = name.split(".")[:-1]
        number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        found = parts[:1] if number is None else [*parts[:number], "*"]
        patterns.update(dict.fromkeys([".".join(found)] if found else []))
    blocks = list(patterns)[:_NAMED]
    return _WHY.format(by_themselves=_BY_THEMSELVES.format(blocks=blocks) if blocks else "")


def _around_parts(engine: Engine, model: nn.Module, runs: str) -> tuple[float, str]:
    if not engine.fallbacks:
        return 0.0, ""
    sizes = {name: weight.numel() for name, weight in matrices(model)}
    left = [name for name in sizes if not name.startswith(tuple(f"{path}." for path in engine.blocks))]
    if engine.way.calls_itself:
        left = [name for name in left if name not in set().union(*map(_weights_read, engine.all_variants()))]
    if engine.boundaries and not left:
        return 0.0, ""
    share = sum(sizes[name] for name in left) / max(1, sum(sizes.values()))
    why = next(iter(engine.fallbacks))
    if not engine.boundaries and not engine.is_trained:  # the parts of such a model are captured when it trains
        return 0.0, f"without gradients forward runs {runs}: {why}"
    where = "in calls that no graph holds " if engine.all_variants() else ""
    outside = f"outside of every {'block' if engine.boundaries else 'graph'}"
    weights = f"{percent(share)} of the weights are {outside} ({listed(left, _NAMED)}), in a"
    weights = weights if left else "all weights are in graphs of parts, around which there is a"
    return share, f"{where}{weights} forward that runs {runs}: {why}"


def kept_whole(engine: Engine, model: nn.Module) -> tuple[float, str]:
    """The share of the matrix weights in modules that hooks keep whole, and what to know about them ("" for none).

    Not at O3, where they run low, nor of a preview that is given up for them at the first call.
    """
    variants = engine.all_variants() if engine.options.opt_level != "O3" else []
    variants = [each for each in variants if not (each.is_preview and is_given_up(each, model))]
    paths = {path: None for variant in variants for path in hooked(variant, model) if path not in engine.blocks}
    if not paths:  # torch.jit.trace would note what is read of the model here
        return 0.0, ""
    share = share_in({name: weight.numel() for name, weight in matrices(model)}, paths)
    return (
        share,
        f"{percent(share)} of the weights are in modules with hooks, which run whole, in float32, while they have them "
        f"({listed(paths, _NAMED)}). fxamp.convert(model, boundaries=[...]) converts those by themselves, and their "
        "hooks run.",
    )


def is_given_up(preview: Variant, model: nn.Module) -> bool:
    """Whether the first call will run as it is written, for the hooks of modules, whatever a preview shows."""
    engine = engine_of(model)
    if engine is None or engine.options.capture != "auto":
        return False
    return bool(why_as_written(preview, model, engine.options, engine.otherwise))


def holds_other_calls(engine: Engine) -> bool:
    """Whether there is no graph of the calls that are left to Dynamo, or run as written, and others have one."""
    runs_as_written = engine.way.runs_as_written or bool(engine.way.runs)
    return runs_as_written and any(not variant.is_preview for variant in engine.all_variants())


def is_nothing_captured(engine: Engine) -> bool:
    """Whether Dynamo, or parts of what runs as written, was asked to capture a call, and no graph was made."""
    is_asked = engine.way.calls or (engine.way.runs and engine.fallbacks)
    return bool(is_asked) and not engine.graphs()


def _is_for_evaluation(variant: Variant) -> bool:
    return {flag for _, flag in variant.captured.training} == {False}


def _weights_read(variant: Variant) -> set[str]:
    if variant.is_preview:
        return set()
    nodes = list(variant.graph.nodes)
    whole = [str(node.target) for node in nodes if node.op == "call_module"]
    below = {f"{path}.{name}" for path in whole for name in _names_below(variant, path)}
    return below | {ir.weight_path(node) for node in nodes if ir.is_weight(node)}


def _names_below(variant: Variant, path: str) -> Iterator[str]:
    yield from (name for name, _ in variant.captured.root.get_submodule(path).named_parameters())


def _is_recurrent(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.RNNBase)
