"""Who updates lowered parameters without masters, an optimizer or an average: updates below their rounding are lost."""

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxamp.dtypes import dtype_name
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.masters import MASTER, is_stored_low, loosen, writes_since_agreed

log = logging.getLogger("fxamp")

_groups_seen: "weakref.WeakKeyDictionary[torch.optim.Optimizer, int]" = weakref.WeakKeyDictionary()
_hooks: list[Any] = []
_said_all_low: list[bool] = []
_said_often_written: list[bool] = []
_OFTEN = 16  # a truncated normal distribution takes five writes, a clipped weight one between two steps


def watch_plain_steps() -> None:
    """Look at every optimizer's steps from now on: one that updates lowered parameters itself is warned about.

    Registered where parameters are lowered: a process that never does so has no hook.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check_masters))


def _check_masters(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or isinstance(optimizer, MasterWeightOptimizer):
        return
    lowered = [p for group in optimizer.param_groups for p in group["params"] if is_stored_low(p) and p.requires_grad]
    for parameter in lowered:
        loosen(parameter)  # a fused step does not count as a write
    if lowered and _groups_seen.get(optimizer) != len(optimizer.param_groups):
        _groups_seen[optimizer] = len(optimizer.param_groups)
        _warn_of_lost_updates(optimizer, lowered)


def _warn_of_lost_updates(optimizer: torch.optim.Optimizer, lowered: list[torch.Tensor]) -> None:
    is_o2 = any(hasattr(parameter, MASTER) for parameter in lowered)
    if not is_o2 and _said_all_low:
        return
    if not is_o2:
        _said_all_low.append(True)
    log.warning(
        "%s updates %d parameters that opt_level=%r stores in %s, and keeps no float32 masters of them: updates below "
        "their rounding are lost. Wrap it: fxamp.MasterWeightOptimizer(optimizer), or with masters='kahan' or "
        "'stochastic' for less memory.",
        type(optimizer).__name__,
        len(lowered),
        "O2" if is_o2 else "O3",
        dtype_name(lowered[0].dtype),
    )


def look_for_averages(tensors: Iterable[torch.Tensor]) -> None:
    """Warn, once, of lowered parameters that were written over and over while no master was told.

    So write averages of parameters (`AveragedModel`) and optimizers that are not torch's. Called where masters
    are about to be told: at a model's first call, and before a state dict.
    """
    often = [] if _said_often_written else [p for p in tensors if is_stored_low(p) and writes_since_agreed(p) >= _OFTEN]
    if often:
        _said_often_written.append(True)
        log.warning(
            "%d parameters that opt_level='O2' stores in %s were written in place %d times with no step of "
            "fxamp.MasterWeightOptimizer in between: each write was rounded, and what was below the rounding is lost. "
            "Average the tensors of state_dict(), which are float32 and may be written, not the parameters (as "
            "AveragedModel does); wrap the optimizer: fxamp.MasterWeightOptimizer(optimizer).",
            len(often),
            dtype_name(often[0].dtype),
            max(map(writes_since_agreed, often)),
        )
