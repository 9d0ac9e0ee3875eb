"""What of an optimizer's gradients is scaled, what is set aside, between the backwards of apex's `scale_loss`."""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator

import torch
from torch._compile import _disable_dynamo

from fxamp.runtime import clipping, gradients
from fxamp.runtime.master_gradients import mirror_gradient
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.scaler import LossScaler
from fxamp.runtime.scaler_base import StepOrderError

SCALED_BY = "_fxamp_gradients_scaled_by"  # a ScaledBy; None: the gradients are unscaled
STASH = "_fxamp_stashed_gradients"
_in_a_block: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


@dataclasses.dataclass
class ScaledBy:
    """Which loss's scale gradients bear, and what it was when a backward left them so (delay_unscale)."""

    loss_id: int
    scale: torch.Tensor | None = None
    _source: torch.Tensor | None = None
    _version: int = 0

    def note(self, scaler: LossScaler) -> None:
        """The gradients bear the scale of now."""
        now = scaler._scale
        if now is not None and not self._is_of(now):
            self.scale, self._source, self._version = now.clone(), now, now._version

    def follow(self, optimizer: torch.optim.Optimizer, scaler: LossScaler) -> None:
        """Let gradients bear the scale of now: other optimizers' backward of the same loss may have moved it."""
        now = scaler._scale
        if now is not None and self.scale is not None and not self._is_of(now):
            clipping.multiply_(gradients.dense(optimizer), now / self.scale)
            self.note(scaler)

    def _is_of(self, now: torch.Tensor) -> bool:
        return self._source is now and self._version == now._version


def check_scaled_by(optimizers: list[torch.optim.Optimizer], loss_id: int) -> None:
    """Refuse to add gradients to those that bear another loss's scale, and a block inside of another.

    Raises:
        StepOrderError: what stands cannot be unscaled with what comes.
    """
    for optimizer in optimizers:
        if optimizer in _in_a_block:
            raise StepOrderError(
                f"scale_loss(..., loss_id={loss_id}) begins inside of another scale_loss() of this optimizer, which "
                "would unscale both backwards, each by its own scale: one block after the other."
            )
        standing: ScaledBy | None = getattr(optimizer, SCALED_BY)
        if standing is not None and standing.loss_id != loss_id and gradients.has_any(optimizer):
            raise StepOrderError(
                f"the gradients that stand bear the scale of loss {standing.loss_id}, of scale_loss(..., "
                f"loss_id={standing.loss_id}, delay_unscale=True), and loss_id={loss_id} has its own: leave "
                "delay_unscale out, each backward is then unscaled by its own scale and added."
            )


@contextlib.contextmanager
def standing_gradients(optimizers: list[torch.optim.Optimizer], scaler: LossScaler, loss_id: int) -> Iterator[None]:
    """Set unscaled gradients aside; after an error they stand again, whatever happened to the new ones."""
    for optimizer in optimizers:
        gradients.take_over(optimizer)
    were_scaled_by = [getattr(optimizer, SCALED_BY) for optimizer in optimizers]
    were_empty = [_without_gradients(optimizer) for optimizer in optimizers]
    for optimizer in optimizers:
        _stash(optimizer, scaler, loss_id)
    _in_a_block.update(optimizers)
    try:
        yield
    except BaseException:
        for optimizer, scaled_by, empty in zip(optimizers, were_scaled_by, were_empty, strict=True):
            _put_back(optimizer, scaled_by, empty)
        raise
    finally:
        _in_a_block.difference_update(optimizers)


@_disable_dynamo  # of a compiled training step
def _stash(optimizer: torch.optim.Optimizer, scaler: LossScaler, loss_id: int) -> None:
    """Set unscaled gradients of an earlier backward aside, so that the next one's can be unscaled alone.

    Scaled ones stay, to be unscaled with the next.
    """
    standing: ScaledBy | None = getattr(optimizer, SCALED_BY)
    if standing is not None and gradients.has_any(optimizer):
        standing.follow(optimizer, scaler)
        return
    setattr(optimizer, SCALED_BY, ScaledBy(loss_id))
    if standing is not None:  # zeroed since, and with them what was set aside for a delayed unscale
        getattr(optimizer, STASH).clear()
        return
    for parameter in gradients.parameters(optimizer):
        if parameter.grad is not None:
            getattr(optimizer, STASH).append((parameter, parameter.grad))
            parameter.grad = None


def add_back(optimizer: torch.optim.Optimizer) -> None:
    """Add the gradients that `stash` set aside to the new ones."""
    stash: list[tuple[torch.Tensor, torch.Tensor]] = getattr(optimizer, STASH)
    for parameter, gradient in stash:
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
    stash.clear()
    if isinstance(optimizer, MasterWeightOptimizer):
        optimizer.widen_gradients_()  # zeros that zero_grad(set_to_none=False) left are of 16 bits


def leave_scaled(optimizers: list[torch.optim.Optimizer], scaler: LossScaler) -> None:
    """After a backward that stays scaled: where it has left an optimizer no gradient, those of before stand again."""
    for optimizer in optimizers:
        getattr(optimizer, SCALED_BY).note(scaler)
        if getattr(optimizer, STASH) and not gradients.has_any(optimizer):
            add_back(optimizer)
            setattr(optimizer, SCALED_BY, None)


def _without_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters that have no gradient."""
    return [parameter for parameter in gradients.parameters(optimizer) if parameter.grad is None]


def _put_back(optimizer: torch.optim.Optimizer, scaled_by: ScaledBy | None, empty: list[torch.Tensor]) -> None:
    """After an error: the gradients as they stood before `stash`, without what a broken backward left.

    Where scaled gradients stood, those of the broken backward are among them, as after `loss.backward()`.

    Args:
        scaled_by: whose scale they bore, None for none.
        empty: the parameters that had none.
    """
    setattr(optimizer, SCALED_BY, scaled_by)
    for parameter in empty:
        parameter.grad = None
        mirror_gradient(parameter)
    if scaled_by is None:
        for parameter in gradients.parameters(optimizer):
            parameter.grad = None
        add_back(optimizer)
