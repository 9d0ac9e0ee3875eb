"""What Dynamo would make of one call: its graphs, from a copy of the model on fake tensors.

Dynamo runs what it cannot capture, so what forward does outside of the model is put back.
"""

import ast
import contextvars
import copy
import functools
import inspect
import logging
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.capture.dynamo import adopt
from fxamp.capture.effects import clear_caches
from fxamp.capture.frames import captures_apart, compile_apart
from fxamp.capture.reached import Reached, functions_reached, may_take_an_element, named_values
from fxamp.capture.surroundings import idle_autocast
from fxamp.capture.unseen import no_saved_tensor_hooks
from fxamp.dtypes import autocast_kind, device_of
from fxamp.dynamo.variant import Rewrite, rewrite_dynamo_graph
from fxamp.errors import CaptureError, OptionError
from fxamp.model.variant import Variant
from fxamp.model.views import plain_tree
from fxamp.options import Options
from fxamp.recurrent_fakes import without_cudnn
from fxamp.runtime.apex_casts import casts_into
from fxamp.switches import kept_switches

log = logging.getLogger("fxamp")


def trace_on_fakes(
    plain: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, rewrite: Rewrite
) -> list[Variant]:
    """The graphs of one call, from a copy of the model on fake tensors; it leaves no mark.

    Returns:
        previews, none where the model cannot run on fake tensors (the first real call then makes its graphs).
    """
    base: Any = type(plain)
    protected, _ = protected_lines(base, plain, args, kwargs)
    previews: list[Variant] = []

    def record(module: fx.GraphModule, example_inputs: list[Any], twin: nn.Module) -> None:
        variant = rewrite_dynamo_graph(
            module, example_inputs, plain, options, rewrite, protected=protected, weights=twin
        )
        variant.is_preview = True
        variant.captured.forget_values()
        previews.append(variant)

    with casts_into(options.low):
        error = visit_graphs(base, plain, args, kwargs, record)
    if error is not None:
        log.info("no full preview: %s does not run on fake tensors (%s)", base.__qualname__, _first_line(error))
    return previews


def protected_lines(
    base: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[frozenset[str], str]:
    """Source lines that the model's author protected from autocast, also where the region does nothing without it; and
    what stopped the search, "" where it came to the end of forward, or no class of the model speaks of autocast.

    (transformers' `maybe_autocast(enabled=False)` leaves no node in a graph unless autocast is on; nor does a region in
    the graph of a function that Dynamo captures by itself, as it has a question about data.) Only models whose source
    mentions autocast are asked, by one more trace on fake tensors.
    """
    if not _mentions_autocast(model):
        return frozenset(), ""
    lines: set[str] = set()
    kind = autocast_kind(device_of(model))

    def note(module: fx.GraphModule, example_inputs: list[Any], twin: nn.Module) -> None:
        graph = adopt(module, example_inputs, module).graph
        is_inside = not torch.is_autocast_enabled(kind)
        lines.update(ir.source_line(node) for node in graph.nodes if is_inside or node.meta.get("autocast") == "off")

    with idle_autocast(kind):
        error = visit_graphs(base, model, args, kwargs, note)
    found = frozenset(lines - {""})
    if error is None or not _a_class_mentions_autocast(model):
        return found, ""
    is_of_data = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
    return found, "forward asks what its data holds" if is_of_data else _first_line(error)


def visit_graphs(
    base: Any,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    visit: Callable[[fx.GraphModule, list[Any], nn.Module], None],
) -> Exception | None:
    """Show `visit` every graph that Dynamo makes of one call, on a copy of the model and inputs on fake tensors, and
    that copy.

    Returns:
        What stopped the run, None when it came to its end. An OptionError is raised.
    """

    def show(module: fx.GraphModule, example_inputs: list[Any]) -> Any:
        show_to[0](module, example_inputs, twin)
        return module.forward

    kinds = {type(module) for module in model.modules()}
    held = (value for module in model.modules() for value in vars(module).values())
    names, functions = functions_reached([base.forward, *(kind.forward for kind in kinds), *held], kinds)
    outside = Reached(names, [*functions, *kinds, model])
    if may_take_an_element(names, named_values(functions, model)):
        return CaptureError("forward may take the next element of an iterator, which nobody can put back")
    show_to = [visit]  # Dynamo's caches keep `show`, and must not keep what it shows the graphs to
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)

    try:
        with outside.kept():
            with FakeCopyMode(mode):
                twin = copy.deepcopy(plain_tree(model))
                fake_args, fake_kwargs = pytree.tree_map(fake, (args, kwargs))
            with mode, no_saved_tensor_hooks(), without_cudnn(model):
                run = compile_apart(base.forward, show)
                with captures_apart(), kept_switches():
                    contextvars.copy_context().run(run, twin, *fake_args, **fake_kwargs)
    except OptionError:
        raise
    except Exception as error:
        return error
    finally:
        show_to.clear()
        clear_caches(lambda kept: issubclass(type(kept), FakeTensor) and kept.fake_mode is mode)
    return None


def _mentions_autocast(model: nn.Module) -> bool:
    """Whether the source of any of the model's classes speaks of autocast."""
    for name in {type(module).__module__ for module in model.modules()}:
        if name.startswith("torch."):
            continue
        try:
            if _speaks_of_autocast(inspect.getsource(sys.modules[name])):
                return True
        except (KeyError, OSError, TypeError):
            continue
    return False


def _a_class_mentions_autocast(model: nn.Module) -> bool:
    """Whether it stands in a class of the model's, and not only in a script that trains it."""
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        if kind.__module__.startswith(("torch.", "builtins")):
            continue
        try:
            if _speaks_of_autocast(inspect.getsource(kind)):
                return True
        except (OSError, TypeError):
            continue
    return False


@functools.lru_cache(maxsize=256)
def _speaks_of_autocast(source: str) -> bool:
    """In names or in texts; comments and documentation do nothing."""
    if "autocast" not in source:
        return False
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(source))))
    except SyntaxError:  # of a class inside of others, say
        return True
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    fields = (value for node in nodes if id(node) not in documentation for _, value in ast.iter_fields(node))
    return any("autocast" in value for value in fields if isinstance(value, str))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
