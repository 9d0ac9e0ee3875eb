"""What every capture gives: one graph, and the conditions under which it may be used."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxamp import ir
from fxamp.canonical import canonical_text
from fxamp.capture.data import Answers, DataTrial
from fxamp.capture.further_inputs import FurtherInputs
from fxamp.capture.inputs import CallSpec, of_each
from fxamp.capture.kept_items import Kept
from fxamp.capture.outputs import OutputForm, Part
from fxamp.capture.places import Place
from fxamp.capture.settings import Settings
from fxamp.capture.size_guards import SizeGuard
from fxamp.capture.sizes import Decision, SizeQuestions, SizeTrial, size_guard, size_trial, varying_sizes
from fxamp.capture.state import Cell
from fxamp.errors import CaptureError
from fxamp.fakes import Fakes
from fxamp.function_modes import is_default_device
from fxamp.paths import attribute_at
from fxamp.recorded import is_recorded
from fxamp.sparse import without_numbers


@dataclasses.dataclass
class Captured:
    """A graph of one model's forward.

    Attributes:
        root: the module the graph's paths start from.
        graph: torch-level graph; placeholders stand for the inputs of `spec`, in order.
        spec: the call structure the graph is valid for.
        training: (module path, flag) for every training flag that was read; the graph is valid while they hold.
        decisions: what Python asked of traced sizes; the graph is then valid for the example's sizes, and for those
            that `sizes` allows.
        sizes: the sizes for which the decisions are the same; None where it was not asked, or cannot be told.
        further: gives the inputs behind those of the call; None where there are none.
        answers: what the data of the example said.
        data: asks what Python asked of the inputs' data once more; None where it asked nothing.
        varying: the sizes of inputs (see `varying_sizes`) of which a condition was asked for; None where it was not.
        constants: tensors that belong to no module, by the name that `get_attr` nodes use.
        example: the inputs the graph was captured with, None when it was captured without.
        method: which capture made it.
        state: the Python state that was read; the graph is valid while it is as it was.
        live: numbers of modules that the graph reads at each call, and containers with tensors.
        grad_mode: what torch.is_grad_enabled() was where the model asked, None where it did not.
        attributes: of tensors: (place of an input or path of a weight, name) -> what the model was told, see `answer`.
        had_gradients: whether gradients were on when it was captured.
        output_form: how the graph's flat outputs become what forward returns; None: they are that already.
        default_dtype: torch's when it was captured: creations of the model have it.
        default_device: likewise, where the model makes a tensor there or asks for it; else None.
        settings: what forward sets in a first call alone; `state` is as it is after that call.
        misfits: what a plan or ranges say otherwise, in sentences that are told where the graph is kept.
    """

    root: nn.Module
    graph: fx.Graph
    spec: CallSpec
    training: tuple[tuple[str, bool], ...] = ()
    decisions: tuple[Decision, ...] = ()
    sizes: SizeGuard | SizeTrial | None = None
    further: FurtherInputs | None = None
    answers: Answers = dataclasses.field(default_factory=Answers)
    data: DataTrial | None = None
    varying: frozenset[tuple[int, int]] | None = None
    constants: dict[str, Any] = dataclasses.field(default_factory=dict)
    example: list[Any] | None = None
    method: str = "symbolic"
    output_form: OutputForm | None = None
    state: tuple[Cell, ...] = ()
    live: frozenset[Place] = frozenset()
    grad_mode: bool | None = None
    attributes: dict[tuple[int | str, str], bool] = dataclasses.field(default_factory=dict)
    had_gradients: bool = dataclasses.field(default_factory=torch.is_grad_enabled)
    default_dtype: torch.dtype = dataclasses.field(default_factory=torch.get_default_dtype)
    default_device: torch.device | None = None
    settings: Settings | None = None
    misfits: list[str] = dataclasses.field(default_factory=list)

    @property
    def build(self) -> Callable[[nn.Module, Any], Any] | None:
        """Makes what the graph returns into what forward returns; None where it is that already."""
        return None if self.output_form is None else self.output_form.build

    @property
    def places_set(self) -> tuple[tuple[Kept, Part], ...]:
        """The attributes, and items of what attributes hold, that forward sets, and how each value is made."""
        return () if self.output_form is None else self.output_form.places

    @property
    def attributes_set(self) -> frozenset[str]:
        """Titles of the attributes that forward sets or sets items of ("self.encoder.beta")."""
        return frozenset(f"self.{place.path}.{place.name}".replace("..", ".") for place, _ in self.places_set)

    @property
    def containers_read(self) -> frozenset[Place]:
        """The attributes that are containers of tensors, which the graph reads at each call."""
        return frozenset((cell.path or "", cell.name) for cell in self.state if cell.is_of_tensors)

    def generalise(self, fakes: Fakes, as_condition: bool) -> None:
        """Find out for which other sizes the graph holds, as it was captured; no pass has changed it yet.

        Args:
            as_condition: in a form that Dynamo can trace, of the sizes that vary.
        """
        self.varying = varying_sizes(self.example or []) if as_condition else None
        if self.decisions and self.example is not None and all(decision.node for decision in self.decisions):
            questions = SizeQuestions(self.graph, self.decisions, fakes.in_mode(FakeTensorMode()), self.read)
            self.sizes = (size_guard if as_condition else size_trial)(questions, self.example)

    def read(self, node: fx.Node) -> Any:
        """What a `get_attr` node stands for."""
        return self.constants.get(str(node.target), attribute_at(self.root, node.target))

    @property
    def is_for_one_size(self) -> bool:
        """Whether it may run for tensors of the example's sizes alone."""
        return bool(self.decisions) and self.sizes is None

    def is_for_dynamo(self, inputs: list[Any], sizes_vary: bool) -> bool:
        """Whether Dynamo finds, by tracing alone, that it holds for inputs for which it does: it tries no sizes."""
        if self.data is not None or self.further is not None:
            return False
        if not self.decisions:
            return True
        if sizes_vary:
            return self.varying is not None and varying_sizes(inputs) <= self.varying
        return not isinstance(self.sizes, SizeTrial) or self._has_sizes_of(inputs)

    def _has_sizes_of(self, inputs: list[Any]) -> bool:
        """Whether inputs, or the first of them, have the example's sizes."""
        if self.example is None:
            return False
        return all(_shape(value) == _shape(its) for value, its in zip(inputs, self.example, strict=False))

    def inputs_for(self, module: nn.Module, inputs: list[Any]) -> list[Any] | None:
        """The inputs of the graph for those of a call; None where it does not hold."""
        if self.further is None:
            return inputs
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return None
        if self.is_for_one_size and not self._has_sizes_of(inputs):
            return None
        return self.further.of(module, inputs)

    def holds_for(self, inputs: list[Any]) -> bool:
        """Whether Python would decide as it did for these inputs. Dynamo and torch.jit.trace come through here."""
        if self.answers.is_recorded is not None and self.answers.is_recorded is not is_recorded():
            return False
        if self.default_dtype is not torch.get_default_dtype() or not is_default_device(self.default_device):
            return False
        if not self._holds_for_sizes(inputs):
            return False
        return self.data is None or (not torch.compiler.is_compiling() and self.data(inputs))

    def has_attributes_of(self, module: nn.Module, inputs: list[Any]) -> bool:
        """Whether inputs and weights have the attributes that they had, of those for which the model asked."""
        return all(
            answer(inputs[place] if isinstance(place, int) else attribute_at(module, place), name) is before
            for (place, name), before in self.attributes.items()
        )

    def _holds_for_sizes(self, inputs: list[Any]) -> bool:
        if not self.decisions or self.example is None:
            return True
        is_compiling = torch.compiler.is_compiling()
        if isinstance(self.sizes, SizeGuard) and is_compiling:
            return self.sizes(inputs)  # alone: asked whether a size is a certain one, Dynamo compiles for that one
        if _have_symbols(inputs) and not _have_symbols(self.example):
            return False  # torch.export would find that a size is a certain one
        if self._has_sizes_of(inputs):
            return True
        if self.sizes is None or is_compiling or torch._C._get_tracing_state() is not None:
            return False
        return self.sizes(inputs)

    def text(self) -> str:
        """The graph as Python code."""
        return str(self.graph.python_code("self").src)

    def weight(self, node: fx.Node) -> Any:
        """The tensor a weight node of the graph stands for, None where it cannot be found."""
        path = ir.weight_path(node)
        return self.constants.get(path, attribute_at(self.root, path))

    def forget_values(self) -> None:
        """Drop fake values and data: types stand in the marks, and fakes would keep whole models alive."""
        for node in self.graph.nodes:
            if ir.GUESS in node.meta:
                node.meta[ir.GUESSED] = True
            for key in ("val", ir.GUESS, "example_value", "grapharg"):
                node.meta.pop(key, None)
        if self.example is not None:
            self.example = of_each(_without_data, self.example)
        self.decisions = tuple(Decision(line) for line in dict.fromkeys(decision.line for decision in self.decisions))


def answer(tensor: Any, name: str) -> bool:
    """Whether it is a tensor that requires grad, a parameter, or has an attribute that torch's tensors have not."""
    if name == "_is_param":
        return isinstance(tensor, nn.Parameter)
    return bool(tensor.requires_grad) if name == "requires_grad" else hasattr(tensor, name)


def _have_symbols(inputs: list[Any]) -> bool:
    """Whether sizes are symbols, as while torch.export traces without Dynamo (which takes a question for an answer)."""
    if not torch.compiler.is_compiling() or torch.compiler.is_dynamo_compiling():
        return False
    tensors = (value for value in inputs if isinstance(value, torch.Tensor))
    return any(isinstance(size, torch.SymInt) for value in tensors for size in value.shape)


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value


def _without_data(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if is_functorch_wrapped_tensor(value):  # has operations only inside of its transform
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return without_numbers(value, "meta")


def settled(first: Captured, again: Callable[[], Captured]) -> Captured:
    """A graph for the call and for those that follow: captured with the settings made, after which forward makes none.

    Args:
        first: captured from a forward that may have made settings.
        again: captures once more.

    Raises:
        CaptureError: forward makes settings at every call, or does something else once they are made.
    """
    settings = first.settings
    if settings is None:
        return first
    with contextlib.suppress(CaptureError), settings.made(first.root):
        second = again()
        if second.settings is None and are_equal(first, second):
            second.settings = settings
            return second
    raise CaptureError(settings.refusal)


def are_equal(one: Captured, other: Captured) -> bool:
    """Whether two graphs compute the same from the same inputs."""
    if canonical_text(one.graph) != canonical_text(other.graph) or one.output_form != other.output_form:
        return False
    pairs = [(value, other.constants.get(name)) for name, value in one.constants.items()]
    return len(pairs) == len(other.constants) and all(_are_same(*pair) for pair in pairs)


def _are_same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    if one is other or other is None or one.is_meta or other.is_meta:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)
