"""The optimization levels O0 to O3 of apex.amp: their properties, and what may be overridden."""

import dataclasses
from typing import Any

import torch

from fxamp.dtypes import LOW_DTYPES
from fxamp.errors import OptionError, nearest

BRIEF = {
    "O0": "float32 training",
    "O1": "casts in the graph, float32 parameters",
    "O2": "low-precision parameters, float32 normalisation and float32 masters",
    "O3": "everything in low precision",
}


@dataclasses.dataclass(frozen=True)
class Properties:
    """What a level sets; names and defaults are apex's (apex/amp/frontend.py).

    Attributes:
        cast_model_type: dtype of the model's parameters; None keeps them (O1), or picks the device's own
            low precision (O2, O3: float16 on CUDA, bfloat16 on a CPU).
        patch_torch_functions: True in O1, which inserts casts; nothing is patched, the graph is rewritten.
        keep_batchnorm_fp32: None means the level's own rule. False at O2: weights and statistics of batch norms stay
            float32 all the same, for the op takes them beside low inputs at no cost; at O3 the weights are low.
        loss_scale: "dynamic" or a number.
        enabled: False where initialize() was told to do nothing.
    """

    opt_level: str
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0
    enabled: bool = True


LEVELS = {
    "O0": Properties("O0", cast_model_type=torch.float32, master_weights=False),
    "O1": Properties("O1", patch_torch_functions=True, loss_scale="dynamic"),
    "O2": Properties("O2", keep_batchnorm_fp32=True, master_weights=True, loss_scale="dynamic"),
    "O3": Properties("O3", keep_batchnorm_fp32=False, master_weights=False),
}


def properties(opt_level: str, **overrides: Any) -> Properties:
    """The properties of a level with the given overrides; None means no override.

        properties("O2", loss_scale=128.0).loss_scale == 128.0

    Raises:
        OptionError: an unknown level, an override that contradicts it, or a malformed value.
    """
    if not isinstance(opt_level, str) or opt_level not in LEVELS:
        raise OptionError(
            f"opt_level={opt_level!r} is unknown. Options are 'O0', 'O1', 'O2', 'O3' (letter O, not zero)."
            + nearest(str(opt_level), LEVELS)
        )
    given = {name: value for name, value in overrides.items() if value is not None}
    for name in ("patch_torch_functions", "keep_batchnorm_fp32", "master_weights"):
        if name in given:
            given[name] = _as_bool(name, given[name])
    if "loss_scale" in given:
        given["loss_scale"] = _as_loss_scale(given["loss_scale"])
    _check_overrides(opt_level, given)
    return dataclasses.replace(LEVELS[opt_level], **given)


def _check_overrides(opt_level: str, given: dict[str, Any]) -> None:
    low = given.get("cast_model_type")
    if opt_level == "O1":
        reasons = {
            "cast_model_type": "O1 casts in the graph, so the parameters remain float32; use O2 or O3",
            "keep_batchnorm_fp32": "O1 keeps all parameters in float32, those of batch norm too",
            "master_weights": "in O1 the parameters themselves are float32",
        }
        for name, reason in reasons.items():
            if name in given:
                raise OptionError(f"{name}={given[name]!r} has no meaning with opt_level='O1': {reason}.")
    elif given.get("patch_torch_functions"):
        raise OptionError("patch_torch_functions=True belongs to opt_level='O1' only; leave it out.")
    if opt_level == "O0" and low is not None and low != torch.float32:
        raise OptionError(f"cast_model_type={low!r}: O0 is float32 training; lower models with opt_level='O2' or 'O3'.")
    if opt_level in ("O2", "O3") and low is not None and low not in LOW_DTYPES:
        raise OptionError(f"cast_model_type={low!r} must be torch.float16 or torch.bfloat16 in {opt_level}.")


def _as_bool(name: str, value: object) -> bool:
    known = {True: True, False: False, "True": True, "False": False}
    if not isinstance(value, bool | str) or value not in known:
        raise OptionError(f"{name}={value!r} must be True, False, 'True' or 'False'.")
    return known[value]


def _as_loss_scale(value: object) -> float | str:
    if isinstance(value, str) and value == "dynamic":
        return "dynamic"
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise OptionError(f"loss_scale={value!r} must be a number or 'dynamic'.") from None


def check_output_dtype(dtype: object) -> None:
    """Refuse a cast_model_outputs that is no floating dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError(f"cast_model_outputs={dtype!r} must be a floating dtype, such as torch.float32, or None.")


def check_whole(name: str, value: object, least: int) -> None:
    """Refuse what is no whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(f"{name}={value!r} must be a whole number, {least} or more.")


def table(chosen: Properties) -> str:
    """One line a property, for the log."""
    return "\n".join(f"{name:22} : {value}" for name, value in vars(chosen).items())
