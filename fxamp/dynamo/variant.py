"""One of Dynamo's graphs through the passes, and again under other options."""

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from fxamp import ir
from fxamp.capture.captured import Captured
from fxamp.capture.dynamo import adopt, fake_mode_of, is_dynamic, note_writes
from fxamp.capture.memory import groups_of, note_memory
from fxamp.capture.promotion import promote
from fxamp.capture.recompute import Call, eager_call, fold_checkpoints
from fxamp.capture.unseen import no_inference_mode, no_saved_tensor_hooks
from fxamp.dynamo.flex import fuse_attention
from fxamp.fakes import Fakes
from fxamp.model.codegen import CompiledForward
from fxamp.model.variant import Variant
from fxamp.options import Options
from fxamp.tree import every_buffer, every_parameter

Rewrite = Callable[..., object]


def rewrite_dynamo_graph(
    module: fx.GraphModule,
    example_inputs: list[Any],
    root: nn.Module,
    options: Options,
    rewrite: Rewrite,
    fuses_casts: bool = False,
    protected: frozenset[str] = frozenset(),
    weights: nn.Module | None = None,
    keeps_model: bool = True,
) -> Variant:
    """One of Dynamo's graphs through the passes.

    Args:
        root: the model its weights belong to, by path.
        protected: source lines whose nodes stand in a region without autocast.
        weights: whose tensors Dynamo hands to the graph, by the same paths: the model, or a copy of it on fakes.
        keeps_model: whether the graph keeps its model alive; not where Dynamo's caches keep the graph for ever.
    """
    captured = adopt(module, example_inputs, module, protected)
    _name_from_root(captured, weights or root)
    if (mode := fake_mode_of(captured.graph)) is not None:
        fakes = Fakes(module, mode=mode)
        promote(captured.graph, weights or root, fakes, is_model=root is not module)
        note_writes(captured.graph, fakes)
    if root is module:
        captured.root = module
    else:
        captured.root = _Roots(module, (lambda: root) if keeps_model else weakref.ref(root))
    return _rewritten(captured, module, options, rewrite, fuses_casts)


def _rewritten(
    captured: Captured, module: fx.GraphModule, options: Options, rewrite: Rewrite, fuses_casts: bool = False
) -> Variant:
    """A captured graph through the passes, and a copy of it as it was, to be rewritten under other options."""
    untouched = _copy_of(captured)
    before, total = captured.text(), len(captured.graph.nodes)
    mode = fake_mode_of(captured.graph)
    fakes = None if mode is None or is_dynamic(captured.graph) else Fakes(module, mode=mode)
    rewrite(captured, fakes, options, fuses_casts=fuses_casts)
    if not fuses_casts:
        fuse_attention(captured.graph)
    runnable = fx.GraphModule(module, fold_checkpoints(captured.graph, run_checkpoints(module)))
    forward = CompiledForward(lambda _, *inputs: runnable.forward(*inputs), runnable.code)
    again = lambda changed: _rewritten(_copy_of(untouched), module, changed, rewrite, fuses_casts)  # noqa: E731
    variant = Variant(captured, before, forward, total, again=again)

    def sharing_as(inputs: list[Any]) -> Variant:
        other = dataclasses.replace(_copy_of(untouched), example=inputs)
        note_memory(other.graph.find_nodes(op="placeholder"), inputs)
        return _rewritten(other, module, options, rewrite, fuses_casts)

    return _for_every_sharing(variant, module, sharing_as)


def _for_every_sharing(variant: Variant, module: nn.Module, sharing_as: Callable[[list[Any]], Variant]) -> Variant:
    """The variant, which runs another for inputs that share memory as its own did not: Dynamo has no guard for that.

    Args:
        module: holds the constants of the graph.
        sharing_as: makes the same graph for inputs that share memory as the given ones.
    """
    memory, forward = variant.memory, variant.compiled
    others: dict[tuple[int, ...], Callable[..., Any]] = {}

    def run(root: Any, *inputs: Any) -> Any:
        if memory is None or memory.holds(module, inputs):
            return forward.run(root, *inputs)
        groups = groups_of(inputs)
        if groups not in others:
            with no_inference_mode(), no_saved_tensor_hooks():
                other = sharing_as(list(inputs))
            other.captured.forget_values()
            others[groups] = other.compiled.run
        return others[groups](root, *inputs)

    if memory is not None:
        variant.compiled = dataclasses.replace(forward, run=run)
    return variant


def run_checkpoints(module: fx.GraphModule) -> Call:
    """Checkpointed regions of one of Dynamo's graphs as calls of torch.utils.checkpoint."""

    def compile_inner(graph: fx.Graph) -> Callable[..., Any]:
        forward = fx.GraphModule(module, graph).forward
        return lambda _, *inputs: forward(*inputs)

    return eager_call(compile_inner)


def _copy_of(captured: Captured) -> Captured:
    """A captured graph with nodes and metadata of its own; its example is fake tensors, which hold no data."""
    inputs = captured.graph.find_nodes(op="placeholder")
    example = captured.example or []
    fakes = [
        node.meta.get("val") if isinstance(value, torch.Tensor) else value
        for node, value in zip(inputs, example, strict=False)
    ]
    return dataclasses.replace(captured, graph=copy.deepcopy(captured.graph), example=fakes, misfits=[])


def _name_from_root(captured: Captured, model: nn.Module) -> None:
    """Paths from the model: behind a graph break Dynamo names weights and modules from the module that went on.

    A weight that a function is handed there has no path in its name, and one that a plain object holds, or a list,
    another than the model has for it.
    """
    names: dict[int, list[str]] = {}
    for name, value in (*every_parameter(model), *every_buffer(model)):
        names.setdefault(id(value), []).append(name)
    prefixes = []
    inputs = captured.graph.find_nodes(op="placeholder")
    for node, value in zip(inputs, captured.example or [], strict=False):
        path = str(node.meta.get(ir.WEIGHT_PATH, ""))
        own = names.get(id(value), [])
        fitting = [name for name in own if f".{name}".endswith(f".{path}" if path else "")]
        if ir.WEIGHT_PATH not in node.meta or not own:
            continue
        node.meta[ir.WEIGHT_PATH] = min(fitting or own, key=len)
        if path and fitting:
            prefixes.append(min(fitting, key=len).removesuffix(path))
    prefix = prefixes[0] if prefixes and len(set(prefixes)) == 1 else ""
    around = _modules_around(prefix, model)
    for node in captured.graph.nodes if prefix else ():
        stack = node.meta.get("nn_module_stack") or {}
        inner = {key: (f"{prefix}{path}".strip("."), owner) for key, (path, owner) in stack.items()}
        node.meta["nn_module_stack"] = {**around, **inner}


def _modules_around(prefix: str, model: nn.Module) -> dict[str, tuple[str, type]]:
    """The module that went on and those around it, outermost first: overrides name them too."""
    parts = prefix.strip(".").split(".") if prefix else []
    paths = [".".join(parts[: end + 1]) for end in range(len(parts))]
    return {f"around {path}": (path, type(model.get_submodule(path))) for path in paths}


class _Roots(nn.Module):
    """What a Dynamo graph's paths mean: the graph's own attributes, then the model's, for as long as there is one."""

    def __init__(self, graph_module: nn.Module, model: Callable[[], nn.Module | None]) -> None:
        super().__init__()
        self.__dict__["_graph_module"] = graph_module
        self.__dict__["_model"] = model

    def __getattr__(self, name: str) -> Any:
        for module in (self.__dict__["_graph_module"], self._the_model()):
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)

    def _the_model(self) -> nn.Module:
        model: nn.Module | None = self.__dict__["_model"]()
        return nn.Module() if model is None else model

    def get_submodule(self, target: str) -> nn.Module:
        module: nn.Module = self.__dict__["_graph_module"]
        return module.get_submodule(target)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._the_model().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self._the_model().named_buffers(*args, **kwargs)
