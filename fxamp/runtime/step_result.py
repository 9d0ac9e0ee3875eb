"""What one optimizer step did, readable without stopping the device."""

import dataclasses
import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from fxamp import recorded
from fxamp.errors import FxampError, OptionError
from fxamp.runtime import clipping, gradients


@dataclasses.dataclass(frozen=True)
class Gradients:
    """What a result must know to tell of a step's gradients later.

    Attributes:
        stamp: which they were; None after a replay, when `.grad` may belong to another graph.
        has_group: the scaler was given a process group whose ranks hold parts of them.
        names: of parameters, where the optimizer has none.
    """

    stamp: gradients.Stamp | None
    has_group: bool = False
    names: Mapping[torch.Tensor, str] = dataclasses.field(default_factory=dict)


class StaleResultError(FxampError, RuntimeError):
    """A value was asked of a step whose gradients are gone."""


class HostCopy:
    """A few float32 numbers on their way from the device to the host.

    On a GPU the copy goes to pinned memory behind an event; `values` waits for this event only, so a reader
    who comes a step later does not wait at all. Nothing here dispatches `.item()`. While a CUDA graph is
    captured no copy is made: each replay fills `values` anew, and `replayed` copies them.

    Args:
        values: 1-D float32 tensor that nobody writes afterwards.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = values
        self.is_captured = recorded.is_capturing(values.device)
        if values.device.type == "cuda" and not self.is_captured:
            self._host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(values.device))

    @property
    def is_ready(self) -> bool:
        """Whether `values` would return at once."""
        return not self.is_captured and (self._event is None or bool(self._event.query()))  # type: ignore[no-untyped-call]

    @property
    def is_remote(self) -> bool:
        """Whether the numbers come from another device."""
        return self._event is not None

    def replayed(self) -> "HostCopy":
        """The numbers of the replay launched last."""
        return HostCopy(self._host.clone())

    @property
    def values(self) -> list[float]:
        """The numbers; waits for the copy if it is still under way."""
        if self._event is not None:
            self._event.synchronize()
        return [float(value) for value in self._host.tolist()]


class StepResult:
    """What `scaler.step(optimizer)` did.

        result = scaler.step(optimizer, max_grad_norm=1.0)
        if not result.skipped:
            scheduler.step()

    Reading an attribute waits for the device only if this step has not finished there; `is_ready` tells.

    Attributes:
        returned: what `optimizer.step` returned (the loss, with a closure).
        copy: found_inf, scale and, where computed, the norm, on their way to the host.
        has_scaled_gradients: 16-bit gradients still bear the scale: the optimizer has unscaled copies.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        copy: HostCopy,
        about: Gradients,
        *,
        returned: Any = None,
        scaled_gradients: bool = False,
    ) -> None:
        self.returned = returned
        self.copy = copy
        self._optimizer = weakref.ref(optimizer)
        self._about = about
        self.has_scaled_gradients = scaled_gradients

    @property
    def is_ready(self) -> bool:
        """Whether the attributes can be read without waiting for the device."""
        return self.copy.is_ready

    @property
    def skipped(self) -> bool:
        """Whether the update was left out, because a gradient was not finite or there was none."""
        return self.copy.values[0] > 0

    @property
    def found_inf(self) -> bool:
        """As `skipped`; torch's name for it."""
        return self.skipped

    @property
    def scale(self) -> float:
        """The loss scale that this step divided by."""
        return self.copy.values[1]

    @property
    def grad_norm(self) -> float:
        """Euclidean norm of all unscaled gradients, before clipping.

        Computed in the step when `max_grad_norm` was given, else on reading, from the gradients.

        Raises:
            StaleResultError: the gradients have been zeroed, replaced or written since.
            OptionError: other ranks hold parts of them, and the step was not asked for their norm.
        """
        values = self.copy.values
        if len(values) > 2:
            return values[2]
        optimizer = self._live_optimizer("grad_norm")
        if self._about.has_group or gradients.groups(optimizer):
            raise OptionError(
                "grad_norm of gradients that are sharded over ranks is no rank's to compute alone. Pass "
                "max_grad_norm=math.inf to step(), which computes it in the step, on all ranks."
            )
        low: list[torch.Tensor] = []
        high: list[torch.Tensor] = []
        for parameter in gradients.parameters(optimizer):
            found = gradients.summed_values_of(parameter)
            if found is not None and parameter.grad is not None:
                # A master-weight optimizer unscales copies of 16-bit gradients, and all others in place.
                is_scaled = self.has_scaled_gradients and parameter.grad.dtype.itemsize == 2
                (low if is_scaled else high).append(found)
        if not low:
            return float(clipping.total_norm(high))
        return math.hypot(float(clipping.total_norm(low)) / self.scale, float(clipping.total_norm(high)))

    @property
    def stamp(self) -> gradients.Stamp | None:
        """The gradients as the step was given them; None of a replayed one."""
        return self._about.stamp

    @property
    def is_stale(self) -> bool:
        """Whether the gradients have been zeroed, replaced or written since, and can tell no more."""
        optimizer, stamp = self._optimizer(), self._about.stamp
        return optimizer is None or stamp is None or not stamp.holds(optimizer)

    @property
    def nonfinite(self) -> list[str]:
        """Names of the parameters whose gradients, as far as this rank has them, hold an inf or a NaN.

        Raises:
            StaleResultError: as for `grad_norm`.
        """
        return gradients.nonfinite_names(self._live_optimizer("nonfinite"), self._about.names)

    @property
    def nonfinite_count(self) -> int:
        """How many numbers of the gradients, as far as this rank has them, are inf or NaN.

        Of a step that was not skipped it is 0, and no gradient is looked at.

        Raises:
            StaleResultError: as for `grad_norm`.
        """
        if not self.skipped:
            return 0
        return sum(gradients.nonfinite_counts(self._live_optimizer("nonfinite_count")).values())

    def replayed(self) -> "StepResult":
        """The result of the graph's replay launched last; for a result made while capturing."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return StepResult(optimizer, self.copy.replayed(), dataclasses.replace(self._about, stamp=None))

    def _live_optimizer(self, asked: str) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        if optimizer is None or self.is_stale:
            remedy = ", or pass max_grad_norm=math.inf to step(), which computes the norm in the step"
            raise StaleResultError(
                f"{asked} was read after the step's gradients were zeroed, replaced or written (by another backward, "
                f"or by the optimizer's step itself). Read it before zero_grad(){remedy * (asked == 'grad_norm')}."
            )
        return optimizer

    def __repr__(self) -> str:
        if not self.is_ready:
            return "StepResult(still on the device)"
        return f"StepResult(skipped={self.skipped}, scale={self.scale:g})"


def result_of(
    optimizer: torch.optim.Optimizer,
    found_inf: torch.Tensor,
    scale: torch.Tensor,
    about: Gradients,
    norm: torch.Tensor | None = None,
    *,
    returned: Any = None,
    scaled_gradients: bool = False,
) -> StepResult:
    """Start the host copy of one step's outcome.

    Args:
        found_inf, scale, norm: 0-d float32 tensors on one device; they are copied.
    """
    parts = (found_inf, scale) if norm is None else (found_inf, scale, norm.detach().reshape(()))
    packed = torch.stack(parts)
    return StepResult(optimizer, HostCopy(packed), about, returned=returned, scaled_gradients=scaled_gradients)


def plain_result(
    optimizer: torch.optim.Optimizer,
    about: Gradients,
    *,
    skipped: bool,
    scale: float = 1.0,
    norm: torch.Tensor | None = None,
    returned: Any = None,
) -> StepResult:
    """An outcome that the host knows already; `norm` (0-d) may still be on the device."""
    if norm is None:
        known = torch.tensor([float(skipped), scale], dtype=torch.float32, device="cpu")
        return StepResult(optimizer, HostCopy(known), about, returned=returned)
    skips, divisor = (torch.full_like(norm, value) for value in (float(skipped), scale))
    return result_of(optimizer, skips, divisor, about, norm, returned=returned)
