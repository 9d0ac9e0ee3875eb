"""The dynamic loss scaler: torch.amp.GradScaler's protocol, bounds, hysteresis, and no host sync."""

import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import OptState

from fxamp.runtime import arguments, clipping, collapse, distributed, gradients, host_step, late_backward
from fxamp.runtime.device_skip import settle, step_unless
from fxamp.runtime.no_gradients import why_none
from fxamp.runtime.scale_rule import ScaleRule
from fxamp.runtime.scaler_base import ScalerBase, needs_scaling
from fxamp.runtime.scaler_state import any_of, combined_found_inf
from fxamp.runtime.shared_gradients import left_by, shared_with_others, unscale_rest_
from fxamp.runtime.step_result import Gradients, HostCopy, StepResult, result_of

log = logging.getLogger("fxamp")


class LossScaler(ScalerBase):
    """Multiplies the loss so that fp16 gradients neither vanish nor overflow, and finds the factor itself.

        scaler = fxamp.LossScaler()
        for inputs, targets in batches:
            optimizer.zero_grad()
            scaler.scale(loss_fn(model(inputs), targets)).backward()
            result = scaler.step(optimizer, max_grad_norm=1.0)
            scaler.update()

    With default arguments, and as long as the scale is within min_scale..max_scale, scale, tracker and parameters are
    torch.amp.GradScaler's after every step (a fused optimizer's parameters to the last bit where the scale is no power
    of two, by which its kernel divides), and either class loads the other's state. No method of a step reads the
    device: whether an update is skipped is decided there (`device_skip` has the ways and what each costs). What the
    host must know (the collapse, the log lines, the history) it learns when the numbers have arrived: at once on a CPU,
    two steps late on a GPU; that is harmless, because a non-finite step never changes a parameter.

    Args:
        init_scale: first scale, within min_scale..max_scale.
        growth_factor: > 1; applied after growth_interval good updates in a row.
        backoff_factor: in (0, 1); applied when a gradient was not finite.
        growth_interval: in updates.
        enabled: False makes every method pass through, as in torch.
        device: where the state lives; None: the device of the first loss. Given, the state exists at once.
        hysteresis: non-finite updates until the first backoff; 1 is torch's rule.
        refill: when hysteresis is restored: "growth" (Megatron) or "good_step" (apex). "deepspeed" and
            "deepspeed_consecutive" are the same two with DeepSpeed's count of good updates, see ScaleRule.
        min_scale, max_scale: bounds, 2^-127 to 2^127; torch's scale can reach 0 and then writes NaN into parameters.
        max_skips: skipped updates in a row at min_scale after which ScaleCollapseError is raised.
        process_group: ranks that share the gradients of a step: found_inf is their maximum, and a gradient
            norm is taken over all their shards. Gradients that are DTensors (FSDP2) need no group here. Not
            kept by pickle and deepcopy: set the attribute again.
        dtype: the model's low precision, or its name; bfloat16 has fp32's range, so scaling is switched off.

    Raises:
        OptionError: an argument out of range; says which, and what is allowed.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        device: torch.device | str | None = None,
        hysteresis: int = 1,
        refill: str = "growth",
        min_scale: float = 2.0**-14,
        max_scale: float = 2.0**24,
        max_skips: int = 50,
        process_group: Any = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        rule = ScaleRule(growth_factor, backoff_factor, growth_interval, hysteresis, refill, min_scale, max_scale)
        if dtype is not None and not needs_scaling(dtype) and enabled:
            log.info("%s has float32's range: the loss scaler is switched off", str(dtype).removeprefix("torch."))
            enabled = False
        super().__init__(rule, init_scale, enabled=enabled, device=device, max_skips=max_skips)
        self.process_group = arguments.checked_group(process_group)
        self.allows_half_gradients = False  # apex's O3 unscales fp16 gradients in place

    @_disable_dynamo  # of a compiled training step, which loses what is noted of an optimizer
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale in place; once more, on the same gradients, it does nothing.

        Low-precision gradients of a master-weight optimizer become float32 first (`.grad` of a 16-bit
        parameter is then a float32 tensor), because their true values may vanish in 16 bits.

        Raises:
            StepOrderError: no scale() since the last update(), after step() in the same iteration, or once
                more when the gradients have changed: another backward has added scaled gradients to unscaled ones.
            OptionError: fp16 gradients under an optimizer without masters.
        """
        if not self._enabled:
            return
        state = self._state_of(optimizer, "unscale_()")
        if state["stage"] is OptState.UNSCALED:
            before: gradients.Stamp | None = state.get("unscaled")
            if before is None or before.holds(optimizer):
                return
            raise self._order_error(
                "unscale_()",
                "it has already been called on this optimizer since the last update(), and its gradients have changed "
                "since: unscale once, after the last backward() and before clipping",
            )
        self._check_scaled(optimizer, state, "unscale_()")
        self._unscale_(optimizer, state)
        state["unscaled"] = gradients.stamp(optimizer)
        state["parameters"] = sum(1 for _ in gradients.parameters(optimizer))

    def _unscale_(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        state.pop("unscaled", None)
        state.pop("has_mixed_gradients", None)
        shared = shared_with_others(self, optimizer, state)
        widen = getattr(optimizer, "widen_gradients_", None)
        if widen is not None:
            widen()
        if shared is not None:
            flags = unscale_rest_(self, shared)
        else:
            flags = self._unscale_grads_(optimizer, self._inverse_scale(), self._no_inf(), self.allows_half_gradients)
        state["found_inf_per_device"] = flags
        state["stage"] = OptState.UNSCALED
        late_backward.watch_all(self)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        found = gradients.every(optimizer)
        if has_others := not gradients.are_plain(found):
            found = gradients.dense(optimizer)
        if not allow_fp16:
            gradients.refuse_half(optimizer, found)
        looks_after = self.may_be_below_one()
        flags = gradients.unscale_and_check(found, inv_scale, found_inf, looks_after=looks_after)
        if has_others:
            gradients.check_sums_(optimizer, flags)
        groups = self._groups(optimizer)
        if groups and not flags:
            flags = {found_inf.device: found_inf}  # a rank without gradients takes part all the same
        for flag in flags.values():
            distributed.agree_(flag, groups)
        return flags

    @_disable_dynamo
    def step(  # type: ignore[override]
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        closure: Callable[[], Any] | None = None,
        max_grad_norm: float | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Unscale (if not done), clip, and step the optimizer unless a gradient is not finite.

        Not seen is what is written into gradients past autograd's count (`p.grad.data`) or by a hook of the step, and
        what an optimizer's own numbers do with finite gradients (Adafactor squares them).

        Args:
            args, kwargs: go to `optimizer.step`.
            closure: re-evaluates the model for optimizers such as L-BFGS and SAM: zero_grad, loss, backward
                of `scaler.scale(loss)` (or of the plain loss), return the loss. Gradients are unscaled and
                checked after each call. With a closure the host reads the flag, as such optimizers read the
                loss, and a copy of parameters and state is kept for the way back.
            max_grad_norm: clip the unscaled gradients to this Euclidean norm; math.inf only measures it. Where it is
                above 1.8e19, whose square float32 has not, the step is skipped (torch's clipping gives zeros).

        Returns:
            What happened, readable lazily.

        Raises:
            StepOrderError: called twice since the last update(), no scale() since, parameters that were added after
                unscale_(), or gradients to which another scaled backward has added since (torch mixes them).
            OptionError: no optimizer; fp16 gradients under an optimizer without masters; a negative or NaN
                max_grad_norm; two closures, one that cannot be called, or what no step of torch takes.
        """
        gradients.check_optimizer(optimizer, "step()")
        args, closure = host_step.take_closure(optimizer, args, closure, kwargs)
        max_grad_norm = clipping.checked_max_norm(max_grad_norm)
        gradients.take_over(optimizer)
        if optimizer not in self._looked_at:
            self._looked_at.add(optimizer)
            gradients.warn_of_pure_bfloat16(optimizer)
        if not self._enabled:
            return host_step.plain_step(self, optimizer, args, closure, max_grad_norm, kwargs)
        if closure is not None and self._scale is None:
            first = next(gradients.parameters(optimizer), torch.ones((), device="cpu"))
            self._lazy_init_scale_growth_tracker(first.device)
        state = self._state_of(optimizer, "step()")
        self._check_scaled(optimizer, state, "step()", has_closure=closure is not None)
        if closure is not None:
            result = host_step.step_with_closure(self, optimizer, closure, max_grad_norm, args, kwargs)
        # What unscale_() has found counts, also of gradients that are gone.
        elif not (gradients.has_any(optimizer) or self._groups(optimizer) or state["found_inf_per_device"]):
            result = self._empty_step(optimizer, state)
        else:
            result = self._guarded_step(optimizer, state, max_grad_norm, args, kwargs)
        state["stage"] = OptState.STEPPED
        state["result"] = result
        state["unscaled"] = left_by(optimizer, result)
        collapse.note_culprits(self, optimizer, state)
        return result

    def _guarded_step(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        max_grad_norm: float | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> StepResult:
        assert self._scale is not None
        is_scaled = state["stage"] is OptState.READY
        unscales_itself = is_scaled and gradients.has_masters(optimizer) and not self.may_be_below_one()
        unscales_itself = unscales_itself and not host_step.has_step_hooks(optimizer)  # which see true gradients
        unscales_itself = unscales_itself and shared_with_others(self, optimizer, state) is None
        if unscales_itself:
            self._check_inf_per_device(optimizer)
        elif is_scaled:
            self._unscale_(optimizer, state)
        elif self._may_be_written(optimizer, state):
            self._look_again(optimizer, state)
        found_inf = combined_found_inf(state, self._scale.device)
        divisor = self._scale if unscales_itself else None
        norm = None
        if max_grad_norm is not None:
            norm, divisor = self._clip(optimizer, max_grad_norm, divisor)
            found_inf = self._with_norm(state, found_inf, norm, max_grad_norm)
        settle(optimizer)
        # Some optimizers write their gradients; one with masters unscales those that are float32 in place.
        about = None if unscales_itself else self._about(optimizer)
        self.is_stepping = True
        try:
            returned = step_unless(optimizer, found_inf, lambda: optimizer.step(*args, **kwargs), grad_scale=divisor)
        finally:
            self.is_stepping = False
        about = about or self._about(optimizer)
        return result_of(
            optimizer, found_inf, self._scale, about, norm, returned=returned, scaled_gradients=unscales_itself
        )

    def _may_be_written(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> bool:
        """Whether gradients may be others than after unscale_(); ranks that share them all say yes, and agree anew."""
        before: gradients.Stamp | None = state.get("unscaled")
        return before is not None and (bool(self._groups(optimizer)) or not before.holds(optimizer))

    def _look_again(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Clipping leaves finite gradients finite; what else is done between unscale_() and step() may not."""
        assert self._scale is not None
        if any(new.grad is not None for new in list(gradients.parameters(optimizer))[state["parameters"] :]):
            raise self._order_error(
                "step()", "parameters were added since unscale_(), whose gradients are still scaled: add them before it"
            )
        before = combined_found_inf(state, self._scale.device)
        self._check_inf_per_device(optimizer)
        found_inf = any_of([before, combined_found_inf(state, before.device)], before.device)
        state["found_inf_per_device"] = {before.device: found_inf}

    def _clip(
        self, optimizer: torch.optim.Optimizer, max_norm: float, divisor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Norm of the unscaled gradients; clips them, or folds clipping into the divisor still to apply."""
        norm = clipping.global_norm(optimizer, self.process_group)
        if divisor is not None:
            norm = norm.to(divisor.device) / divisor
        if max_norm == math.inf:
            return norm, divisor
        factor = clipping.clip_factor(norm, max_norm)
        if self._enabled:  # a step that will be skipped: its gradients stay as they are, to be named
            factor = torch.where(norm < math.inf, factor, torch.ones_like(factor))
        if divisor is None:
            clipping.multiply_(gradients.dense(optimizer), factor)
            return norm, None
        return norm, divisor / factor

    def _with_norm(
        self, state: dict[str, Any], found_inf: torch.Tensor, norm: torch.Tensor, max_norm: float
    ) -> torch.Tensor:
        """found_inf, set also where a norm to clip by is not known; 0-d float32."""
        if max_norm == math.inf:
            return found_inf
        found_inf = torch.where(norm.to(found_inf.device) < math.inf, found_inf, torch.ones_like(found_inf))
        state["found_inf_per_device"] = {found_inf.device: found_inf}
        return found_inf

    def _empty_step(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> StepResult:
        self.warn_of_none(optimizer)
        state["found_inf_per_device"] = {}
        assert self._scale is not None
        return result_of(optimizer, torch.ones_like(self._scale), self._scale, self._about(optimizer))

    def warn_of_none(self, optimizer: torch.optim.Optimizer) -> None:
        """Say once why there is no gradient to step with."""
        if not self._has_warned_empty:
            self._has_warned_empty = True
            log.warning("step() did nothing: %s", why_none(optimizer, self._had_history, self._loss))

    @_disable_dynamo
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale by what this iteration's steps found, or set it. Safe to call without a step.

        Args:
            new_scale: a number or one-element tensor, within min_scale..max_scale; a device tensor is not
                read: it is clamped there, and ignored if it is not finite.

        Raises:
            ScaleCollapseError: `max_skips` updates in a row were skipped at min_scale; names the parameters.
            OptionError: new_scale is out of range.
        """
        if not self._enabled:
            return
        if self._scale is None:
            raise self._order_error("update()", "scale() was never called")
        new = None if new_scale is None else self._checked_new_scale(new_scale)
        states = list(self._per_optimizer_states.values())
        flags = self._observe()
        if new is not None:
            self._set_scale(new)
        elif flags:
            self._advance(flags)
        self.forget_iteration()
        if self.watch.skips_at_floor >= self.max_skips:
            collapse.raise_unless_recovered(self, states)

    def _observe(self) -> list[torch.Tensor]:
        """Tell the watch of this iteration's steps; found_inf of each optimizer that was unscaled or stepped."""
        assert self._scale is not None
        flags, copies = [], []
        for state in self._per_optimizer_states.values():
            if state["found_inf_per_device"]:
                flags.append(flag := combined_found_inf(state, self._scale.device))
                result: StepResult | None = state.get("result")
                copies.append(result.copy if result else HostCopy(torch.stack((flag, self._scale))))
        if copies and not any(copy.is_captured for copy in copies):
            self.watch.observe(copies)
        return flags

    def _advance(self, flags: list[torch.Tensor]) -> None:
        assert self._scale is not None and self._growth_tracker is not None
        assert self._hysteresis_left is not None
        found_inf = any_of(flags, self._scale.device)
        self.rule.advance_(self._scale, self._growth_tracker, self._hysteresis_left, found_inf)

    def observe_replay(self, result: StepResult, optimizer: torch.optim.Optimizer) -> None:
        """Take the outcome of a step that a CUDA graph replayed, which ran no code of this class.

        Raises:
            ScaleCollapseError: as update() does.
        """
        self.watch.observe([result.copy])
        if self.watch.skips_at_floor >= self.max_skips:
            flag = torch.tensor(float(result.skipped), device="cpu")
            state = {"optimizer": weakref.ref(optimizer), "found_inf_per_device": {flag.device: flag}}
            collapse.raise_unless_recovered(self, [state])

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        return gradients.groups(optimizer) if self.process_group is None else [self.process_group]

    def _about(self, optimizer: torch.optim.Optimizer) -> Gradients:
        return Gradients(gradients.stamp(optimizer), self.process_group is not None, self._names)
