"""How a loss scale moves: on the device, between bounds, with hysteresis. And a scale for given gradients."""

import dataclasses
import math

import torch

from fxamp.errors import OptionError, nearest
from fxamp.runtime.arguments import is_finite, number_in

REFILLS = ("growth", "good_step", "deepspeed", "deepspeed_consecutive")
LARGEST_HALF = torch.finfo(torch.float16).max  # 65,504
LARGEST_EXPONENT = 126  # of a chosen scale: float32 holds 2**126, and its reciprocal as a normal number
NEVER = 2**31 - 1  # good steps, the most that an int32 counts
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-127, torch.finfo(torch.float32).max  # with reciprocals that float32 holds


@dataclasses.dataclass
class ScaleRule:
    """The constants of a dynamic loss scale.

        if a gradient was not finite:
            growth_tracker = 0;  left = left - 1
            if left <= 0:  scale = max(scale * backoff_factor, min_scale)
        else:
            growth_tracker += 1
            if growth_tracker == growth_interval:
                growth_tracker = 0;  scale = min(scale * growth_factor, max_scale)
        refill "growth":     left = hysteresis when the scale grows    (Megatron-Core)
        refill "good_step":  left = hysteresis after every good step   (apex's update_scale_hysteresis)

    With hysteresis 1 this is torch.amp.GradScaler's rule between bounds. "deepspeed" and "deepspeed_consecutive"
    (its consecutive_hysteresis) refill as these two do, but growth_tracker begins at -1, at the start and after an
    overflow: DeepSpeed counts the good steps after the first one. After a growth it begins at 0.

    Raises:
        OptionError: a constant out of its range.
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    refill: str = "growth"
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            setattr(self, name, number_in(value))
        if isinstance(self.growth_interval, int) and self.growth_interval > NEVER:
            self.growth_interval = NEVER  # as good as never, and an int32 holds it
        self.check()

    def check(self) -> None:
        """Refuse constants that cannot work."""
        _require(is_finite(self.growth_factor) and self.growth_factor > 1, "growth_factor", self, "> 1")
        _require(
            is_finite(self.backoff_factor) and 0 < self.backoff_factor < 1,
            "backoff_factor",
            self,
            "in (0, 1)",
        )
        _require(_is_count(self.growth_interval), "growth_interval", self, "an integer from 1 to 2**31 - 1")
        _require(_is_count(self.hysteresis), "hysteresis", self, "an integer from 1 to 2**31 - 1")
        for name in ("min_scale", "max_scale"):
            value = getattr(self, name)
            fits = is_finite(value) and SMALLEST_SCALE <= value <= LARGEST_SCALE
            _require(fits, name, self, "2**-127 to 3.4e38, as float32 holds both it and its reciprocal there")
        if self.min_scale > self.max_scale:
            raise OptionError(
                f"min_scale={self.min_scale:g} is above max_scale={self.max_scale:g}; swap or widen them."
            )
        if self.refill not in REFILLS:
            raise OptionError(
                f"refill={self.refill!r} is not a rule. Allowed: 'growth' (Megatron), 'good_step' (apex), 'deepspeed', "
                f"'deepspeed_consecutive'.{nearest(str(self.refill), REFILLS)}"
            )

    @property
    def first_tracker(self) -> int:
        """Where good steps begin to count."""
        return -1 if self.refill.startswith("deepspeed") else 0

    def advance_(self, scale: torch.Tensor, tracker: torch.Tensor, left: torch.Tensor, found_inf: torch.Tensor) -> None:
        """Move the state by one step, in place and on the device.

        Args:
            scale: 0-d float32. tracker, left: 0-d int32 (good steps; non-finite steps left before a backoff).
            found_inf: 0-d float32, above 0 when a gradient was not finite.
        """
        if self.hysteresis == 1 and self.first_tracker == 0:
            torch._amp_update_scale_(
                scale, tracker, found_inf, self.growth_factor, self.backoff_factor, self.growth_interval
            )
        else:
            self._advance_with_hysteresis_(scale, tracker, left, found_inf)
        scale.clamp_(float(self.min_scale), float(self.max_scale))

    def _advance_with_hysteresis_(
        self, scale: torch.Tensor, tracker: torch.Tensor, left: torch.Tensor, found_inf: torch.Tensor
    ) -> None:
        bad = found_inf > 0
        left.sub_(bad.to(left.dtype))
        backs_off = bad & (left <= 0)
        tracker.add_(1).mul_((~bad).to(tracker.dtype))
        if self.first_tracker:
            tracker.add_(bad.to(tracker.dtype), alpha=self.first_tracker)
        is_due = tracker == self.growth_interval
        grown = scale * self.growth_factor
        grown = torch.where(is_due & torch.isfinite(grown), grown, scale)
        scale.copy_(torch.where(backs_off, scale * self.backoff_factor, grown))
        tracker.mul_((~is_due).to(tracker.dtype))
        refills = is_due if self.refill in ("growth", "deepspeed") else ~bad
        left.copy_(torch.where(refills, torch.full_like(left, self.hysteresis), left))


def choose_scale(max_abs_grad: float | torch.Tensor) -> float:
    """The largest power of two whose product with the largest gradient stays below 65,504.

        choose_scale(1.0) == 32768.0
        choose_scale(2.0**-20) == 2.0**35

    A power of two loses no bit when gradients are divided by it again. It is at most 2**126, for float32's sake.

    Args:
        max_abs_grad: largest magnitude among the unscaled gradients, > 0; a number or a tensor of gradients
            (its largest magnitude is taken).

    Returns:
        The scale, for StaticLossScaler or as the `init_scale` of a LossScaler.

    Raises:
        OptionError: zero, negative or not finite, or a tensor without elements, of bools, or of a kind without max().

    Source: Train with Mixed Precision, NVIDIA, section 2.3.2, "Choosing A Scaling Factor".
    """
    if isinstance(max_abs_grad, torch.Tensor):
        if not max_abs_grad.numel() or max_abs_grad.dtype is torch.bool:
            lacks = "is torch.bool" if max_abs_grad.numel() else "has no element"
            raise OptionError(f"max_abs_grad {lacks}: it is a tensor of shape {tuple(max_abs_grad.shape)}.")
        max_abs_grad = _largest(max_abs_grad)
    max_abs_grad = number_in(max_abs_grad)
    if not is_finite(max_abs_grad) or max_abs_grad <= 0:
        raise OptionError(
            f"max_abs_grad={max_abs_grad!r}: the scale follows from the largest gradient magnitude, which "
            "must be finite and > 0. Measure it in a float32 backward pass."
        )
    # Apart, since the quotient may be more than a float holds. For g in [1/2, 1) * 2**exponent the scale is
    # 2**(16 - exponent), or half of that where the product would reach 65,504.
    fraction, exponent = math.frexp(max_abs_grad)
    fits = math.ldexp(fraction, 16) < LARGEST_HALF
    return math.ldexp(1.0, min(LARGEST_EXPONENT, 16 - exponent if fits else 15 - exponent))


def _largest(gradient: torch.Tensor) -> float:
    try:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        return float(values.abs().max())
    except (RuntimeError, NotImplementedError) as error:
        kind = f"{gradient.dtype} {gradient.layout} tensor on {gradient.device}"
        raise OptionError(
            f"max_abs_grad is a {kind}, whose largest magnitude torch does not tell ({str(error).splitlines()[0]}): "
            "give a dense float32 tensor, or the number."
        ) from error


def checked_scale(name: str, scale: object, rule: ScaleRule) -> float:
    """A scale as a float, refused unless it is finite, positive and within the rule's bounds.

    Raises:
        OptionError: names the argument, its value and what is allowed.
    """
    scale = number_in(scale)
    if _is_device(scale):
        raise OptionError(
            f"{name}={scale!r} is a device, not a scale; torch.amp.GradScaler takes the device first, "
            f"here it is a keyword: LossScaler(device={str(scale)!r})."
        )
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        finds = " A scale that finds itself is fxamp.LossScaler()." if scale == "dynamic" else ""
        raise OptionError(f"{name}={scale!r} must be a number > 0, such as 2.0**16.{finds}")
    if not is_finite(scale) or scale <= 0:
        raise OptionError(f"{name}={scale!r} must be finite and > 0, such as 2.0**16.")
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise OptionError(f"{name}={scale!r} is outside 2**-127 .. 3.4e38, where float32 holds it and its reciprocal.")
    if not rule.min_scale <= scale <= rule.max_scale:
        raise OptionError(
            f"{name}={scale!r} is outside min_scale={rule.min_scale:g} .. max_scale={rule.max_scale:g}. "
            "Pass min_scale= or max_scale= to widen the range."
        )
    return float(scale)


def _is_device(value: object) -> bool:
    if not isinstance(value, str):
        return isinstance(value, torch.device)
    try:
        torch.device(value)
    except RuntimeError:
        return False
    return True


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31  # it is compared with an int32


def _require(holds: bool, name: str, rule: ScaleRule, allowed: str) -> None:
    if not holds:
        raise OptionError(f"{name}={getattr(rule, name)!r} is not allowed: it must be {allowed}.")


ANY_SCALE = ScaleRule(min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE)
"""For a scale that need only be one that float32 holds with its reciprocal."""
