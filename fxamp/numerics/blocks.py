"""Modules that a graph calls whole and that are converted by themselves: what is low in them the graph does not say."""

from torch import fx

from fxamp.model.engine import engine_of
from fxamp.numerics.run import Call
from fxamp.numerics.runner import Part


def block_of(call: Call, part: Part, node: fx.Node) -> str:
    """The path of the converted module that a node calls, or that is in what it calls; "" where there is none."""
    if node.op != "call_module":
        return ""
    path, called = str(node.target), part.root(call.model).get_submodule(str(node.target))
    found = next((name for name, module in called.named_modules() if engine_of(module) is not None), None)
    outer = "" if part.turn is None else part.turn.path
    return "" if found is None else f"{outer}.{path}.{found}".strip(".")


def denial(call: Call, part: Part, node: fx.Node) -> str:
    """What denies a node in `overrides` of convert(): a name does so in every graph, a path the module there."""
    path = part.module_path(node)
    return path if is_layer(call, path) else boundary_of(call, node, part) or node.name


def is_layer(call: Call, path: str) -> bool:
    """Whether a module is denied by its path: where forward runs as it is written, a layer may be one that autocast
    runs, or is stored low."""
    return call.turns is not None and not call.model.get_submodule(path)._modules


def boundary_of(call: Call, node: fx.Node, part: Part) -> str:
    """Of a boundary the path that `overrides` of convert() knows it by; "" for all else."""
    if not node.meta.get("boundary"):
        return ""
    module = part.root(call.model).get_submodule(str(node.target))
    return next((path for path in call.engine.blocks if call.model.get_submodule(path) is module), "")
