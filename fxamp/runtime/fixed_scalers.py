"""Loss scalers that do not adapt, with LossScaler's interface, so that a training loop needs no `if`."""

import inspect
from typing import Any

import torch

from fxamp.errors import CheckpointError
from fxamp.runtime.arguments import check_names, is_finite
from fxamp.runtime.scale_rule import ANY_SCALE, checked_scale
from fxamp.runtime.scaler import LossScaler
from fxamp.runtime.scaler_base import needs_scaling

OF_A_STATIC_ONE = ("enabled", "device", "max_skips", "process_group", "dtype")


class StaticLossScaler(LossScaler):
    """A constant loss scale. Steps with non-finite gradients are skipped, as under LossScaler.

        scaler = fxamp.StaticLossScaler(fxamp.choose_scale(max_abs_grad))

    Args:
        scale: 2^-127 to 2^127, as float32 holds its reciprocal there.
        options: LossScaler's keywords enabled, device, max_skips, process_group, dtype; after `max_skips`
            skipped updates in a row ScaleCollapseError is raised, since this scale will not come down.

    Raises:
        OptionError: scale is no such number, or an option of another name.
    """

    def __init__(self, scale: float, **options: Any) -> None:
        check_names("StaticLossScaler()", options, OF_A_STATIC_ONE, " Its scale has no bounds and does not grow.")
        checked_scale("scale", scale, ANY_SCALE)
        super().__init__(scale, min_scale=scale, max_scale=scale, **options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a static scaler; its scale becomes the constant.

        Raises:
            CheckpointError: a dynamic scaler's state, or none at all.
        """
        if not isinstance(state_dict, dict):
            super().load_state_dict(state_dict)  # refuses it
            return
        bounds = [state_dict.get(name) for name in ("min_scale", "max_scale")]
        is_dynamic = any(bound is None for bound in bounds) or (all(map(is_finite, bounds)) and bounds[0] != bounds[1])
        if self._enabled and state_dict and is_dynamic:
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


def scaler_for(dtype: torch.dtype | str, **options: Any) -> LossScaler:
    """The scaler a precision needs: LossScaler for float16, NoOpLossScaler for what has float32's range.

        scaler = fxamp.scaler_for(fxamp.report(model).low_dtype)

    Args:
        dtype: torch.float16, torch.bfloat16, torch.float32 or torch.float64, or a name of one ("fp16", "bfloat16").
        options: LossScaler's arguments; not used where nothing is scaled.

    Returns:
        A scaler of the same methods either way, so that the training loop asks nothing.

    Raises:
        OptionError: another dtype or name ("auto" is one that convert() resolves), or an option of another name.
    """
    known = [name for name in inspect.signature(LossScaler).parameters if name != "dtype"]
    check_names("scaler_for()", options, known)
    return LossScaler(**options) if needs_scaling(dtype) else NoOpLossScaler()
