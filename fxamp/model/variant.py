"""One rewritten graph of a model, and the conditions under which it may run."""

import dataclasses
import itertools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.autograd import forward_ad

from fxamp import ir
from fxamp.capture.captured import Captured
from fxamp.capture.memory import memory_between
from fxamp.capture.state import Cell, flag_cell
from fxamp.capture.state_check import StateCheck
from fxamp.capture.unseen import outside_of_the_call
from fxamp.model.codegen import CompiledForward
from fxamp.paths import module_at


class WeightCheck(Protocol):
    """Whether a model's weights still fit the low dtype as they did when its graph was made."""

    def __call__(self, module: nn.Module) -> bool: ...

    def note(self, module: nn.Module) -> None: ...

    def forget(self, module: nn.Module) -> None: ...


class NumberCheck(Protocol):
    """Whether the numbers that a graph reads at each call fit the low dtype as they did when it was made."""

    def __call__(self, module: nn.Module, inputs: list[Any]) -> bool: ...

    def holds(self, module: nn.Module, inputs: list[Any]) -> bool: ...


def where_of(blocks: tuple[str, ...]) -> str:
    """Equal blocks of a model in words, "" for none."""
    others = len(blocks) - 1
    return f"{blocks[0]} and {others} like it" if others > 0 else "".join(blocks)


_numbers = itertools.count()


@dataclasses.dataclass
class Variant:
    """One rewritten graph of a model, and when it may run.

    Attributes:
        captured: where the graph came from; its graph is the rewritten one.
        before: text of the captured graph, as code.
        compiled: the rewritten graph as a function.
        total_nodes: of the captured graph, before any pass.
        blocks: paths of the blocks of the model it is for, none where it is for the model itself.
        is_preview: made from assumed types or for fake tensors: never run on data, only shown.
        maker: the model whose call made it, where Dynamo did.
        again: the graph as it was captured, rewritten under other options; None where the model can be captured
            again instead.
        weights: whether the model's weights still fit the low dtype as they did; None where none was looked at.
        is_for_transforms: whether it is for calls in which torch takes batch norm apart (`takes_apart`), or for all
            others; None where that makes no difference.
        numbers: whether the numbers that are read at each call still fit it as they did; None where none was looked at.
        number: its own, as text: Dynamo takes one for what it is, and a number for one that may vary.
    """

    captured: Captured
    before: str
    compiled: CompiledForward
    total_nodes: int
    is_preview: bool = False
    blocks: tuple[str, ...] = ()
    maker: "weakref.ref[nn.Module] | None" = dataclasses.field(default=None, repr=False, compare=False)
    is_for_transforms: bool | None = None
    again: Callable[[Any], "Variant"] | None = dataclasses.field(default=None, repr=False, compare=False)
    weights: WeightCheck | None = dataclasses.field(default=None, repr=False, compare=False)
    numbers: NumberCheck | None = dataclasses.field(default=None, repr=False, compare=False)
    number: str = dataclasses.field(default_factory=lambda: str(next(_numbers)), repr=False, compare=False)
    checks: weakref.WeakKeyDictionary[nn.Module, StateCheck] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary, repr=False
    )

    def __post_init__(self) -> None:
        self.memory = memory_between(self.captured)
        self.count = sum(kind != "constant" for kind, _ in self.captured.spec.leaves)  # of the inputs of a call

    @property
    def where(self) -> str:
        """The blocks it is for, in words, "" for the model itself."""
        return where_of(self.blocks)

    @property
    def graph(self) -> fx.Graph:
        return self.captured.graph

    def holds(self, module: nn.Module, inputs: list[Any]) -> bool:
        """Whether the graph is what the model's forward would do now."""
        return self.inputs_for(module, inputs) is not None

    def inputs_for(self, module: nn.Module, inputs: list[Any]) -> list[Any] | None:
        """The inputs of the graph for those of a call, where it is what the model's forward would do now.

        Dynamo and torch.jit.trace come through here.
        """
        if self.captured.further is not None and (_is_recorded() or not self._state(module).holds()):
            return None  # functions of the model need not run for it
        given = self.captured.inputs_for(module, inputs)
        return given if given is not None and self._holds(module, given) else None

    def is_for_model(self, module: nn.Module) -> bool:
        """Whether a model's Python state is as it was when the graph was made, and its weights fit as they did."""
        with outside_of_the_call():  # torch.jit.trace would record the question
            return self._state(module).holds() and (self.weights is None or self.weights(module))

    def numbers_read(self, module: nn.Module) -> list[Any]:
        """The numbers of a model's that the graph reads anew at each call, as they are now."""
        return self._state(module).numbers()

    def _holds(self, module: nn.Module, inputs: list[Any]) -> bool:
        """What is asked of a call. Of one that Dynamo traces the model has been asked, see `fxamp.model.compiling`."""
        if self.captured.attributes and not self.captured.has_attributes_of(module, inputs):
            return False
        if not self._is_for(inputs):
            return False
        if _is_recorded():
            is_for_numbers = self.numbers is None or self.numbers.holds(module, inputs)
            return is_for_numbers and (torch.compiler.is_dynamo_compiling() or self.is_for_model(module))
        if not self._state(module).holds():
            return False
        if self.memory is not None and not self.memory.holds(module, inputs):
            return False
        if self.is_for_transforms is not None and self.is_for_transforms is not takes_apart():
            return False
        is_as_before = self.numbers is None or self.numbers(module, inputs)
        return is_as_before and (self.weights is None or self.weights(module))

    def note_transforms(self, is_transformed: bool) -> None:
        """Note how it was made, where it has a batch norm that could be low: its statistics are float32."""
        norms = [ir.mark(node) for node in self.graph.nodes if ir.mark(node).op == "batch_norm"]
        if norms and (is_transformed or any(mark.precision == "low" for mark in norms)):
            self.is_for_transforms = is_transformed

    def fits(self, module: nn.Module, inputs: list[Any]) -> bool:
        """Whether it was made for such inputs and these modes, whatever other Python state the model has."""
        given = self.captured.inputs_for(module, inputs)
        return (
            given is not None
            and self._is_for(given)
            and all(bool(module_at(module, path).training) is flag for path, flag in self.captured.training)
        )

    def _is_for(self, inputs: list[Any]) -> bool:
        return self.captured.holds_for(inputs) and self.captured.grad_mode in (None, torch.is_grad_enabled())

    def _state(self, module: nn.Module) -> StateCheck:
        check = self.checks.get(module)
        if check is None:
            check = self.checks[module] = self._new_check(module)
        return check

    def _new_check(self, module: nn.Module) -> StateCheck:
        flags = (flag_cell(path, flag) for path, flag in self.captured.training)
        return StateCheck(module, (*flags, *self.captured.state))

    def note_call(self, module: nn.Module) -> None:
        """Note that it was made for a call of a module."""
        self._state(module)

    def has_run(self, module: nn.Module) -> bool:
        """Whether it was made for a call of a module, or fitted the types of one."""
        return module in self.checks

    def forget(self, module: nn.Module) -> None:
        """Ask again from the start: the model's parts are other objects than they were."""
        self.checks.pop(module, None)
        if self.memory is not None:
            self.memory.forget(module)
        if self.weights is not None:
            self.weights.forget(module)

    def changed_state(self, module: nn.Module) -> list[Cell]:
        """What holds something else than when the graph was made."""
        with outside_of_the_call():
            return (self.checks.get(module) or self._new_check(module)).changed()


def _is_recorded() -> bool:
    """Whether Dynamo, torch.export or torch.jit.trace comes through here."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def takes_apart() -> bool:
    """Whether torch may run batch norm as single operations, which promote: under torch.func's transforms (vmap, also
    of a backward) and forward-mode AD.
    """
    return forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None
