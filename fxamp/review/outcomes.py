"""What other options would make of a model's nodes, by trying them."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fxamp import ir
from fxamp.dtypes import is_inexact
from fxamp.errors import FxampError, OptionError
from fxamp.passes.alias import find_aliases
from fxamp.passes.losses import MOVES
from fxamp.passes.policy import LEVELS
from fxamp.review.report import Report, build_report, require_engine
from fxamp.review.rows import Row
from fxamp.review.trials import Trials
from fxamp.value_types import tensors_in

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
        self.graphs = self.engine.graphs()
        self._known: dict[Any, _Rows] = {}
        self._written: dict[int, frozenset[str]] = {}

    def mildest_low(self, row: Row) -> str | None:
        """The first level beyond today's at which a node runs low, None where there is none."""
        for level in LEVELS[LEVELS.index(self.options.level) + 1 :]:
            after = self._rows(level, self._trials, level=level).get((row.graph, row.name))
            if after is not None and after.precision == "low" and after.op == row.op:
                return level
        return None

    def row_under(self, row: Row, overrides: Mapping[str, str], environment: Mapping[str, str]) -> Row | None:
        """The node with these overrides, by names of nodes, and list variables added; None where that cannot be told.

        Such overrides reach every block that is converted by itself and has no module of that name.
        """
        with contextlib.suppress(OptionError):  # at O2, where the model cannot be copied
            trials, graph = self._trials_of(row)
            own = dict(overrides if trials is self._trials else self._reaching(trials, overrides))
            changed = {**trials.engine.options.overrides, **own}
            lists = self.options.lists.with_environment(environment)
            key = (id(trials), *own.items(), *environment.items())
            return self._rows(key, trials, overrides=changed, lists=lists).get((graph, row.name), row)
        return None

    def may_not_follow(self, row: Row) -> bool:
        """Whether an override of the node itself may leave it as it is; by the rules all others hold.

        1. All that share memory into which something writes have one precision.
        2. What only moves numbers on from a result that the caller gets in float32 moves that.
        3. What reads no floating tensor has torch's default dtype.
        """
        graph = self.graphs[row.graph].graph
        node = next(node for node in graph.nodes if node.name == row.name)
        kinds = [found.dtype for given in node.all_input_nodes for found in tensors_in(ir.mark(given).type)]
        reads_floats = any(dtype is None or is_inexact(dtype) for dtype in kinds)
        if row.op in MOVES or not reads_floats:
            return True
        if row.graph not in self._written:
            storages = find_aliases(graph).storages
            self._written[row.graph] = frozenset(node.name for storage in storages for node in storage.nodes)
        return row.name in self._written[row.graph]

    @property
    def goes_with_o2(self) -> bool:
        """Whether such a model can be converted with opt_level="O2": not by Dynamo, nor with blocks of its own."""
        is_dynamos = self.options.capture == "dynamo" or any(
            each.again is not None for each in self.engine.all_variants()
        )
        return not (is_dynamos or self.engine.blocks)

    @functools.cached_property
    def _trials(self) -> Trials:
        return Trials(self.converted, self.engine)

    def _trials_of(self, row: Row) -> tuple[Trials, int]:
        """Of the model or of the block that a graph is of, and the graph's number there."""
        graph = row.graph
        for trials in _with_blocks(self._trials):
            count = len(trials.engine.all_variants())
            if graph < count:
                return trials, graph
            graph -= count
        raise LookupError(f"there is no graph {row.graph}")

    def _reaching(self, block: Trials, overrides: Mapping[str, str]) -> Mapping[str, str]:
        """Those that convert() hands on to a block: where a module has a node's name, the module is meant."""
        modules = {path for root in (self.converted, block.converted) for path, _ in root.named_modules()}
        return {name: colour for name, colour in overrides.items() if name not in modules}

    def _rows(self, key: Any, trials: Trials, **changes: Any) -> _Rows:
        """The rows under changed options by graph and name; none where the model cannot be converted so."""
        if key not in self._known:
            self._known[key] = {}
            with contextlib.suppress(FxampError):
                found = build_report(trials.variants(**changes), self.options, trials.converted).rows
                self._known[key] = {(row.graph, row.name): row for row in found}
        return self._known[key]


def _with_blocks(trials: Trials) -> Iterator[Trials]:
    """In the order in which `trials.variants()` gives their graphs."""
    yield trials
    for block in trials.blocks.values():
        yield from _with_blocks(block)
