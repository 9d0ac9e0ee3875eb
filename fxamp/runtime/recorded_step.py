"""A step that was captured as a CUDA graph, and the memory that it reads and writes."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from fxamp.runtime.distributed import local
from fxamp.runtime.module_state import ModuleState
from fxamp.runtime.step_result import StepResult


class Asked(Protocol):
    """What asks converted models whether they still are as they were."""

    modules: set[torch.nn.Module]

    def holds(self) -> bool: ...


class Graph:
    """One captured step with its input buffers and results, the weights that it reads and writes, and what else it has
    taken for granted: `recorded` of converted models, `state` of the others.
    """

    def __init__(
        self,
        replay: Callable[[], None],
        static: list[Any],
        loss: torch.Tensor,
        result: StepResult,
        weights: list[torch.Tensor],
        recorded: Asked,
        state: ModuleState,
    ) -> None:
        self.replay = replay
        self.static = static
        self.loss = loss
        self.result = result
        self.recorded = recorded
        self.state = state
        self._weights = [local(weight) for weight in weights]
        self._addresses = list(map(_ADDRESS, self._weights))

    def is_moved(self) -> bool:
        """Whether a weight is elsewhere than it was: `.to()`, `.data =`."""
        return list(map(_ADDRESS, self._weights)) != self._addresses


_ADDRESS = torch.Tensor.data_ptr


def is_elsewhere(weight: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether a weight's memory is another than that of what was its `.data`."""
    return _ADDRESS(local(weight)) != _ADDRESS(local(data))


def static_buffer(given: torch.Tensor) -> torch.Tensor:
    """A tensor for the numbers of an input, and of its successors: its gradients end there."""
    return given.detach().clone().requires_grad_(given.requires_grad)
