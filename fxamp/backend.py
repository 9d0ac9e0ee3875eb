"""Dynamo as the second front door: `torch.compile(model, backend="fxamp")`, and `convert(capture="dynamo")`.

Graph breaks, guards, recompiles and modes are Dynamo's business; each graph it hands over goes through the same
passes as a symbolic one.
"""

import contextlib
import copy
import inspect
import logging
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils import _pytree as pytree

from fxamp import ir, pipeline
from fxamp.capture.dynamo import adopt
from fxamp.capture.inputs import refused_low_inputs
from fxamp.capture.modes import are_modes_active, follow_modules, modes_return, modes_wait
from fxamp.capture.surroundings import idle_autocast
from fxamp.capture.unseen import no_saved_tensor_hooks, unseen
from fxamp.dynamo_variant import Rewrite, rewrite_dynamo_graph, run_checkpoints
from fxamp.errors import OptionError, nearest
from fxamp.options import Options, check_options, device_of
from fxamp.recompute import compiler_call, fold_checkpoints
from fxamp.runtime.apex_casts import casts_into
from fxamp.variant import Variant
from fxamp.views import nested, plain_inside, plain_tree

log = logging.getLogger("fxamp")

Watch = Callable[[Variant, list[Any]], Any]
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

    given = dict(options or {})
    for name in given:
        if name not in _OPTION_NAMES:
            raise OptionError(
                f"options[{name!r}] is unknown.{nearest(name, _OPTION_NAMES)} Allowed: {', '.join(_OPTION_NAMES)}."
            )
    inner_name = given.pop("inner", "inductor")
    inner = lookup_backend(inner_name)
    checked = check_options(_device_of(example_inputs), **given)
    with no_saved_tensor_hooks():
        variant = rewrite_dynamo_graph(module, example_inputs, module, checked, pipeline.rewrite, fuses_casts=True)
    call = run_checkpoints(module) if inner_name == "eager" else compiler_call(module)
    return inner(fx.GraphModule(module, fold_checkpoints(variant.graph, call)), example_inputs)


class DynamoForward:
    """A model's forward through `torch.compile`, with fxamp's passes on every graph and nothing else.

    Args:
        options: what convert() was asked for.
        rewrite: the pipeline.

    Attributes:
        variants: every graph there is, in the order of their making.
        watch: while it is set, it runs the graphs in the place of their compiled forwards.
        calls: of the model, so far.
        weights: paths of the weights that graphs were given in calls that made graphs.
        shared: a weight of a module -> the weight of the equal module whose graph runs it, and decided for both.
    """

    def __init__(self, options: Options, rewrite: Rewrite) -> None:
        self.options = options
        self.rewrite = rewrite
        self.variants: list[Variant] = []
        self.protected: frozenset[str] = frozenset()
        self.watch: Watch | None = None
        self.calls = 0
        self.weights: set[str] = set()
        self.shared: dict[str, str] = {}
        self._grown_at = 1
        self._compiled: Any = None
        self._seen: weakref.ref[nn.Module] | None = None  # Dynamo's caches keep this object, not the model
        self._nested: list[str] = []
        self._outside: Any = None

    def stay_outside(self, name: str) -> None:
        """Let a Dynamo that traces the model from outside break its graph here: it would trace through, into what the
        user wrote, and run that in float32. (It is imported by then.)
        """
        if self._outside is None:
            reason = (
                f"fxamp leaves {name} to Dynamo itself; torch.compile(model, backend='fxamp') makes one graph of it"
            )
            self._outside = torch.compiler.disable(self._call, reason=reason)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> Any:
        return DynamoForward, (self.options, self.rewrite)

    def __call__(self, base: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() and self._outside is not None:
            return self._outside(base, module, args, kwargs)
        return self._call(base, module, args, kwargs)

    def _call(self, base: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if are_modes_active() and (follow_modules() or (self.calls and not self.variants)):
            with plain_inside(module, nested(module)):  # Dynamo would give up, and not come back; or has
                return base.forward(module, *args, **kwargs)
        self.calls += 1
        self._seen = weakref.ref(module)
        if self._compiled is None:
            self._nested = nested(module)
            self.protected = protected_lines(base, module, args, kwargs)
            self._compiled = torch.compile(_own_code(base.forward), backend=self._backend)
        try:
            inside = plain_inside(module, self._nested) if self._nested else contextlib.nullcontext()
            with modes_wait(), casts_into(self.options.low), inside:
                return self._compiled(module, *args, **kwargs)
        except (RuntimeError, ValueError) as error:
            refused = refused_low_inputs(module, pytree.tree_leaves((args, kwargs)), error)
            if refused is None:
                raise
            raise refused from error

    @property
    def _root(self) -> nn.Module | None:
        """The model of the last call."""
        return None if self._seen is None else self._seen()

    def _backend(self, module: fx.GraphModule, example_inputs: list[Any]) -> Any:
        root = self._root or module
        with no_saved_tensor_hooks():
            variant = rewrite_dynamo_graph(
                module, example_inputs, root, self.options, self.rewrite, protected=self.protected, keeps_model=False
            )
        variant.captured.forget_values()
        self.variants.append(variant)
        self._grown_at = self.calls
        return lambda *inputs: self._run(variant, list(inputs))

    def _run(self, variant: Variant, inputs: list[Any]) -> Any:
        if self.calls == self._grown_at and self._root is not None:
            self._note_weights(variant, inputs, self._root)
        with modes_return():
            if self.watch is not None:
                return self.watch(variant, inputs)
            return variant.compiled.run(None, *inputs)

    def _note_weights(self, variant: Variant, inputs: list[Any], root: nn.Module) -> None:
        """Which weights graphs are given, and which of them another module's graph is given."""
        names: dict[int, list[str]] = {}
        for name, weight in root.named_parameters(remove_duplicate=False):
            names.setdefault(id(weight), []).append(name)
        placeholders = [node for node in variant.graph.nodes if node.op == "placeholder"]
        for node, value in zip(placeholders, inputs, strict=False):
            found = names.get(id(value), [])
            self.weights.update(found)
            own = node.meta.get(ir.WEIGHT_PATH)
            if own is not None and found and own not in found:
                self.shared[found[0]] = str(own)


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


def protected_lines(base: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
    """Source lines that the model's author protected from autocast, also where the region does nothing without it.

    (transformers' `maybe_autocast(enabled=False)` leaves no node in a graph unless autocast is on.) Only models
    whose source mentions autocast are asked, by one more trace on fake tensors.
    """
    if not _mentions_autocast(model):
        return frozenset()
    lines: set[str] = set()

    def note(module: fx.GraphModule, example_inputs: list[Any], twin: nn.Module) -> None:
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

    show_to = [visit]  # Dynamo's caches keep `show`, and must not keep what it shows the graphs to
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = lambda value: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value  # noqa: E731
    try:
        with FakeCopyMode(mode):
            twin = copy.deepcopy(plain_tree(model))
        fake_args, fake_kwargs = pytree.tree_map(fake, (args, kwargs))
        with mode, unseen(model), no_saved_tensor_hooks():
            run: Any = torch.compile(_own_code(base.forward), backend=show)  # type: ignore[no-untyped-call, unused-ignore]
            run(twin, *fake_args, **fake_kwargs)
    except OptionError:
        raise
    except Exception as error:
        return error
    finally:
        show_to.clear()
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
