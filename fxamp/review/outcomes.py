"""What other options would make of a model's nodes, by trying them."""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

from fxamp.errors import FxampError, OptionError
from fxamp.passes.alias import find_aliases
from fxamp.review.report import Report, build_report, require_engine
from fxamp.review.rows import Row
from fxamp.review.trials import Trials

_WIDENING = ("strict", "balanced", "aggressive")
"""Each level, with those that spread low precision further behind it."""
_Rows = Mapping[tuple[int, str], Row]


class Outcomes:
    """A converted model's graphs under other options; each is made when it is asked for, and once.

    What a level or an override lets run low depends on the neighbours too: in bfloat16 residual streams stay float32,
    and what reads two deny ops is in float32 for as long as one of them is.
    """

    def __init__(self, converted: nn.Module, built: Report) -> None:
        self.converted = converted
        self.options = built._options
        self.engine = require_engine(converted)
        self.variants = self.engine.all_variants()
        self._known: dict[Any, _Rows] = {}
        self._written: dict[int, frozenset[str]] = {}

    def mildest_low(self, row: Row) -> str | None:
        """The first level beyond today's at which a node runs low, None where there is none."""
        for level in _WIDENING[_WIDENING.index(self.options.level) + 1 :]:
            after = self._rows(level, level=level).get((row.graph, row.name))
            if after is not None and after.precision == "low" and after.op == row.op:
                return level
        return None

    def row_under(self, row: Row, overrides: Mapping[str, str], environment: Mapping[str, str]) -> Row | None:
        """The node with these overrides and list variables added; None where that cannot be told.

        Of a block that is converted by itself it cannot: its overrides are its own.
        """
        if row.graph >= len(self.variants):
            return None
        key = (*overrides.items(), *environment.items())
        changed = {**self.options.overrides, **overrides}
        with contextlib.suppress(OptionError):  # at O2, where the model cannot be copied
            _ = self._trials
            lists = self.options.lists.with_environment(environment)
            return self._rows(key, overrides=changed, lists=lists).get((row.graph, row.name), row)
        return None

    def shares_written_memory(self, row: Row) -> bool:
        """Whether something writes in place into what the node gives, and then all that share it have one precision."""
        if row.graph >= len(self.variants):
            return False
        if row.graph not in self._written:
            storages = find_aliases(self.variants[row.graph].graph).storages
            self._written[row.graph] = frozenset(node.name for storage in storages for node in storage.nodes)
        return row.name in self._written[row.graph]

    @property
    def goes_with_o2(self) -> bool:
        """Whether such a model can be converted with opt_level="O2": not by Dynamo, nor with blocks of its own."""
        is_dynamos = self.options.capture == "dynamo" or any(each.again is not None for each in self.variants)
        return not (is_dynamos or self.engine.blocks)

    @functools.cached_property
    def _trials(self) -> Trials:
        return Trials(self.converted, self.engine)

    def _rows(self, key: Any, **changes: Any) -> _Rows:
        """The rows under changed options by graph and name; none where the model cannot be converted so."""
        if key not in self._known:
            self._known[key] = {}
            with contextlib.suppress(FxampError):
                found = build_report(self._trials.variants(**changes), self.options, self.converted).rows
                self._known[key] = {(row.graph, row.name): row for row in found}
        return self._known[key]
