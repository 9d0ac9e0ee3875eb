"""Calls of an optimizer that see all parameters at once: a step with a closure, and methods of its own.

Optimizers of other packages have more than `step`: `train()` and `eval()` of schedule-free ones,
`first_step()` of SAM.
They, too, read and write float32 masters in the place of 16-bit parameters.
"""

from collections.abc import Callable
from typing import Any

import torch

from fxamp.runtime.master_gradients import take_back_gradients, take_gradient
from fxamp.runtime.masters import MASTER, round_into
from fxamp.runtime.stand_ins import StandIns, apart
from fxamp.runtime.writes import versions_of


def has_own_method(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Whether an optimizer's class adds a public method of this name to those that every optimizer has."""
    return not name.startswith("_") and callable(getattr(type(optimizer), name, None))


def is_trained(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Whether a parameter is trained, or was before it was frozen; any other needs no master."""
    return parameter.requires_grad or hasattr(parameter, MASTER) or parameter in optimizer.state


def call_on_stand_ins(
    optimizer: torch.optim.Optimizer,
    narrow: list[torch.Tensor],
    wide: list[torch.Tensor],
    method: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a method of the optimizer while its groups hold `wide` in the place of `narrow`.

    While a closure among the arguments runs, the groups hold `narrow`, with the values and the gradients that `wide`
    has by then (SAM has cleared them); the gradients that it leaves are those of `wide`.
    """
    standing_in = StandIns(optimizer, optimizer.param_groups, narrow, wide)
    low, high = apart(narrow, wide)

    def with_parameters(closure: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            standing_in.__exit__(None, None, None)
            try:
                round_into(low, high)
                give_back_gradients(narrow, wide)
                take_back_gradients(high)
                with torch.enable_grad():
                    loss = closure(*args, **kwargs)
            finally:
                standing_in.__enter__()
            for parameter, stand_in in zip(low, high, strict=True):
                take_gradient(parameter)
                stand_in.grad = None if parameter.grad is None else parameter.grad.float()
            return loss

        return evaluate

    args = tuple([with_parameters(value) if _is_closure(value) else value for value in args])
    kwargs = {name: with_parameters(value) if _is_closure(value) else value for name, value in kwargs.items()}
    with standing_in:
        return method(*args, **kwargs)


def _is_closure(value: Any) -> bool:
    """Whether an argument is there to be called: a model or a class may be there to be looked at."""
    return callable(value) and not isinstance(value, torch.nn.Module | type)


def written(
    narrow: list[torch.Tensor], wide: list[torch.Tensor], versions: list[Any], *, is_kept: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters that a step has written, or that have gradients, and their stand-ins.

    Args:
        versions: of the stand-ins before the step.
        is_kept: the stand-ins outlive the step. What was written past autograd's count the parameters then take so,
            too: one that the optimizer leaves alone is not written, as somebody may go back through it.
    """
    low, high = [], []
    for parameter, stand_in, before, after in zip(narrow, wide, versions, versions_of(wide), strict=True):
        if stand_in is parameter:
            continue
        if parameter.grad is not None or before != after:
            low.append(parameter)
            high.append(stand_in)
        elif is_kept:
            parameter.data.copy_(stand_in)
    return low, high


def give_back_gradients(narrow: list[torch.Tensor], wide: list[torch.Tensor]) -> None:
    """Let the parameters' gradients be what a method has made of the stand-ins': scaled, or cleared."""
    for parameter, stand_in in zip(narrow, wide, strict=True):
        if stand_in is parameter or parameter.grad is None:
            continue
        if stand_in.grad is None:
            parameter.grad = None
        elif stand_in.grad is not parameter.grad:
            parameter.grad = stand_in.grad.to(parameter.grad.dtype)
