"""Updating 16-bit parameters without float32 masters: Kahan compensation and stochastic rounding."""

import logging
from typing import Any

import torch

from fxamp.runtime.copies import copy_on
from fxamp.runtime.distributed import groups_of, local, several_ranks
from fxamp.runtime.writes import Memory

log = logging.getLogger("fxamp")

MANTISSA_CUT = 16  # bits of a float32 that a bfloat16 lacks


class Compensation:
    """A second 16-bit number per parameter holds what rounding took away.

    parameter + compensation carries 16 to 17 significant bits in bfloat16, at 2 bytes a parameter. The
    wrapped optimizer updates their float32 sum; its rounding is the new parameter, the rest is rounded into
    the compensation. (Kahan summation, applied to weights as in "Revisiting BFloat16 Training", Zamirai et
    al., 2020.)
    """

    def __init__(self) -> None:
        self._lost: dict[torch.Tensor, torch.Tensor] = {}
        self._made: dict[torch.Tensor, tuple[int, Memory]] = {}  # the parameter's count and memory then

    def widened(self, parameter: torch.Tensor) -> torch.Tensor:
        """parameter + compensation, float32, fresh; where someone wrote another number, that number."""
        lost = self._checked(parameter)
        wide = parameter.detach().float()
        return wide if lost is None else wide.add_(lost)

    def take_back(self, low: list[torch.Tensor], wide: list[torch.Tensor], found_inf: torch.Tensor | None) -> None:
        """Split updated sums into parameters and compensations; a skipped step gives back what was there."""
        for parameter, value in zip(low, wide, strict=True):
            rounded = value.to(parameter.dtype)
            lost = _rest(value, rounded)
            if found_inf is not None:  # a sum half way between two numbers might be split the other way
                skipped = copy_on(parameter.device, found_inf) > 0
                rounded = torch.where(skipped, parameter.detach(), rounded)
                before = self._checked(parameter)
                lost = torch.where(skipped, torch.zeros_like(lost) if before is None else before, lost)
            parameter.detach().copy_(rounded)
            self._keep(parameter, lost)

    def state(self, indexed: list[tuple[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
        """{index: compensation} of those that have one."""
        found = ((index, self._checked(parameter)) for index, parameter in indexed)
        return {index: lost for index, lost in found if lost is not None}

    def load(self, parameter: torch.Tensor, lost: torch.Tensor) -> None:
        """Take a saved compensation; the parameter's own value may be loaded later."""
        self._lost[parameter] = lost.to(parameter.device, parameter.dtype, copy=True)
        self._made.pop(parameter, None)

    def split(self, parameter: torch.Tensor, exact: torch.Tensor) -> None:
        """Take what the parameter lacks of a float32 value that it is the rounding of."""
        self._keep(parameter, _rest(exact, parameter.detach()))

    def clear(self) -> None:
        """Forget all compensations."""
        self._lost.clear()
        self._made.clear()

    def __getstate__(self) -> dict[str, Any]:
        found = ((parameter, self._checked(parameter)) for parameter in self._lost)
        return {"_lost": {parameter: lost for parameter, lost in found if lost is not None}, "_made": {}}

    def _keep(self, parameter: torch.Tensor, lost: torch.Tensor) -> None:
        kept = self._lost.setdefault(parameter, lost)
        if kept is not lost:
            kept.copy_(lost)  # in place: a CUDA graph of the step reads it here again
        self._made[parameter] = parameter._version, Memory(local(parameter))

    def _checked(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The compensation, zero where the parameter has become another number since."""
        lost = self._lost.get(parameter)
        if lost is None:
            return None
        version, memory = self._made.get(parameter, (None, None))
        if version == parameter._version and memory is not None and memory.is_of(local(parameter)):
            return lost
        return torch.where(is_compensation(parameter.detach(), lost), lost, torch.zeros_like(lost))


class StochasticRounding:
    """Rounds each updated bfloat16 up or down at random, up with the probability of the cut-off fraction.

    The expected value of the parameter is then the exact one, so that small updates are not lost. A value
    that is representable stays. Random bits come from torch's default generator of the device: replicas on several
    ranks (DDP) stay alike only where these generators do.
    """

    def __init__(self) -> None:
        self._has_warned = False

    def widened(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter in float32, fresh."""
        return parameter.detach().float()

    def take_back(self, low: list[torch.Tensor], wide: list[torch.Tensor], found_inf: torch.Tensor | None) -> None:
        """Round updated values into parameters."""
        if not self._has_warned and several_ranks() and not groups_of(low):
            self._has_warned = True
            log.warning(
                "masters='stochastic' rounds with this rank's random numbers: replicas drift apart unless all ranks "
                "draw the same ones (one torch.manual_seed, no other draws between). masters='kahan' draws none."
            )
        for parameter, value in zip(low, wide, strict=True):
            local(parameter.detach()).copy_(stochastic_round(local(value), parameter.dtype))

    def state(self, indexed: list[tuple[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
        """Nothing is kept between steps."""
        return {}

    def load(self, parameter: torch.Tensor, lost: torch.Tensor) -> None:
        """A compensation (from mode "kahan") is not needed."""

    def split(self, parameter: torch.Tensor, exact: torch.Tensor) -> None:
        """A float32 master (from mode "fp32") is not needed: the parameter is its rounding."""


def _rest(exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """What rounding took away; nothing of a number that became infinite, which would be -inf or NaN."""
    return torch.where(rounded.isfinite(), exact - rounded, 0.0).to(rounded.dtype)


def is_compensation(parameter: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    """Where `lost` can be what rounding took from `parameter`, which it is if their sum rounds to the parameter.

    It may be half way to the neighbour, and is therefore looked at a little smaller.
    """
    total = parameter.float() + lost.float() * (1 - 2.0**-8)
    return total.to(parameter.dtype) == parameter


def stochastic_round(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 `values` to one of their two neighbours in `dtype`, unbiased; inf and NaN stay.

    bfloat16 is the upper half of a float32, so 16 random bits added below the cut carry into it with the
    right probability. For float16 the two neighbours and their distance are computed.
    """
    if dtype is torch.bfloat16:
        noise = torch.randint(0, 1 << MANTISSA_CUT, values.shape, dtype=torch.int32, device=values.device)
        bits = (values.view(torch.int32) + noise) & (-1 << MANTISSA_CUT)
        rounded = bits.view(torch.float32)
        largest = torch.finfo(torch.bfloat16).max
        rounded = torch.where(torch.isfinite(rounded), rounded, values.clamp(-largest, largest))
        return torch.where(torch.isfinite(values), rounded, values).to(dtype)
    nearest = values.to(dtype)
    towards = torch.where(values > nearest, torch.inf, -torch.inf).to(dtype)
    other = torch.nextafter(nearest, towards)
    gap = (other.float() - nearest.float()).abs()
    probability = ((values - nearest.float()).abs() / gap).nan_to_num(0.0)
    return torch.where(torch.rand_like(values) < probability, other, nearest)
