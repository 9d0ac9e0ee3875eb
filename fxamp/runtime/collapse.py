"""A loss scale that has collapsed to its floor: whether it has, and which parameters' gradients are to blame."""

import math
from typing import TYPE_CHECKING, Any

import torch

from fxamp import recorded
from fxamp.runtime import distributed, gradients
from fxamp.runtime.scaler_state import combined_found_inf
from fxamp.runtime.step_result import StepResult

if TYPE_CHECKING:
    from fxamp.runtime.scaler import LossScaler


def note_culprits(scaler: "LossScaler", optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Where the next update() may raise ScaleCollapseError, read the names now: then zero_grad() may come first."""
    assert scaler._scale is not None
    is_near = scaler.watch.skips_at_floor >= max(1, scaler.max_skips - 1)
    if is_near and not recorded.is_capturing(scaler._scale.device):
        state["culprits"] = gradients.nonfinite_names(optimizer, scaler._names)


def raise_unless_recovered(scaler: "LossScaler", states: list[dict[str, Any]]) -> None:
    """Raise unless the last step has recovered; all ranks decide alike, by the flag they share.

    Args:
        states: of the optimizers that took part in the iteration.

    Raises:
        ScaleCollapseError: names the parameters.
    """
    assert scaler._scale is not None
    flags = [combined_found_inf(state, scaler._scale.device) for state in states]
    if not any(float(flag) > 0 for flag in flags):
        return
    raise scaler.watch.collapse([name for state in states for name in _culprits(scaler, state)] or _nobody(states))


def _culprits(scaler: "LossScaler", state: dict[str, Any]) -> list[str]:
    optimizer = state["optimizer"]()
    noted: list[str] | None = state.get("culprits")
    if noted is not None:
        return noted
    return [] if optimizer is None else gradients.nonfinite_names(optimizer, scaler._names)


def _nobody(states: list[dict[str, Any]]) -> list[str]:
    """Why no gradient is non-finite."""
    results: list[StepResult | None] = [state.get("result") for state in states]
    if any(result is not None and result.is_stale for result in results):
        return ["not known, as gradients were cleared or written before update(): call zero_grad() after it"]
    if any(result is not None and not all(map(math.isfinite, result.copy.values)) for result in results):
        return ["none, but the norm to clip by is above float32's range"]
    return ["none on this rank, but on another" if distributed.several_ranks() else "none any more"]
