"""What the other levels would make of a model's nodes, by trying them."""

import contextlib
import functools

from torch import nn

from fxamp.errors import FxampError
from fxamp.review.report import Report, build_report, require_engine
from fxamp.review.rows import Row
from fxamp.review.trials import Trials

_WIDENING = ("strict", "balanced", "aggressive")
"""Each level, with those that spread low precision further behind it."""


class Levels:
    """A converted model's graphs at the levels that spread low precision further; each is made when it is asked for.

    Which nodes a level lets run low depends on their neighbours too: in bfloat16 residual streams stay float32.
    """

    def __init__(self, converted: nn.Module, built: Report) -> None:
        self.converted = converted
        self.options = built._options

    def mildest_low(self, row: Row) -> str | None:
        """The first level beyond today's at which a node runs low, None where there is none."""
        beyond = _WIDENING[_WIDENING.index(self.options.level) + 1 :]
        here = row.graph, row.name, row.op
        return next((level for level in beyond if here in self._low_at(level)), None)

    @functools.cached_property
    def _trials(self) -> Trials:
        return Trials(self.converted, require_engine(self.converted))

    @functools.cache  # noqa: B019 -- it lives as long as one explanation
    def _low_at(self, level: str) -> frozenset[tuple[int, str, str]]:
        """(graph, name, op) of what runs low; empty where the model cannot be converted so."""
        with contextlib.suppress(FxampError):
            variants = self._trials.variants(level=level)
            rows = build_report(variants, self.options, self.converted).rows
            return frozenset((row.graph, row.name, row.op) for row in rows if row.precision == "low")
        return frozenset()
