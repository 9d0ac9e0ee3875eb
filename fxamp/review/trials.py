"""A converted model's graphs under other options, captured once and rewritten for each; the model stays as it is."""

import contextlib
import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from fxamp.capture.captured import Captured
from fxamp.capture.inputs import of_each, unknown_call
from fxamp.capture.promotion import read_as_own
from fxamp.capture.symbolic import capture_symbolic
from fxamp.errors import CaptureError, OptionError
from fxamp.fake_limits import is_foreign
from fxamp.fakes import Fakes
from fxamp.lists import OpLists
from fxamp.model.blocks import mark_block
from fxamp.model.codegen import CompiledForward
from fxamp.model.engine import Engine
from fxamp.model.rebuild import modes_of, rebuild_variant, with_data
from fxamp.model.state_dicts import named_tensors
from fxamp.model.storage import lower_parameters
from fxamp.model.variant import Variant
from fxamp.model.views import plain_tree
from fxamp.paths import attribute_at
from fxamp.runtime.apex_casts import casts_into
from fxamp.runtime.masters import exact_values, is_stored_low, logical_dtype
from fxamp.runtime.packed_weights import packed_cast


class Trials:
    """What the graphs of a converted model, and of its blocks, would be with fields of its options changed.

        trials = Trials(model)
        for op in ("softmax", "exp"):
            trials.variants(lists=lists.override(infer=[op]))

    1. A model is captured once: only which functions stay whole depends on the options, on the names in the lists.
    2. A node that reads such values as one did in an earlier trial is not run again on fake tensors.
    3. At O2 and O3 the options decide which parameters are stored low: those that are, but for what a change of the
       options changes in the graph, or the layers, by which the conversion has decided.
    4. Each block that is converted by itself has changed lists and levels too; changed overrides mean its outside.

    Args:
        plain: of a block of an O2 or O3 model, the same in the copy of the model.
    """

    def __init__(self, converted: nn.Module, engine: Engine, plain: nn.Module | None = None) -> None:
        self.converted = converted
        self.engine = engine
        self.is_stored = engine.options.opt_level in ("O2", "O3")
        if plain is None:
            plain = plain_tree(converted)
            plain = _in_float32(plain, engine.options.opt_level) if self.is_stored else plain
        self.plain = plain
        self.captures: dict[Any, _Capture] = {}
        self.preview: Variant | None = None
        self.blocks: dict[int, Trials] = {}
        for path, inner in engine.blocks.items():  # one of equal blocks stands for all
            if id(inner) not in self.blocks:
                own = plain.get_submodule(path) if self.is_stored else None
                self.blocks[id(inner)] = Trials(converted.get_submodule(path), inner, own)

    def variants(self, **changes: Any) -> list[Variant]:
        """The graphs with these fields of the options changed; they are to be looked at, not to be run.

        Raises:
            Exception: what convert() raises for such options.
        """
        with _stored(self.plain, self._stored_low(changes) if self.is_stored else {}):
            return self._graphs(changes)

    def _graphs(self, changes: dict[str, Any]) -> list[Variant]:
        options = dataclasses.replace(self.engine.options, **changes)
        own = [self._rewritten(variant, options) for variant in self.engine.all_variants()]
        inside = {name: value for name, value in changes.items() if name != "overrides"}
        return own + [each for block in self.blocks.values() for each in block._graphs(inside)]

    def _stored_low(self, changes: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The parameters and buffers that would be stored low, by path: those that are, but for what the change
        changes."""
        before, after = self._found_low({}), self._found_low(changes)
        stored: dict[str, torch.Tensor] = {}
        for path, today in named_tensors(self.converted):
            if path in after - before or (is_stored_low(today) and path not in before - after):
                options = self.engine.options
                stored[path] = today if is_stored_low(today) else _lowered(attribute_at(self.plain, path), options)
        return stored

    def _found_low(self, changes: dict[str, Any]) -> set[str]:
        """The parameters that a conversion would store low that decides as that of the model did."""
        options = dataclasses.replace(self.engine.options, **changes)
        first = self._first()
        graph = None if first is None else self._rewritten(first, options).graph
        return set(self.engine.workshop.stored_low(self.plain, options, graph))

    def _first(self) -> Variant | None:
        """The graph by which the conversion decided, or one like it; None where it did so layer by layer."""
        if self.engine.stored_by == "preview" and self.preview is None:
            with contextlib.suppress(CaptureError):  # forward reads something else by now
                self.preview = self.engine.workshop.build(self.plain, None, None, self.engine.options)
        known = [*([self.preview] if self.preview is not None else []), *self.engine.all_variants()]
        return None if self.engine.stored_by == "layers" else next(iter(known), None)

    def _rewritten(self, variant: Variant, options: Any) -> Variant:
        rewrite = self.engine.way.rewrite
        if variant.again is not None or rewrite is None:
            changes = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
            found = rebuild_variant(self.converted, self.engine, variant, **changes)
            return _for_blocks_of(variant, found)
        with modes_of(variant, self.plain):
            capture = self._captured(variant, options.lists)
            captured = capture.copy()
            rewrite(captured, None if variant.is_preview else capture.fakes, options)
        found = Variant(captured, "", _NOT_RUN, len(capture.captured.graph.nodes), variant.is_preview)
        return _for_blocks_of(variant, found)

    def _captured(self, variant: Variant, lists: OpLists) -> "_Capture":
        new = frozenset(op for op in lists if op not in self.engine.options.lists)
        found = self.captures.get((id(variant), new))
        if found is None or found.fakes.is_reshaped:
            found = self.captures[id(variant), new] = _capture(self.plain, variant, lists, self.engine.options)
        return found


@dataclasses.dataclass(frozen=True)
class _Capture:
    """A graph as it was captured, and the fake tensors of its values."""

    captured: Captured
    fakes: "_MemoisedFakes"

    def copy(self) -> Captured:
        """The same with nodes and metadata of its own, for passes to rewrite."""
        graph = copy.deepcopy(self.captured.graph)
        return dataclasses.replace(self.captured, graph=graph, constants=dict(self.captured.constants))


def _capture(plain: nn.Module, variant: Variant, lists: OpLists, options: Any) -> _Capture:
    before, fakes = variant.captured, _MemoisedFakes(plain, logical_dtype)
    spec = unknown_call(plain) if variant.is_preview else before.spec
    inputs = None if variant.is_preview else of_each(lambda value: with_data(value, plain), before.example or [])
    with casts_into(options.low):
        captured = capture_symbolic(plain, spec, inputs, fakes, lambda name: name in lists, before.live, before.answers)
        if options.is_part and inputs is not None:
            read_as_own(captured.graph, plain, fakes)
    fakes.is_on = not fakes.is_reshaped
    return _Capture(captured, fakes)


def _never_run(*_: Any) -> Any:
    raise NotImplementedError("a graph that was tried is not for running")


_NOT_RUN = CompiledForward(_never_run, "")


# ------------------------------------------------------------------------------------------------- fake tensors


class _MemoisedFakes(Fakes):
    """Fakes that do not run again what torch's own functions gave for values of the same types, sizes and strides.

    Attributes:
        is_on: results are remembered once the model is captured, and may then stand for several nodes' values.
        is_reshaped: whether a node changed another value's sizes in place, which no other node's may be.
    """

    def __init__(self, root: nn.Module, dtype_of: Callable[[torch.Tensor], torch.dtype]) -> None:
        super().__init__(root, dtype_of)
        self.is_on = False
        self.is_reshaped = False
        self._results: dict[Any, Any] = {}

    def run(self, node: fx.Node, values: Callable[[fx.Node], Any]) -> Any:
        given = fx.node.map_arg((node.args, dict(node.kwargs)), values)
        if node.target is operator.getitem and isinstance(given[0][0], (tuple, list)):
            return operator.getitem(*given[0])
        key = self._key_of(node, given) if self.is_on else None
        if key is not None and key in self._results:
            return self._results[key]
        before = [(tensor._version, _look(tensor)) for tensor in _tensors_in(given)]
        result = super().run(node, values)
        after = [(tensor._version, _look(tensor)) for tensor in _tensors_in(given)]
        self.is_reshaped |= [look for _, look in before] != [look for _, look in after]
        if key is not None and before == after and any(True for _ in _tensors_in((given, result))):
            self._results[key] = result
        return result

    def _key_of(self, node: fx.Node, given: Any) -> Any:
        """What the result's type depends on, None where that cannot be told."""
        state: tuple[Any, ...] = ()
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            is_plain = type(module).__module__.startswith("torch.nn.") and not module._modules
            if not is_plain or module._parameters or module._buffers:
                return None
            state = (module.training,)
        elif is_foreign(node.target) and node.target is not packed_cast:
            return None
        key = (node.op, node.target, *state, torch.is_grad_enabled(), _frozen(given))
        try:
            hash(key)
        except TypeError:
            return None
        return key


def _look(value: torch.Tensor) -> tuple[Any, ...]:
    """All that a fake tensor is; it has no numbers."""
    strides = (value.stride(), value.storage_offset()) if value.layout is torch.strided else id(value)
    return type(value), value.dtype, value.device, value.shape, strides, value.requires_grad


def _frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _look(value)
    if isinstance(value, (tuple, list)):
        return type(value), *map(_frozen, value)
    if isinstance(value, dict):
        return dict, *((name, _frozen(each)) for name, each in value.items())
    if isinstance(value, slice):
        return slice, _frozen(value.start), _frozen(value.stop), _frozen(value.step)
    return type(value), value


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors_in(each)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


# ---------------------------------------------------------------------------------------------------------- O2


def _in_float32(plain: nn.Module, opt_level: str) -> nn.Module:
    """A copy of an O2 or O3 model as it was before parameters were lowered; all else, and all memory, is shared.

    Raises:
        OptionError: the model cannot be copied.
    """
    known: dict[int, Any] = {id(buffer): _exact(buffer) for buffer in plain.buffers()}
    for parameter in plain.parameters():
        known[id(parameter)] = nn.Parameter(_exact(parameter).detach(), requires_grad=parameter.requires_grad)
    try:
        return copy.deepcopy(plain, known)
    except Exception as error:
        raise OptionError(
            f"what_if: which parameters opt_level={opt_level!r} would store low is tried on a copy of the model, and "
            f"{type(plain).__qualname__} cannot be copied: {error}. Convert it with the change and look at its report."
        ) from error


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return exact_values(tensor) if is_stored_low(tensor) else tensor


def _lowered(tensor: torch.Tensor, options: Any) -> torch.Tensor:
    holder = nn.Module()
    if isinstance(tensor, nn.Parameter):
        holder.only = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
    else:
        holder.register_buffer("only", tensor.detach())
    lower_parameters(holder, ("only",), options.low, keep_masters=False, multiple=options.pad_to or 1)
    return holder.only  # type: ignore[return-value]


@contextlib.contextmanager
def _stored(plain: nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """Let the copy of an O2 or O3 model hold these tensors, by path, for as long as the block runs."""
    instead = {id(attribute_at(plain, path)): tensor for path, tensor in tensors.items()}
    tables: list[dict[str, Any]] = [table for each in plain.modules() for table in (each._parameters, each._buffers)]
    before = [(table, name, table[name]) for table in tables for name in table if id(table[name]) in instead]
    for table, name, tensor in before:  # a tied one stands in several
        table[name] = instead[id(tensor)]
    try:
        yield
    finally:
        for table, name, tensor in before:
            table[name] = tensor


def _for_blocks_of(variant: Variant, found: Variant) -> Variant:
    """A graph that was made anew, for the blocks of the model that the first one is for."""
    if variant.blocks:
        mark_block(found, variant.blocks)
    return found
