"""Forwards that run as they are written, looked at: what they call as graphs, apart from the graphs that train."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from fxamp.model.autocasting import running
from fxamp.model.engine import Engine
from fxamp.model.variant import Variant
from fxamp.model.view_class import part_of
from fxamp.model.views import base_of
from fxamp.model.written import Written


@dataclasses.dataclass(frozen=True)
class Turn:
    """One call of a module that a forward as written calls as a graph.

    Attributes:
        number: the same for the n-th call of a path in each run.
        graph: number of the graph in `fxamp.report(model)`; -1 where that has none for the path.
    """

    number: int
    graph: int
    path: str
    module: nn.Module


RunTurn = Callable[[Turn, Variant, Any], Any]
"""(turn, its graph, inputs) -> what the graph gives."""


class Turns:
    """The numbers of one call's turns, however often the call is run, and by which graphs.

    Args:
        engine: of the model, whose graphs the report numbers.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.known: dict[tuple[str, int], Turn] = {}

    def of(self, path: str, count: int, variant: Variant, module: nn.Module) -> Turn:
        """The turn of a path's call, which in its first run has told of which graph it is."""
        if (path, count) not in self.known:
            turn = Turn(len(self.known), self._graph_of(path, variant), path, module)
            self.known[path, count] = turn
        return dataclasses.replace(self.known[path, count], module=module)

    def _graph_of(self, path: str, variant: Variant) -> int:
        graphs = list(enumerate(self.engine.graphs()))
        here = [number for number, known in graphs if path in known.blocks]
        same = [number for number, known in graphs if number in here and known.before == variant.before]
        return next(iter((*same, *here)), -1)


class Look:
    """A model's forward as it is written, with graphs of its own, so that looking adds none to those that train.

    Linear layers and convolutions that autocast would run are graphs here, too, which run them alike (a norm's do not).

    Args:
        engine: of the model.
        options: under which the graphs are made.
    """

    def __init__(self, engine: Engine, options: Any) -> None:
        self.build = engine.workshop.build
        rewrite = engine.way.rewrite
        assert rewrite is not None, "forward runs as it is written, with graphs inside"
        self.way = _WithProducts(options, rewrite)
        self.way.engine = Engine(options, dataclasses.replace(engine.workshop, build=self._built), self.way)
        self.run_turn: Callable[[str, nn.Module, Variant, Any], Any] | None = None

    def _built(self, *given: Any, **more: Any) -> Variant:
        variant = self.build(*given, **more)
        compiled = variant.compiled

        def run(module: nn.Module, *inputs: Any) -> Any:
            if self.run_turn is None:
                return compiled.run(module, *inputs)
            part = part_of(running.view)
            return self.run_turn("" if part is None else part.path, module, variant, inputs)

        variant.compiled = dataclasses.replace(compiled, run=run)
        return variant

    def __call__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        turns: Turns,
        run_turn: RunTurn,
        again: RunTurn,
    ) -> Any:
        """What forward gives.

        Args:
            model: whose weights are read: the converted model, or the one that it was made of.
            run_turn: runs each graph in its turn.
            again: runs those that a backward runs again, for checkpoints.
        """
        counts: Counter[str] = Counter()

        def counted(path: str, module: nn.Module, variant: Variant, inputs: Any) -> Any:
            counts[path] += 1
            return run_turn(turns.of(path, counts[path], variant, module), variant, inputs)

        def repeated(path: str, module: nn.Module, variant: Variant, inputs: Any) -> Any:
            return again(Turn(-1, -1, path, module), variant, inputs)

        base = base_of(model)
        self.run_turn = counted
        try:
            return self.way(base, model, args, kwargs)
        finally:
            self.run_turn = repeated

    def forget(self) -> None:
        """The call is over, with its backward."""
        self.run_turn = None


class _WithProducts(Written):
    takes_products = True
