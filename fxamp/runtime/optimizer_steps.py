"""How many optimizer steps this process has taken.

Fused optimizers write parameters without a trace: `_version` stays. Who keeps something that was made of parameters
asks here too.
"""

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_taken: list[int] = []


def steps_taken() -> int:
    """Steps of any optimizer since this was first asked."""
    if not _taken:
        _taken.append(0)
        register_optimizer_step_post_hook(_count)
    return _taken[0]


def note_step() -> None:
    """Count a step that ran no Python: a replay of a CUDA graph."""
    if _taken:
        _taken[0] += 1


def _count(*_: Any) -> None:
    if not torch.compiler.is_compiling():  # a compiled step copies its results back, which leaves a trace
        note_step()
