"""What a loss scaler is between steps: its constants, its state on the device, saving and copying it."""

import collections
import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.utils.weak import WeakIdKeyDictionary

from fxamp.dtypes import NAMES
from fxamp.errors import FxampError, OptionError, nearest
from fxamp.logs import configure_logging
from fxamp.runtime import gradients, late_backward, scaler_state
from fxamp.runtime.arguments import checked_device, checked_flag, number_in, refuse_containers
from fxamp.runtime.copies import copy_on
from fxamp.runtime.no_gradients import Loss, loss_in
from fxamp.runtime.scale_rule import ScaleRule, checked_scale
from fxamp.runtime.watch import SETTLED_AFTER, ScaleRecord, ScaleWatch

RIGHT_ORDER = "scaler.scale(loss).backward(); [scaler.unscale_(optimizer);] scaler.step(optimizer); scaler.update()"


class StepOrderError(FxampError, RuntimeError):
    """A scaler's methods were called in an order that has no meaning."""


class ScalerBase(torch.amp.GradScaler):
    """State and constants of a dynamic loss scaler; see LossScaler for the arguments."""

    def __init__(
        self,
        rule: ScaleRule,
        init_scale: float,
        *,
        enabled: bool,
        device: torch.device | str | None,
        max_skips: int,
    ) -> None:
        configure_logging()
        if isinstance(max_skips, bool) or not isinstance(max_skips, int) or max_skips < 1:
            raise OptionError(f"max_skips={max_skips!r} must be an integer >= 1.")
        init_scale, where = number_in(init_scale), checked_device(device)
        super().__init__(_device_type(where), checked_scale("init_scale", init_scale, rule), enabled=False)
        self._enabled = checked_flag("enabled", enabled)
        self.rule = rule
        self.max_skips = max_skips
        self.watch = ScaleWatch(rule.min_scale, settled_after=min(rule.growth_interval, SETTLED_AFTER))
        self.watch.note_scale(float(init_scale))
        self._init_scale = float(init_scale)
        self._init_growth_tracker = rule.first_tracker
        self._init_hysteresis_left = rule.hysteresis
        self._scale: torch.Tensor | None = None
        self._growth_tracker: torch.Tensor | None = None
        self._hysteresis_left: torch.Tensor | None = None
        self._names: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
        self._has_warned_empty = False
        self._looked_at: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._scale_calls = 0
        self.losses_to_go_back = 0  # scaled so far, that require grad
        self._losses_at_update = 0
        self.is_stepping = False  # an optimizer that was given no closure
        self._had_history: bool | None = None  # whether what was scaled last required grad
        self._loss: Loss = None  # that, if it did
        self.forget_iteration()
        if self._enabled and where is not None:
            self._begin_on(where)

    def _begin_on(self, device: torch.device) -> None:
        try:
            self._lazy_init_scale_growth_tracker(device)
        except (RuntimeError, AssertionError, ImportError) as error:  # torch's own for a device that is not there
            raise OptionError(f"device={str(device)!r} is not there: {error}. Leave device= out.") from error

    # Constants: kept in the rule; these are the names under which torch and its callers know them.

    @property
    def _growth_factor(self) -> float:  # type: ignore[override]
        return self.rule.growth_factor

    @property
    def _backoff_factor(self) -> float:  # type: ignore[override]
        return self.rule.backoff_factor

    @property
    def _growth_interval(self) -> int:  # type: ignore[override]
        return self.rule.growth_interval

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor for growth, > 1."""
        self._set_rule(growth_factor=new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor for backoff, in (0, 1)."""
        self._set_rule(backoff_factor=new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set how many good updates in a row precede growth, >= 1."""
        self._set_rule(growth_interval=new_interval)

    def _set_rule(self, **changes: Any) -> None:
        constants = {**vars(self.rule), **changes}
        self.rule = ScaleRule(**constants)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)
        self._hysteresis_left = torch.full((), self._init_hysteresis_left, dtype=torch.int32, device=dev)

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each in a (nested) iterable of tensors, by the scale.

        Raises:
            OptionError: something else than tensors was given.
        """
        if self._enabled:
            refuse_containers(outputs)
            if self.is_stepping:
                raise OptionError(
                    "the optimizer's step scales a loss, whose gradients nobody unscales or checks. Give the function "
                    "that re-evaluates the model as scaler.step(optimizer, closure=...)."
                )
            self._scale_calls += 1
        self._had_history = gradients.require_grad(outputs)
        self._loss = None if torch.compiler.is_compiling() else loss_in(outputs)
        try:
            scaled = super().scale(outputs)
        except (TypeError, ValueError) as error:  # TypeError: of a named tuple
            raise OptionError(
                f"scale() was given a {type(outputs).__name__}; it takes tensors or an iterable of them."
            ) from error
        return late_backward.watch(self, scaled) if self._enabled else scaled

    def forget_iteration(self) -> None:
        """Begin a new iteration: every optimizer may be unscaled and stepped again."""
        self._per_optimizer_states = _no_states()
        self._scale_calls_at_update = self._scale_calls
        self._had_losses = self.losses_to_go_back > self._losses_at_update
        self._losses_at_update = self.losses_to_go_back
        self.scaled_losses: list[weakref.ref[torch.Tensor]] = []

    def _state_of(self, optimizer: torch.optim.Optimizer, called: str) -> dict[str, Any]:
        if self._scale is None:
            raise self._order_error(called, "scale() was never called")
        gradients.check_optimizer(optimizer, called)
        states = self._per_optimizer_states
        known = states[id(optimizer)].setdefault("optimizer", weakref.ref(optimizer))
        if known() is not optimizer:  # it is gone, and this one stands where it stood
            states[-len(states)] = states.pop(id(optimizer))
            states[id(optimizer)]["optimizer"] = weakref.ref(optimizer)
        state = states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise self._order_error(called, "this optimizer was already stepped since the last update()")
        return state

    def _check_scaled(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], called: str, *, has_closure: bool = False
    ) -> None:
        """Refuse gradients that do not bear the scale of now, all of them or none; a closure may make new ones."""
        if not gradients.has_any(optimizer):
            return
        if state.get("has_mixed_gradients"):
            raise self._order_error(
                called,
                "after unscale_() a backward of another scaled loss has reached these gradients, which are scaled "
                "again in part: unscale after the last backward()",
            )
        is_ready = state["stage"] is OptState.READY and not has_closure
        if is_ready and self._had_losses and self.losses_to_go_back == self._losses_at_update:
            raise self._order_error(
                called,
                "no loss was scaled since the last update(): the gradients bear the scale of before it, or none. "
                "update() comes once, after all optimizers' steps",
            )

    def _order_error(self, called: str, reason: str) -> StepOrderError:
        stages = [state["stage"].name for state in self._per_optimizer_states.values()]
        return StepOrderError(
            f"{called} was called, but {reason} (optimizers this iteration: {', '.join(stages) or 'none'}). "
            f"The right order is: {RIGHT_ORDER}"
        )

    # The scale

    def _checked_new_scale(self, new_scale: float | torch.Tensor) -> float | torch.Tensor:
        """A number, or a tensor on a device that is not read."""
        if not isinstance(new_scale, torch.Tensor):
            return checked_scale("new_scale", new_scale, self.rule)
        if new_scale.numel() != 1 or new_scale.requires_grad:
            raise OptionError(
                f"new_scale has {new_scale.numel()} elements and requires_grad={new_scale.requires_grad}; "
                "it must be one element without gradient."
            )
        if new_scale.is_meta:
            raise OptionError("new_scale is on the meta device, where tensors have no numbers; give a number.")
        if new_scale.device.type == "cpu":
            return checked_scale("new_scale", new_scale.reshape(1).tolist()[0], self.rule)
        return new_scale

    def _set_scale(self, new_scale: float | torch.Tensor) -> None:
        assert self._scale is not None
        if not isinstance(new_scale, torch.Tensor):
            self._scale.fill_(new_scale)
            self.watch.note_scale(new_scale)
            return
        given = copy_on(self._scale.device, new_scale.detach().reshape(())).float()
        given = torch.where(torch.isfinite(given), given, self._scale)
        self._scale.copy_(given.clamp(self.rule.min_scale, self.rule.max_scale))
        self.watch.note_scale(self.rule.min_scale)

    def may_be_below_one(self) -> bool:
        """Whether the scale may be below 1, as far as the host knows: unscaling may then overflow."""
        return self.rule.min_scale < 1 and self.watch.least_scale(self.rule.backoff_factor) < 1

    def name_parameters(self, model: torch.nn.Module) -> None:
        """Use a model's parameter names in messages, where the optimizer was built without names. One model or more.

        Raises:
            OptionError: no model.
        """
        if not isinstance(model, torch.nn.Module):
            raise OptionError(f"name_parameters() takes a torch.nn.Module, got a {type(model).__name__}.")
        self._names.update((parameter, name) for name, parameter in model.named_parameters())

    def _inverse_scale(self) -> torch.Tensor:
        """As torch's, which goes through float64: a float32 division is rounded once, and to the same number."""
        assert self._scale is not None
        return self._scale.reciprocal()

    def _no_inf(self) -> torch.Tensor:
        assert self._scale is not None
        return torch.zeros((), dtype=torch.float32, device=self._scale.device)

    # Reading and saving

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, then bounds, hysteresis and counters; {} when disabled. Reads the device."""
        return scaler_state.state_of(self) if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch.amp.GradScaler, before or after the first use.

        What torch's state lacks (bounds, hysteresis) keeps its present value; counters start at 0.

        Raises:
            CheckpointError: the state is empty, lacks entries, or is of another class.
            OptionError: an entry has a value that is not allowed.
        """
        if self._enabled:
            scaler_state.load(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        if self._per_optimizer_states:
            raise self._order_error("pickling or copying", "an iteration is under way: do it after update()")
        return scaler_state.pickled(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        scaler_state.unpickle(self, state)

    @property
    def skipped_steps(self) -> int:
        """Updates so far in which a step was skipped. Waits for steps still on the device."""
        self.watch.drain()
        return self.watch.skipped_steps

    def history(self) -> list[ScaleRecord]:
        """One record for each update: (step, scale, skipped), to plot. Waits for steps under way."""
        self.watch.drain()
        return list(self.watch.history)


def needs_scaling(dtype: torch.dtype | str) -> bool:
    """Whether gradients in a precision, or under a name of one, need a loss scale: float16's do.

    Raises:
        OptionError: none of float16, bfloat16, float32 and float64.
    """
    names = {**NAMES, "fp32": torch.float32, "float32": torch.float32, "float64": torch.float64}
    known = names.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(known, torch.dtype) or known not in names.values():
        raise OptionError(
            f"dtype={dtype!r} is none that gradients are scaled for or are left alone in. Allowed: torch.float16, "
            f"torch.bfloat16, torch.float32, torch.float64 and their names ({', '.join(map(repr, names))}); of a "
            "converted model it is fxamp.report(model).low_dtype."
            + (nearest(dtype, names) if isinstance(dtype, str) else "")
        )
    return known is torch.float16


def _device_type(device: torch.device | None) -> str:
    if device is not None:
        return device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


def _no_states() -> dict[int, dict[str, Any]]:
    return collections.defaultdict(_refresh_per_optimizer_state)
