"""Which parameters O2 and O3 store low: by the graph of a call, or layer by layer where there is none.

At O2 teachers (`fxamp.teachers`) stay in float32.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn

from fxamp import ir
from fxamp.capture.inputs import CallSpec, flatten_call
from fxamp.dtypes import device_of
from fxamp.model.hooked import MUCH, multiplied, share_in
from fxamp.model.likeness import likeness
from fxamp.model.part_options import decisions, options_within
from fxamp.model.views import plain_tree
from fxamp.module_hooks import has_hooks
from fxamp.options import Options
from fxamp.override_keys import around, override_of
from fxamp.paths import attribute_at
from fxamp.pipeline import build_variant
from fxamp.sparse import is_sparse
from fxamp.teachers import weights_of_teachers
from fxamp.tree import every_module

log = logging.getLogger("fxamp")

_LITTLE = 64  # so many times a layer's own matrices the module may hold

_OF_TEACHERS = (
    "%s: %d weights (%s, ...) are frozen copies of trained ones and stay in float32, for an average that follows those "
    "would not move low numbers; overrides={'path': 'allow'} stores them low"
)


def stored_low(
    model: nn.Module, options: Options, graph: fx.Graph | None, say: Callable[..., None] = log.debug
) -> list[str]:
    """The paths of the parameters and buffers that are stored low.

    Args:
        graph: of the model's call; None where none is known.
        say: tells of weights that could be, and follow an average of others.
    """
    found = _lowered_by_layers(model, options) if graph is None else _lowered_by_graph(graph, model, options)
    if options.opt_level == "O2":
        found = _without_teachers(model, found, options, say)
    return _lowered_as_planned(found, model, options)


def _lowered_by_graph(graph: fx.Graph, model: nn.Module, options: Options) -> list[str]:
    """O2: the parameters that the graph only reads low; O3: every float32 parameter and buffer.

    At O3 those of a module that runs high as a whole (a batch norm whose override says so) stay, or of one whose
    precision a preview does not know: nothing casts them. So do sparse ones, which are read in float32.
    """
    if options.opt_level == "O3":
        whole = [node for node in graph.nodes if node.op == "call_module" and ir.mark(node).precision != "low"]
        return _all_but(model, [str(node.target) for node in whole])
    return [name for name in _read_low(graph) if isinstance(attribute_at(model, name), nn.Parameter)]


def _lowered_by_layers(model: nn.Module, options: Options) -> list[str]:
    """The same where no graph of the model is known: O2 lowers what each layer reads low of its own parameters.

    1. A layer is a module with a matrix among its own parameters. What it reads low stands in a graph of it alone;
       equal layers are looked at once. One that no graph holds keeps float32 parameters; so does one whose matrices
       are little beside what is inside of it, as hyper-connections around a block, for a graph takes that all in.
    2. A parameter that several modules hold is lowered where all of them read it low: not a tied embedding.
    3. Modules with hooks that a graph runs whole read float32, with all that they hold.

    At O3 only modules that an override denies keep float32 parameters.
    """
    modules = dict(every_module(model))
    if options.opt_level == "O3":
        keys = {path: override_of(list(around(path)), "", options.overrides) for path in modules}
        return _all_but(model, [path for path, key in keys.items() if key and options.overrides[key] == "deny"])
    layers = _Layers(options, list(modules))
    whole = tuple(f"{path}." for path in _run_whole(model, options))
    low: dict[str, int] = {}  # the parameter, by path
    others: set[int] = set()
    for path, module in modules.items():
        own = {name: weight for name, weight in module._parameters.items() if weight is not None}
        read = frozenset() if f"{path}.".startswith(whole) else layers.reads_low(module, path)
        low |= {f"{path}.{name}".lstrip("."): id(own[name]) for name in own if name in read}
        others |= {id(weight) for name, weight in own.items() if name not in read}
    return [path for path, weight in low.items() if weight not in others]


def _lowered_as_planned(found: list[str], model: nn.Module, options: Options) -> list[str]:
    """The parameters that a plan of the same opt_level stores low; those it does not know, and those that an override
    speaks of, as `found` has them."""
    plan = options.plan
    if plan is None or plan.opt_level != options.opt_level:
        return found
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    low = {id(attribute_at(model, path)) for path in found}
    chosen = []
    for path, tensor in tensors.items():
        is_spoken_of = override_of(list(around(path.rpartition(".")[0])), "", options.overrides) is not None
        planned = None if is_spoken_of or tensor.dtype != torch.float32 else plan.parameters.get(path)
        if id(tensor) in low if planned is None else planned == "low":
            chosen.append(path)
    return chosen


def _run_whole(model: nn.Module, options: Options) -> list[str]:
    """The modules with hooks; none where they hold so much that the forward around them runs as it is written."""
    modules = every_module(model)
    hooked = {path: None for path, module in modules if path and has_hooks(module)}
    is_written = options.capture == "auto" and share_in(multiplied(model), hooked) >= MUCH
    return [] if is_written else list(hooked)


def _without_teachers(model: nn.Module, names: list[str], options: Options, say: Callable[..., None]) -> list[str]:
    """The names but for those of teachers; what an override allows is as the user wants it."""
    teachers = set(weights_of_teachers(model)).intersection(names)
    keys = {name: override_of(list(around(name.rpartition(".")[0])), "", options.overrides) for name in teachers}
    teachers = {name for name, key in keys.items() if key is None or options.overrides[key] != "allow"}
    if teachers:
        say(_OF_TEACHERS, type(model).__qualname__, len(teachers), min(teachers))
    return [name for name in names if name not in teachers]


class _Layers:
    """What layers of a model read low of their own parameters."""

    def __init__(self, options: Options, modules: Collection[str]) -> None:
        self.options = options
        self.modules = modules
        self.known: dict[Any, frozenset[str]] = {}

    def reads_low(self, layer: nn.Module, path: str) -> frozenset[str]:
        """The names of those parameters."""
        matrices = [weight for weight in layer._parameters.values() if weight is not None and weight.dim() > 1]
        if sum(map(torch.numel, matrices)) * _LITTLE <= sum(map(torch.numel, layer.parameters())):
            return frozenset()
        options = options_within(layer, path, self.options, self.modules)
        key = (*likeness(layer), decisions(options))
        if key not in self.known:
            trials = (_found_alone(layer, options, call) for call in _assumed_calls(layer))
            self.known[key] = next((found for found in trials if found), frozenset())
        return self.known[key]


def _assumed_calls(layer: nn.Module) -> Iterator[tuple[CallSpec | None, list[Any] | None]]:
    """Calls of a layer that may be: of assumed types, then of one tensor whose last size a matrix of its own has."""
    yield None, None
    shapes = (weight.shape for weight in layer._parameters.values() if weight is not None and weight.dim() > 1)
    device = device_of(layer)
    for size in dict.fromkeys(size for shape in shapes for size in shape):
        yield flatten_call((torch.empty(1, 2, size, device=device),), {})


def _found_alone(layer: nn.Module, options: Options, call: tuple[CallSpec | None, list[Any] | None]) -> frozenset[str]:
    try:
        return frozenset(_read_low(build_variant(plain_tree(layer), *call, options).graph))
    except Exception as error:  # what is assumed may not fit the layer
        log.debug("%s stays in float32, no assumed call fits it: %s", type(layer).__qualname__, error)
        return frozenset()


def _read_low(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        if node.op == "get_attr" and node.users and all(ir.mark(user).role == "weight cast" for user in node.users):
            yield str(node.target)


def _all_but(model: nn.Module, modules: Iterable[str]) -> list[str]:
    """Every float32 parameter and buffer that is not sparse and not of these modules."""
    inside = tuple(f"{path}." for path in modules)
    tensors = (*model.named_parameters(), *model.named_buffers())
    dense = [name for name, tensor in tensors if tensor.dtype == torch.float32 and not is_sparse(tensor)]
    return [name for name in dense if not name.startswith(inside)]
