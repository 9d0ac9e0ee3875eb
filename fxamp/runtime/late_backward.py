"""Sees a scaled backward that adds to gradients which are unscaled already.

    scaler.unscale_(optimizer)
    scaler.scale(penalty).backward()  # into the same gradients
    scaler.step(optimizer)            # StepOrderError: part of them is scaled still

A backward of another model's loss (a generator's, between the discriminator's unscale_ and step) is no such thing, nor
is clipping. So what counts is whether a backward that starts at a scaled loss has changed the gradients: they are
looked at as it starts and as it ends, and only while an optimizer stands between unscale_() and step().
"""

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState

from fxamp.runtime import gradients
from fxamp.runtime.plain import must_be_plain

if TYPE_CHECKING:
    from fxamp.runtime.scaler_base import ScalerBase


def watch(scaler: "ScalerBase", scaled: Any) -> Any:
    """What `scale()` returns; it has hooks after unscale_() alone, as one costs as much as all the rest of scale()."""
    if isinstance(scaled, torch.Tensor):
        _note(scaler, scaled)
    elif isinstance(scaled, list | tuple):
        for each in scaled:
            watch(scaler, each)
    else:
        return (watch(scaler, each) for each in scaled)
    return scaled


def watch_all(scaler: "ScalerBase") -> None:
    """At unscale_(): a backward may begin once more at a loss of this iteration that is still there."""
    for reference in scaler.scaled_losses:
        if (scaled := reference()) is not None:
            _hook(scaler, scaled)


def _note(scaler: "ScalerBase", scaled: torch.Tensor) -> None:
    if not scaled.requires_grad:
        return
    scaler.losses_to_go_back += 1
    if torch.compiler.is_compiling():
        return
    alive = [reference for reference in scaler.scaled_losses if reference() is not None]
    scaler.scaled_losses = [*alive, weakref.ref(scaled)]
    if scaler._per_optimizer_states and next(_between(scaler), None) is not None:
        _hook(scaler, scaled)


def _hook(scaler: "ScalerBase", scaled: torch.Tensor) -> None:
    if not must_be_plain(scaled):
        scaled.register_hook(_Begins(scaler))  # type: ignore[no-untyped-call]


class _Begins:
    """Called by autograd with the gradient of a scaled loss, which it leaves alone."""

    def __init__(self, scaler: "ScalerBase") -> None:
        self._scaler = scaler

    def __call__(self, gradient: torch.Tensor) -> None:
        if torch.compiler.is_compiling():  # compiled autograd traces this, and has no end to call at
            return
        before = [
            (state, optimizer, gradients.stamp(optimizer)) for state, optimizer in _between(self._scaler) if optimizer
        ]
        if not before:
            return

        def end() -> None:
            for state, optimizer, stamp in before:
                if not stamp.holds(optimizer):
                    state["has_mixed_gradients"] = True

        torch.autograd.Variable._execution_engine.queue_callback(end)


def _between(scaler: "ScalerBase") -> Iterator[tuple[dict[str, Any], torch.optim.Optimizer | None]]:
    for state in scaler._per_optimizer_states.values():
        if state["stage"] is OptState.UNSCALED:
            reference: weakref.ref[torch.optim.Optimizer] = state["optimizer"]
            yield state, reference()
