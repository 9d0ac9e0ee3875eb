"""Calls that symbolic capture could not follow: tried once, and once more where the Python state that was read by then
has changed (`model.debug = False`).
"""

import collections
import dataclasses
import weakref
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from fxamp.capture.state import Cell
from fxamp.capture.state_check import StateCheck
from fxamp.errors import CaptureError, FxampError

_STATE, _OPEN, _OPENINGS, _HIDDEN = "read_before", "has_open_sizes", "openings", "has_hidden_trace"
_WRITTEN = "is_for_python"


def with_state(error: FxampError, tracer: Any) -> FxampError:
    """The error, which now tells what the trace had read and said when it was raised, and of sizes that the data
    decides."""
    setattr(error, _STATE, tracer.state_so_far())
    setattr(error, _OPEN, tracer.values.has_open)
    setattr(error, _OPENINGS, tracer.openings)
    setattr(error, _HIDDEN, tracer.questions.of_data.is_for_recorded is False)
    return error


def for_python(error: CaptureError) -> CaptureError:
    """The error of a forward that does what Dynamo does not do as Python does it."""
    setattr(error, _WRITTEN, True)
    return error


def is_for_python(error: FxampError) -> bool:
    """Whether a forward that was refused so is to run as it is written."""
    return bool(getattr(error, _WRITTEN, False))


def has_hidden_trace(error: FxampError) -> bool:
    """Whether forward, in the trace that ended so, asked whether it was traced, and was told that it was not."""
    return bool(getattr(error, _HIDDEN, False))


def has_open_sizes(error: FxampError) -> bool:
    """Whether the trace that ended so had met sizes that the data decides."""
    return bool(getattr(error, _OPEN, False))


def opened_in(error: FxampError) -> tuple[FunctionType, ...]:
    """The functions of the model that had made the first of these, of inputs alone."""
    openings = getattr(error, _OPENINGS, None)
    return () if openings is None else openings.functions()


@dataclasses.dataclass
class Refusal:
    """Why one kind of call could not be followed. (The error itself would keep alive the call it was raised in.)

    Attributes:
        cells: what the trace had read by then, but numbers, which may change from call to call and seldom decide.
        trials: how often it was tried.
        checks: whether they hold what they held, for each copy of the model.
    """

    text: str
    cells: tuple[Cell, ...]
    trials: int
    checks: "weakref.WeakKeyDictionary[nn.Module, StateCheck]" = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )

    def holds(self, module: nn.Module) -> bool:
        """Whether there is no reason to try again."""
        check = self.checks.get(module)
        if check is None:
            check = self.checks[module] = StateCheck(module, self.cells)
        return check.holds()


class Refusals:
    """The refusals of one model and its copies.

    Args:
        kin: those that parts of one kind have met, as the layers of a stack, each with a number of its own: what two of
            them could not be captured for, the others are not tried for while they have the flags and strings that
            decided it.
    """

    # State that differs at every call must not have every call traced; nor must arguments, such as texts.
    most_trials = 5
    most_kinds = 16
    enough_kin = 2

    def __init__(self, kin: "Refusals | None" = None) -> None:
        self._known: dict[Any, Refusal] = {}
        self._kin = kin

    def reason(self, key: Any, module: nn.Module) -> str | None:
        """Why a call of this kind is not worth a trace now, None for one that is.

        Args:
            key: of the call, see `call_key`.
        """
        here = _circumstances(module)
        refusal = self._known.get((key, *here)) or self._refusal_of_many(here)
        if refusal is None and self._kin is not None:
            refusal = self._kin._known.get((key, *here))
            is_enough = refusal is not None and refusal.trials >= self.enough_kin and refusal.holds(module)
            return refusal.text if refusal is not None and is_enough else None
        if refusal is None or (refusal.trials < self.most_trials and not refusal.holds(module)):
            return None
        return refusal.text

    def _refusal_of_many(self, here: tuple[Any, ...]) -> Refusal | None:
        """The last one whose reason was met by calls of many kinds, so that one of another kind will meet it too."""
        found = [refusal for (_, *there), refusal in self._known.items() if (*there,) == here]
        counts = collections.Counter(refusal.text for refusal in found)
        return next((each for each in reversed(found) if counts[each.text] >= self.most_kinds), None)

    def add(self, key: Any, module: nn.Module, error: CaptureError) -> None:
        """Remember that a call of this kind could not be followed."""
        place = (key, *_circumstances(module))
        cells = tuple(cell for cell in getattr(error, _STATE, ()) if not cell.is_number)
        if self._kin is not None and place not in self._known:
            self._kin._note(place, str(error), tuple(cell for cell in cells if cell.is_plain))
        self._note(place, str(error), cells)

    def _note(self, place: Any, text: str, cells: tuple[Cell, ...]) -> None:
        known = self._known.get(place)
        self._known[place] = Refusal(text, cells, 1 if known is None else known.trials + 1)

    def forget(self, module: nn.Module) -> None:
        """Look at the state from the start: the model's parts are other objects than they were."""
        for refusal in self._known.values():
            refusal.checks.pop(module, None)
        if self._kin is not None:
            self._kin.forget(module)


def _circumstances(module: nn.Module) -> tuple[Any, ...]:
    """What may be in the way of a capture now, and not at the next call of the same kind."""
    level = torch._C._functorch.maybe_current_level()
    return level, torch.is_grad_enabled(), module.training, parametrize._cache_enabled > 0
