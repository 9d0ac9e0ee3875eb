"""Saving, loading, copying and reading the state of a loss scaler."""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fxamp.errors import CheckpointError, OptionError
from fxamp.runtime.copies import copy_on
from fxamp.runtime.scale_rule import ANY_SCALE, ScaleRule, checked_scale

if TYPE_CHECKING:
    from fxamp.runtime.scaler_base import ScalerBase

TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
DEVICE_STATE = ("_scale", "_growth_tracker", "_hysteresis_left")
NOT_PICKLED = ("process_group", "_per_optimizer_states", "_names", "_looked_at", "scaled_losses", "_loss")


def combined_found_inf(state: dict[str, Any], device: torch.device) -> torch.Tensor:
    """One optimizer's found_inf over all its devices, 0-d float32 on `device`."""
    return any_of(list(state["found_inf_per_device"].values()), device)


def any_of(flags: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """1 where any of the flags is, else 0; 0-d float32 on `device`.

    Not their sum: torch's fused kernels skip where found_inf is 1, and step where it is 2.
    """
    if len(flags) == 1 and not flags[0].dim() and flags[0].device == device:  # in nearly every step
        return flags[0]
    flags = [copy_on(device, flag).reshape(()) for flag in flags]
    if not flags:
        return torch.zeros((), dtype=torch.float32, device=device)
    return flags[0] if len(flags) == 1 else torch.stack(flags).amax()


def state_of(scaler: "ScalerBase") -> dict[str, Any]:
    """Plain numbers: torch.amp.GradScaler's entries first, then the rest."""
    scaler.watch.drain()
    return {
        "scale": scaler.get_scale(),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": scaler._get_growth_tracker(),
        "hysteresis": scaler.rule.hysteresis,
        "refill": scaler.rule.refill,
        "min_scale": scaler.rule.min_scale,
        "max_scale": scaler.rule.max_scale,
        "_hysteresis_left": _hysteresis_left(scaler),
        "counters": scaler.watch.counters(),
    }


def load(scaler: "ScalerBase", state: dict[str, Any]) -> None:
    """Set a scaler to a state of its own kind or of torch's.

    Raises:
        CheckpointError: see LossScaler.load_state_dict.
        OptionError: an entry has a value that is not allowed.
    """
    rule = _checked_rule(scaler, state)
    tracker = _checked_count("_growth_tracker", state["_growth_tracker"], least=-1)
    left = _checked_count("_hysteresis_left", state.get("_hysteresis_left", rule.hysteresis), least=None)
    counters = _checked_counters(state.get("counters", {}))
    # Nothing is changed before everything is checked.
    scaler.rule = rule
    scaler.watch.floor = rule.min_scale
    scaler.watch.restore(counters)
    scaler.watch.note_scale(float(state["scale"]))
    scaler._init_scale = float(state["scale"])
    scaler._init_growth_tracker = tracker
    scaler._init_hysteresis_left = left
    if scaler._scale is not None:
        _refill(scaler)


def _refill(scaler: "ScalerBase") -> None:
    """Write the loaded numbers into the tensors that are there: CUDA graphs read them where they are."""
    before = [getattr(scaler, name) for name in DEVICE_STATE]
    scaler._lazy_init_scale_growth_tracker(before[0].device)
    for name, kept in zip(DEVICE_STATE, before, strict=True):
        setattr(scaler, name, kept.copy_(getattr(scaler, name)))


def pickled(scaler: "ScalerBase") -> dict[str, Any]:
    """Attributes for pickle and deepcopy: the device state as numbers, without the process group."""
    scaler.watch.drain()
    attributes = {name: value for name, value in vars(scaler).items() if name not in NOT_PICKLED}
    attributes["_init_scale"] = scaler.get_scale() if scaler.is_enabled() else scaler._init_scale
    attributes["_init_growth_tracker"] = scaler._get_growth_tracker()
    attributes["_init_hysteresis_left"] = _hysteresis_left(scaler)
    for name in DEVICE_STATE:
        attributes[name] = None
    return attributes


def unpickle(scaler: "ScalerBase", attributes: dict[str, Any]) -> None:
    """The inverse of `pickled`; the device state comes back with the first loss."""
    vars(scaler).update(attributes, process_group=None, _names=WeakIdKeyDictionary(), _looked_at=weakref.WeakSet())
    scaler.forget_iteration()
    scaler._had_losses, scaler._loss = False, None


def _hysteresis_left(scaler: "ScalerBase") -> int:
    left = scaler._hysteresis_left
    return scaler._init_hysteresis_left if left is None else int(left.reshape(1).tolist()[0])


def _checked_rule(scaler: "ScalerBase", state: dict[str, Any]) -> ScaleRule:
    if not isinstance(state, dict):
        raise CheckpointError(f"The state of a {type(scaler).__name__} is a dict, got a {type(state).__name__}.")
    if not state:
        raise CheckpointError(
            "The source state dict is empty, possibly because it was saved from a disabled scaler. "
            "Load it into LossScaler(enabled=False), or go on with a fresh LossScaler."
        )
    missing = [key for key in TORCH_KEYS if key not in state]
    if missing:
        raise CheckpointError(
            f"This is no loss scaler's state: {missing} missing, found {sorted(map(str, state))}. A state "
            f"has {list(TORCH_KEYS)}, as torch.amp.GradScaler.state_dict() gives it."
        )
    now = scaler.rule
    rule = ScaleRule(
        state["growth_factor"],
        state["backoff_factor"],
        state["growth_interval"],
        state.get("hysteresis", now.hysteresis),
        state.get("refill", now.refill),
        state.get("min_scale", now.min_scale),
        state.get("max_scale", now.max_scale),
    )
    if rule.min_scale == rule.max_scale and now.min_scale != now.max_scale:
        raise CheckpointError(
            f"This is a StaticLossScaler's state, whose scale stays {rule.min_scale:g}, and that of a "
            f"{type(scaler).__name__} moves: load it into fxamp.StaticLossScaler(), or go on with a fresh "
            "LossScaler(init_scale=...)."
        )
    # torch's scale has no bounds: one outside ours is loaded, and clamped by the next update().
    checked_scale("scale", state["scale"], ANY_SCALE)
    return rule


def _checked_count(name: str, value: object, *, least: int | None) -> int:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, int) or not is_integer or abs(value) >= 2**31 or (least is not None and value < least):
        bound = "" if least is None else f" >= {least}"
        raise OptionError(f"{name}={value!r} in a loss scaler's state must be an integer{bound}.")
    return value


def _checked_counters(counters: object) -> dict[str, int]:
    if not isinstance(counters, dict):
        raise OptionError(f"counters={counters!r} in a loss scaler's state must be a dict of integers.")
    return {name: _checked_count(f"counters[{name!r}]", value, least=0) for name, value in counters.items()}
