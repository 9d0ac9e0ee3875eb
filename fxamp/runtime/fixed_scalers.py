"""Loss scalers that do not adapt, with LossScaler's interface, so that a training loop needs no `if`."""

from typing import Any

import torch

from fxamp.errors import CheckpointError
from fxamp.runtime.scale_rule import ScaleRule, checked_scale
from fxamp.runtime.scaler import LossScaler


class StaticLossScaler(LossScaler):
    """A constant loss scale. Steps with non-finite gradients are skipped, as under LossScaler.

        scaler = fxamp.StaticLossScaler(fxamp.choose_scale(max_abs_grad))

    Args:
        scale: finite, > 0.
        options: LossScaler's keywords enabled, device, max_skips, process_group, dtype; after `max_skips`
            skipped updates in a row ScaleCollapseError is raised, since this scale will not come down.

    Raises:
        OptionError: scale is not a finite number > 0.
    """

    def __init__(self, scale: float, **options: Any) -> None:
        checked_scale("scale", scale, ScaleRule(min_scale=2.0**-149, max_scale=2.0**127))
        super().__init__(scale, min_scale=scale, max_scale=scale, **options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a static scaler; its scale becomes the constant.

        Raises:
            CheckpointError: a dynamic scaler's state, or none at all.
        """
        bounds = [state_dict.get(name) for name in ("min_scale", "max_scale")]
        if self._enabled and state_dict and (None in bounds or bounds[0] != bounds[1]):
            raise CheckpointError(
                "This state was saved by a dynamic loss scaler, a StaticLossScaler cannot continue it. Load "
                "it into fxamp.LossScaler(), or fix its scale: fxamp.StaticLossScaler(state['scale'])."
            )
        super().load_state_dict(state_dict)


class NoOpLossScaler(LossScaler):
    """Scales nothing, checks nothing, has no state; step() still clips and takes closures."""

    def __init__(self) -> None:
        super().__init__(enabled=False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignores the state: a run may go on without scaling."""


def scaler_for(dtype: torch.dtype, **options: Any) -> LossScaler:
    """The scaler a precision needs: LossScaler for float16, NoOpLossScaler for anything wider in range."""
    return LossScaler(**options) if dtype is torch.float16 else NoOpLossScaler()
