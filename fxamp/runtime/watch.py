"""What the host learns about the loss scale, some steps late: counters, history, one INFO line, warnings."""

import collections
import dataclasses
import logging
import math

from fxamp.errors import ScaleCollapseError
from fxamp.runtime import gradients
from fxamp.runtime.step_result import HostCopy

log = logging.getLogger("fxamp")

SETTLED_AFTER = 100  # good steps in a row before the first calibration counts as finished
RATE_WINDOW = 200  # steps over which the skip rate is judged
HIGH_SKIP_RATE = 0.05  # the guide's N = 2000 gives 0.0005
HISTORY = 100_000  # steps kept
# Outcomes left on their way from a GPU: the host reads a step when two more have been launched. It then
# hardly ever waits, and, unlike with reading whatever has arrived, all ranks learn of a collapse in one step.
LAG = 2


@dataclasses.dataclass(frozen=True)
class ScaleRecord:
    """One `update()`: its number from 1, the scale used, and whether any step in it was skipped."""

    step: int
    scale: float
    skipped: bool


class ScaleWatch:
    """Counts steps as their outcomes reach the host.

    Args:
        floor: scale at or below which a skipped step counts towards the collapse.
        settled_after: good steps in a row after which the INFO line appears.
    """

    def __init__(self, floor: float, settled_after: int = SETTLED_AFTER) -> None:
        self.floor = floor
        self.settled_after = settled_after
        self.steps = 0
        self.skipped_steps = 0
        self.skips_at_floor = 0  # in a row
        self.good_steps = 0  # in a row
        self.history: collections.deque[ScaleRecord] = collections.deque(maxlen=HISTORY)
        self._recent: collections.deque[bool] = collections.deque(maxlen=RATE_WINDOW)
        self._has_settled = False
        self._has_warned = False
        self._under_way: collections.deque[list[HostCopy]] = collections.deque()
        self.note_scale(math.inf)

    def note_scale(self, scale: float) -> None:
        """The scale was set to at least this; outcomes still under way tell of earlier ones."""
        self._known_scale = scale
        self._updates_since = 0
        self._earlier = len(self._under_way)

    def least_scale(self, backoff_factor: float) -> float:
        """What the scale is at least, as far as the host knows: each update since may have backed off."""
        return self._known_scale * backoff_factor**self._updates_since

    def observe(self, outcomes: list[HostCopy]) -> None:
        """Take the outcomes (found_inf, scale, ...) of one iteration's steps; read older ones."""
        self._under_way.append(outcomes)
        self._updates_since += 1
        self._read(keep=LAG if any(copy.is_remote for copy in outcomes) else 0)

    def drain(self) -> None:
        """Read all outcomes, waiting for those under way."""
        self._read(keep=0)

    def _read(self, *, keep: int) -> None:
        while len(self._under_way) > keep:
            values = [copy.values for copy in self._under_way.popleft()]
            if self._earlier:
                self._earlier -= 1
            else:
                self._known_scale, self._updates_since = values[0][1], len(self._under_way) + 1
            self._record(skipped=any(found > 0 for found, *_ in values), scale=values[0][1])

    def _record(self, *, skipped: bool, scale: float) -> None:
        self.steps += 1
        self.skipped_steps += skipped
        self.good_steps = 0 if skipped else self.good_steps + 1
        self.skips_at_floor = self.skips_at_floor + 1 if skipped and scale <= self.floor else 0
        self.history.append(ScaleRecord(self.steps, scale, skipped))
        self._recent.append(skipped)
        self._report(scale)

    def _report(self, scale: float) -> None:
        if not self._has_settled and self.good_steps == self.settled_after:
            self._has_settled = True
            self._recent.clear()
            log.info(
                "loss scale settled at %g after %d skipped steps (normal while it calibrates)",
                scale,
                self.skipped_steps,
            )
        rate = sum(self._recent) / RATE_WINDOW
        if not self._has_warned and len(self._recent) == RATE_WINDOW and rate > HIGH_SKIP_RATE:
            self._has_warned = True
            log.warning(
                "%.0f %% of the last %d steps were skipped for non-finite gradients (usual: below "
                "0.1 %%); the loss scale is %g. StepResult.nonfinite names the parameters; clip gradients, "
                "or use bfloat16.",
                100 * rate,
                RATE_WINDOW,
                scale,
            )

    def counters(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "skips_at_floor": self.skips_at_floor,
            "good_steps": self.good_steps,
        }

    def restore(self, counters: dict[str, int]) -> None:
        """Set the counters; a missing one, as in torch's states, is 0."""
        self._under_way.clear()
        self._earlier = 0
        for name in self.counters():
            setattr(self, name, int(counters.get(name, 0)))
        self._has_settled = self.good_steps >= self.settled_after

    def collapse(self, culprits: list[str]) -> ScaleCollapseError:
        """The error for a scale that stays at its floor; counting begins anew."""
        skips, self.skips_at_floor = self.skips_at_floor, 0
        return ScaleCollapseError(
            f"The loss scale sat at its floor of {self.floor:g} for {skips} skipped steps in a row: "
            "not the scale, but the loss or the model makes gradients non-finite. Parameters with non-finite "
            f"gradients: {gradients.listed(culprits)}. No parameter was changed by them. Check the data "
            "and the loss for inf or NaN (fxamp.find_nan), keep the operation in question in float32, or "
            "lower the learning rate; max_skips= and min_scale= set this limit."
        )
