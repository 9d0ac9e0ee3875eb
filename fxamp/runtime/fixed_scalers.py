"""Loss scalers that do not adapt, with LossScaler's interface, so that a training loop needs no `if`."""

from typing import Any

import torch

from fxamp.dtypes import NAMES
from fxamp.errors import CheckpointError, OptionError, nearest
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


def scaler_for(dtype: torch.dtype | str, **options: Any) -> LossScaler:
    """The scaler a precision needs: LossScaler for float16, NoOpLossScaler for what has float32's range.

        scaler = fxamp.scaler_for(fxamp.report(model).low_dtype)

    Args:
        dtype: torch.float16, torch.bfloat16, torch.float32 or torch.float64, or a name of one ("fp16", "bfloat16").
        options: LossScaler's arguments; not used where nothing is scaled.

    Raises:
        OptionError: another dtype or name ("auto" is one that convert() resolves).
    """
    names = {**NAMES, "fp32": torch.float32, "float32": torch.float32, "float64": torch.float64}
    known = names.get(dtype) if isinstance(dtype, str) else dtype
    if known is torch.float16:
        return LossScaler(**options)
    if known in (torch.bfloat16, torch.float32, torch.float64):
        return NoOpLossScaler()
    raise OptionError(
        f"dtype={dtype!r} is none that gradients are scaled for or are left alone in. Allowed: torch.float16, "
        f"torch.bfloat16, torch.float32, torch.float64 and their names ({', '.join(map(repr, names))}); of a converted "
        "model it is fxamp.report(model).low_dtype." + (nearest(dtype, names) if isinstance(dtype, str) else "")
    )
