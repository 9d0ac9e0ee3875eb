"""Dynamo as the second front door: `torch.compile(model, backend="fxamp")`, and `convert(capture="dynamo")`.

Graph breaks, guards, recompiles and modes are Dynamo's business; each graph it hands over goes through the same
passes as a symbolic one.
"""

import copy
import inspect
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.capture.dynamo import adopt, fake_mode_of, is_dynamic
from fxamp.capture.surroundings import idle_autocast
from fxamp.codegen import CompiledForward
from fxamp.converted import Variant, plain_view
from fxamp.errors import OptionError, nearest
from fxamp.fakes import Fakes
from fxamp.options import Options, check_options, device_of

log = logging.getLogger("fxamp")

Rewrite = Callable[..., None]
_OPTION_NAMES = ("dtype", "level", "lists", "overrides", "pad_to", "pad", "output_dtype", "inner")


def backend(module: fx.GraphModule, example_inputs: list[Any], options: dict[str, Any] | None = None) -> Any:
    """`torch.compile(model, backend="fxamp", options={...})`: mixed precision, then an inner compiler.

        compiled = torch.compile(model, backend="fxamp", options={"dtype": torch.bfloat16, "inner": "inductor"})

    Args:
        options: dtype, level, lists, overrides, pad_to, pad, output_dtype as in fxamp.convert, and inner: the
            compiler of the rewritten graph ("inductor" by default, "eager", "aot_eager", "cudagraphs").

    Raises:
        OptionError: an option is unknown or has a value that is not allowed.
    """
    from torch._dynamo.backends.registry import lookup_backend  # slow to import, and only needed here

    from fxamp.convert import rewrite

    given = dict(options or {})
    for name in given:
        if name not in _OPTION_NAMES:
            raise OptionError(
                f"options[{name!r}] is unknown.{nearest(name, _OPTION_NAMES)} Allowed: {', '.join(_OPTION_NAMES)}."
            )
    inner = lookup_backend(given.pop("inner", "inductor"))
    checked = check_options(_device_of(example_inputs), **given)
    variant = rewrite_dynamo_graph(module, example_inputs, module, checked, rewrite, fuses_casts=True)
    return inner(fx.GraphModule(module, variant.graph), example_inputs)


def rewrite_dynamo_graph(
    module: fx.GraphModule,
    example_inputs: list[Any],
    root: nn.Module,
    options: Options,
    rewrite: Rewrite,
    fuses_casts: bool = False,
    protected: frozenset[str] = frozenset(),
) -> Variant:
    """One of Dynamo's graphs through the passes.

    Args:
        root: the model its weights belong to, by path.
        protected: source lines whose nodes stand in a region without autocast.
    """
    captured = adopt(module, example_inputs, module, protected)
    captured.root = _Roots(module, root) if root is not module else module
    before, total = captured.text(), len(captured.graph.nodes)
    mode = fake_mode_of(captured.graph)
    fakes = None if mode is None or is_dynamic(captured.graph) else Fakes(module, mode=mode)
    rewrite(captured, fakes, options, fuses_casts=fuses_casts)
    runnable = fx.GraphModule(module, captured.graph)
    forward = CompiledForward(lambda _, *inputs: runnable.forward(*inputs), runnable.code)
    return Variant(captured, before, forward, total)


class _Roots(nn.Module):
    """What a Dynamo graph's paths mean: the graph's own attributes, then the model's."""

    def __init__(self, graph_module: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["_both"] = (graph_module, model)

    def __getattr__(self, name: str) -> Any:
        for module in self.__dict__["_both"]:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)

    def get_submodule(self, target: str) -> nn.Module:
        module: nn.Module = self.__dict__["_both"][0]
        return module.get_submodule(target)


class DynamoForward:
    """A model's forward through `torch.compile`, with fxamp's passes on every graph and nothing else.

    Args:
        options: what convert() was asked for.
        rewrite: the pipeline.
    """

    def __init__(self, options: Options, rewrite: Rewrite) -> None:
        self.options = options
        self.rewrite = rewrite
        self.variants: list[Variant] = []
        self.protected: frozenset[str] = frozenset()
        self._compiled: Any = None

    def __reduce__(self) -> Any:
        return DynamoForward, (self.options, self.rewrite)

    def __call__(self, base: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._compiled is None:
            self.protected = protected_lines(base, module, args, kwargs)
            self._compiled = torch.compile(_own_code(base.forward), backend=self._backend)
        return self._compiled(module, *args, **kwargs)

    def _backend(self, module: fx.GraphModule, example_inputs: list[Any]) -> Any:
        variant = rewrite_dynamo_graph(
            module, example_inputs, module, self.options, self.rewrite, protected=self.protected
        )
        variant.captured.forget_values()
        self.variants.append(variant)
        run = variant.compiled.run
        return lambda *inputs: run(None, *inputs)


def _own_code(function: Any) -> Any:
    """A copy of a function with a code object of its own: Dynamo's caches and limits belong to a code object."""
    while hasattr(function, "__wrapped__") and not hasattr(function, "__code__"):
        function = function.__wrapped__
    if not isinstance(function, types.FunctionType):
        return function
    twin = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__dict__.update(function.__dict__)
    return twin


def trace_on_fakes(
    plain: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, rewrite: Rewrite
) -> list[Variant]:
    """The graphs of one call, from a copy of the model on fake tensors: no data is run, no state is touched.

    Returns:
        previews, none where the model cannot run on fake tensors (the first real call then makes its graphs).
    """
    base: Any = type(plain)
    protected = protected_lines(base, plain, args, kwargs)
    previews: list[Variant] = []

    def record(module: fx.GraphModule, example_inputs: list[Any]) -> None:
        variant = rewrite_dynamo_graph(module, example_inputs, plain, options, rewrite, protected=protected)
        variant.is_preview = True
        variant.captured.forget_values()
        previews.append(variant)

    error = visit_graphs(base, plain, args, kwargs, record)
    if error is not None:
        log.info("no full preview: %s does not run on fake tensors (%s)", base.__qualname__, _first_line(error))
    return previews


def protected_lines(base: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
    """Source lines that the model's author protected from autocast, also where the region does nothing without it.

    (transformers' `maybe_autocast(enabled=False)` leaves no node in a graph unless autocast is on.) Only models
    whose source mentions autocast are asked, by one more trace on fake tensors.
    """
    if not _mentions_autocast(model):
        return frozenset()
    lines: set[str] = set()

    def note(module: fx.GraphModule, example_inputs: list[Any]) -> None:
        graph = adopt(module, example_inputs, module).graph
        lines.update(ir.source_line(node) for node in graph.nodes if node.meta.get("autocast") == "off")

    with idle_autocast(device_of(model).type):
        error = visit_graphs(base, model, args, kwargs, note)
    if error is not None:
        log.info("%s: regions without autocast were looked for in part (%s)", base.__qualname__, _first_line(error))
    return frozenset(lines - {""})


def visit_graphs(
    base: Any,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    visit: Callable[[fx.GraphModule, list[Any]], None],
) -> Exception | None:
    """Show `visit` every graph that Dynamo makes of one call, on a copy of the model and inputs on fake tensors.

    Returns:
        What stopped the run, None when it came to its end. An OptionError is raised.
    """

    def show(module: fx.GraphModule, example_inputs: list[Any]) -> Any:
        visit(module, example_inputs)
        return module.forward

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = lambda value: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value  # noqa: E731
    try:
        with FakeCopyMode(mode):
            twin = copy.deepcopy(plain_view(model))
        fake_args, fake_kwargs = pytree.tree_map(fake, (args, kwargs))
        with mode, torch.random.fork_rng(devices=[]):
            run: Any = torch.compile(_own_code(base.forward), backend=show)  # type: ignore[no-untyped-call, unused-ignore]
            run(twin, *fake_args, **fake_kwargs)
    except OptionError:
        raise
    except Exception as error:
        return error
    return None


def _mentions_autocast(model: nn.Module) -> bool:
    """Whether the source of any of the model's classes speaks of autocast."""
    for name in {type(module).__module__ for module in model.modules()}:
        if name.startswith("torch."):
            continue
        try:
            if "autocast" in inspect.getsource(sys.modules[name]):
                return True
        except (KeyError, OSError, TypeError):
            continue
    return False


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _device_of(example_inputs: list[Any]) -> torch.device:
    return next((value.device for value in example_inputs if isinstance(value, torch.Tensor)), torch.device("cpu"))
