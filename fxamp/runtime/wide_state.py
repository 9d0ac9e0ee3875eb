"""Float32 state for an optimizer that was made, stepped or loaded while its parameters were 16 bits."""

import logging
from typing import Any

import torch

from fxamp.dtypes import dtype_name
from fxamp.errors import OptionError
from fxamp.runtime.master_checks import check_groups, group_keys
from fxamp.runtime.masters import is_low
from fxamp.runtime.stand_ins import StandIns

log = logging.getLogger("fxamp")


def widen_state_(optimizer: torch.optim.Optimizer, low: list[torch.Tensor]) -> None:
    """Make the state of 16-bit parameters float32, and warn if numbers that were in it have been rounded.

    Numbers that Adagrad starts from are known exactly, and taken.
    """
    rounded: list[torch.Tensor] = []
    for parameter in low:
        state = optimizer.state.get(parameter, {})
        keys = [key for key, value in state.items() if _has_dtype(value, parameter.dtype)]
        if keys and not (_is_fresh(state, keys) or _starts_adagrad(optimizer, state, parameter.dtype)):
            rounded.append(parameter)
        for key in keys:
            state[key] = state[key].float()
        if _starts_adagrad(optimizer, state, parameter.dtype):
            state["sum"].fill_(optimizer.defaults["initial_accumulator_value"])
    if rounded:
        name = type(optimizer).__name__
        log.warning(
            "The state of %d parameters of %s was %s before it was wrapped: it has been rounded, and what was below "
            "the smallest number is 0. To load a state, wrap %s first and load into the wrapper: "
            "optimizer = fxamp.MasterWeightOptimizer(%s(...)); optimizer.load_state_dict(state).",
            len(rounded),
            name,
            dtype_name(rounded[0].dtype),
            name,
            name,
        )


def load_wide(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], state: dict[str, Any]) -> None:
    """Let an optimizer load a state dict whose tensors stay float32, also those of 16-bit parameters.

    Args:
        parameters: all that the optimizer has, in order.

    Raises:
        OptionError: the groups or the state are another optimizer's; nothing is changed.
    """
    # torch casts loaded state to the dtype of what stands in the groups: let that be float32.
    wide = [torch.empty_like(p, dtype=torch.float32) if is_low(p) else p for p in parameters]
    groups, entries, now = optimizer.param_groups, dict(optimizer.state), optimizer.state
    try:
        with StandIns(optimizer, groups, parameters, wide):
            try:
                optimizer.load_state_dict(state)
            finally:
                loaded, optimizer.param_groups = optimizer.param_groups, groups
        check_groups(loaded, group_keys(optimizer))
    except Exception as error:
        optimizer.state = now
        optimizer.state.clear()
        optimizer.state.update(entries)
        if isinstance(error, OptionError):
            raise
        raise OptionError(
            f"{type(optimizer).__name__} cannot load the state: {type(error).__name__} {error}. It is another "
            "optimizer's, or damaged."
        ) from error
    for group, values in zip(optimizer.param_groups, loaded, strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})


def _has_dtype(value: object, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype


def _is_fresh(state: dict[str, Any], keys: list[str]) -> bool:
    """Whether the 16-bit numbers of a state are the zeros that it was made with."""
    return float(state.get("step", 0)) == 0 and not any(bool(state[key].any()) for key in keys)


def _starts_adagrad(optimizer: torch.optim.Optimizer, state: dict[str, Any], low: torch.dtype) -> bool:
    """Whether this is what Adagrad has before its first step, rounded to `low`."""
    if not isinstance(optimizer, torch.optim.Adagrad) or "sum" not in state or float(state["step"]) != 0:
        return False
    start = torch.tensor(optimizer.defaults["initial_accumulator_value"], dtype=low, device=state["sum"].device)
    return bool((state["sum"] == start).all())
