"""What one `initialize` set up: read as apex.amp's `_amp_state`, saved and loaded in apex's format."""

import collections
import dataclasses
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from fxamp.errors import CheckpointError, OptionError
from fxamp.runtime.apex_options import LEVELS, Properties
from fxamp.runtime.fixed_scalers import StaticLossScaler
from fxamp.runtime.scale_rule import ANY_SCALE, checked_scale
from fxamp.runtime.scaler import LossScaler

log = logging.getLogger("fxamp")

State = dict[str, dict[str, float]]


class Session:
    """What one `initialize` set up; `properties` is None where it was disabled."""

    def __init__(
        self, chosen: Properties | None, scalers: list[LossScaler], models: list[torch.nn.Module] | None = None
    ) -> None:
        self.properties = chosen
        self.scalers = scalers
        self._models = [weakref.ref(model) for model in models or ()]

    def models(self) -> list[torch.nn.Module]:
        """The converted models that still exist."""
        return [model for held in self._models if (model := held()) is not None]


def saved(scalers: list[LossScaler]) -> State:
    """The scalers' states in apex's format."""
    return collections.OrderedDict(
        (
            f"loss_scaler{number}",
            {"loss_scale": scaler.get_scale(), "unskipped": scaler._get_growth_tracker()},
        )
        for number, scaler in enumerate(scalers)
    )


def load(scalers: list[LossScaler], state: State) -> None:
    """Give the scalers a state in apex's format; see `fxamp.runtime.apex.load_state_dict`."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"the state is a {type(state).__name__}, not what state_dict() of this module gives.")
    unexpected = [key for key in state if not str(key).startswith("loss_scaler")]
    if unexpected:
        raise CheckpointError(f"Unexpected keys {unexpected}; apex's state has loss_scaler0, loss_scaler1, ...")
    if len(state) != len(scalers):
        log.warning("the state has %d loss scalers, initialize() made %d", len(state), len(scalers))
    numbers = {key: _numbers_of(key, given) for key, given in state.items()}
    for number, scaler in enumerate(scalers):
        if f"loss_scaler{number}" in numbers:
            _give(scaler, *numbers[f"loss_scaler{number}"])


def _numbers_of(key: str, given: Any) -> tuple[float, int]:
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{key} is {given!r}, not a dict of a loss_scale and an unskipped.")
    try:
        scale, unskipped = float(given["loss_scale"]), int(given["unskipped"])
        return checked_scale("loss_scale", scale, ANY_SCALE), unskipped
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{key} is {given!r}, not a loss_scale and an unskipped: {error}") from error


def _give(scaler: LossScaler, scale: float, unskipped: int) -> None:
    if scaler.is_enabled():
        now = {**scaler.state_dict(), "scale": scale, "_growth_tracker": unskipped}
        if isinstance(scaler, StaticLossScaler):
            now.update(min_scale=scale, max_scale=scale)
        LossScaler.load_state_dict(scaler, now)


class ScalerOfApex:
    """A loss scaler under the names that apex's has: `loss_scale()`, `_loss_scale`, `_unskipped`, `dynamic`."""

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler

    @property
    def dynamic(self) -> bool:
        """Whether the scale follows the overflows."""
        return self._scaler.is_enabled() and not isinstance(self._scaler, StaticLossScaler)

    def loss_scale(self) -> float:
        """The scale."""
        return self._scaler.get_scale()

    @property
    def _loss_scale(self) -> float:
        return self._scaler.get_scale()

    @_loss_scale.setter
    def _loss_scale(self, scale: float) -> None:
        _give(self._scaler, *_numbers_of("_loss_scale", {"loss_scale": scale, "unskipped": self._unskipped}))

    @property
    def _unskipped(self) -> int:
        return self._scaler._get_growth_tracker()

    @_unskipped.setter
    def _unskipped(self, steps: int) -> None:
        _give(self._scaler, *_numbers_of("_unskipped", {"loss_scale": self._loss_scale, "unskipped": steps}))


_FLAGS = ("hard_override", "allow_incoming_model_not_fp32")


@dataclasses.dataclass
class AmpState:
    """apex.amp's `_amp_state`, as far as scripts read it.

    After initialize it has `opt_properties` and `loss_scalers`; before, it has not, as in apex.

    Attributes:
        hard_override, allow_incoming_model_not_fp32: always False; what they would silence has other remedies here.
        session: of the last initialize.
    """

    hard_override: bool = False
    allow_incoming_model_not_fp32: bool = False
    verbosity: int = 1
    session: Session | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FLAGS and value:
            raise OptionError(
                f"_amp_state.{name} cannot be switched on here: give initialize() float32 models and options that "
                "agree with their opt_level."
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if (session := self.__dict__.get("session")) is not None:
            if name == "opt_properties":
                return session.properties or dataclasses.replace(LEVELS["O0"], enabled=False)
            if name == "loss_scalers":
                return [ScalerOfApex(scaler) for scaler in session.scalers]
        raise AttributeError(
            f"_amp_state has no {name!r}; it has hard_override, verbosity and, after initialize(), opt_properties "
            "and loss_scalers."
        )
