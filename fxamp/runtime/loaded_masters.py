"""What an optimizer's state dict brings for 16-bit parameters under "masters".

A float32 tensor is a master, a 16-bit one a compensation (see `rounding`). Either refines the weights that the model
has, and never replaces them: weights are the model's to load, and may be others than those of the optimizer's state
(an average, a model tuned elsewhere), as with a plain optimizer. The model may be loaded before its optimizer or
after; so what does not fit the weights yet waits for the first step.
"""

from collections.abc import Mapping

import torch

from fxamp.dtypes import LOW_DTYPES, dtype_name
from fxamp.errors import OptionError
from fxamp.runtime.distributed import local
from fxamp.runtime.masters import LOGICAL, attach_master, is_low, master_of, remember_version
from fxamp.runtime.rounding import Compensation, StochasticRounding, is_compensation


def check_masters(parameters: list[torch.Tensor], saved: Mapping[int, torch.Tensor]) -> None:
    """Refuse what cannot be masters of these parameters.

    Raises:
        OptionError: names the parameter, by its place in the optimizer.
    """
    if not isinstance(saved, Mapping):
        raise OptionError(f"'masters' of the state is a {type(saved).__name__}, not a dict of index to tensor.")
    for index, value in saved.items():
        if not isinstance(index, int) or isinstance(index, bool):
            raise OptionError(f"the state has a master of {index!r}, which is no index of a parameter.")
        if not isinstance(value, torch.Tensor):
            raise OptionError(f"the master of parameter {index} is a {type(value).__name__}, not a tensor.")
        if not 0 <= index < len(parameters):
            raise OptionError(f"the state has a master of parameter {index}; the optimizer has {len(parameters)}.")
        if value.shape != parameters[index].shape:
            raise OptionError(
                f"the master of parameter {index} has shape {tuple(value.shape)}, the parameter "
                f"{tuple(parameters[index].shape)}: the state is another model's."
            )
        if value.dtype not in (torch.float32, *LOW_DTYPES):
            raise OptionError(
                f"the master of parameter {index} is {dtype_name(value.dtype)}: masters='fp32' saves float32, "
                "masters='kahan' 16-bit compensations, masters='stochastic' none."
            )


class LoadedMasters:
    """Saved masters and compensations, each until it was taken or the optimizer steps."""

    def __init__(self) -> None:
        self._waiting: dict[torch.Tensor, torch.Tensor] = {}

    def load(
        self,
        parameters: list[torch.Tensor],
        saved: Mapping[int, torch.Tensor],
        rounding: Compensation | StochasticRounding | None,
    ) -> None:
        """Begin anew with what a state dict brings."""
        if isinstance(rounding, Compensation):
            rounding.clear()
        self._waiting = {parameters[index]: value for index, value in saved.items()}
        self.settle(rounding)
        self._waiting = {parameter: value.detach().clone() for parameter, value in self._waiting.items()}

    def settle(self, rounding: Compensation | StochasticRounding | None, *, is_last: bool = False) -> None:
        """Take what fits the parameters as they are now; with `is_last` forget the rest."""
        for parameter, saved in list(self._waiting.items()):
            with torch.no_grad():
                is_done = _refine(parameter, saved.to(parameter.device), rounding)
            if is_done or is_last:
                del self._waiting[parameter]


def _refine(parameter: torch.Tensor, saved: torch.Tensor, rounding: Compensation | StochasticRounding | None) -> bool:
    """Take a saved value if it fits; whether it need not wait for other weights."""
    if rounding is not None and is_low(parameter) and saved.dtype != torch.float32:
        rounding.load(parameter, saved)
        return True
    exact = _exact(parameter, saved)
    if exact is None:
        return False
    if not is_low(parameter):
        parameter.copy_(exact)
    elif rounding is not None:
        rounding.split(parameter, exact)
    else:
        master = master_of(parameter)
        if master is None:  # trained until it was frozen
            attach_master(parameter, exact.clone())
        elif not (hasattr(parameter, LOGICAL) and _has_low_bits(parameter, master)):
            master.copy_(exact)
            remember_version(parameter)
    return saved.dtype == torch.float32  # a compensation may fit wrong weights too


def _exact(parameter: torch.Tensor, saved: torch.Tensor) -> torch.Tensor | None:
    """The float32 numbers that parameter and saved value make together, or None if they are not of one another."""
    if saved.dtype != torch.float32:
        low = parameter.detach().to(saved.dtype)
        fits = _all(low.to(parameter.dtype) == parameter) and _all(is_compensation(low, saved))
        return low.float() + saved if fits else None
    lows = (parameter.dtype,) if is_low(parameter) else LOW_DTYPES
    return saved if any(_all(saved.to(low).to(parameter.dtype) == parameter) for low in lows) else None


def _has_low_bits(parameter: torch.Tensor, master: torch.Tensor) -> bool:
    return not _all(master == parameter.float())


def _all(flags: torch.Tensor) -> bool:
    return bool(local(flags).all())
