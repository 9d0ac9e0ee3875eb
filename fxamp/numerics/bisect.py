"""The smallest set of deny entries with which a model meets a tolerance, found by bisection."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from fxamp import ir
from fxamp.errors import OptionError
from fxamp.lists import TRAITS
from fxamp.model.engine import engine_of
from fxamp.model.unconverted import check_left
from fxamp.numerics.blocks import boundary_of, is_layer
from fxamp.numerics.compare import Loss, NodeError, check_pair, compare, finite, flags_of
from fxamp.numerics.distance import error_of, error_of_all
from fxamp.numerics.modes import plain_modes
from fxamp.numerics.progress import Progress
from fxamp.numerics.recording import record
from fxamp.numerics.run import Call, Rewriter, call_of, in_float32
from fxamp.numerics.subset import SubsetSearch

MAX_RUNS = 64


@dataclasses.dataclass(frozen=True)
class DenySet:
    """What a search found.

    Attributes:
        nodes: names to deny; of a block that is converted by itself the path, as of a layer of a forward that runs as
            it is written.
        error: largest relative error of an output (and of the loss) with them denied.
        tolerance: what was asked for; `is_met` says whether it is kept.
        runs: how many graphs were run.
        is_minimal: whether taking any single node out would break the tolerance; False where the runs ran out.
        is_smallest: whether no set of fewer nodes keeps the tolerance, provided that a further node in float32 makes no
            set worse; False where the runs ran out, or have shown one to be more than twice as far off for it.
        given: the overrides that the model has already.
    """

    nodes: tuple[str, ...]
    error: float
    tolerance: float
    runs: int
    is_minimal: bool
    is_smallest: bool = False
    given: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_met(self) -> bool:
        return self.error <= self.tolerance

    @property
    def overrides(self) -> dict[str, str]:
        """The set as `overrides=` of convert(), behind those that the model has already."""
        return {**self.given, **dict.fromkeys(self.nodes, "deny")}

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return finite({**dataclasses.asdict(self), "is_met": self.is_met, "overrides": self.overrides})  # type: ignore[no-any-return]

    def __str__(self) -> str:
        if not self.is_met and not self.nodes:
            return f"there is nothing to deny, and the error is {self.error:.2e}, above {self.tolerance:.2e}"
        if not self.is_met:
            return f"even with every node in float32 the error is {self.error:.2e}, above {self.tolerance:.2e}"
        if not self.nodes:
            return f"an error of {self.error:.2e} <= {self.tolerance:.2e} as it is: nothing needs to be denied"
        less = "and fewer nodes are not enough (if none in float32 does harm)"
        if not self.is_minimal:
            less = f"maybe without some of them too ({self.runs} runs were too few to tell)"
        elif not self.is_smallest:
            less = f"larger without any one of them; other nodes may be fewer ({self.runs} runs did not tell)"
        return f"an error of {self.error:.2e} <= {self.tolerance:.2e}, {less}: overrides={self.overrides}"


def find_deny(
    model: nn.Module,
    converted: nn.Module,
    inputs: Any,
    tolerance: float,
    loss_fn: Loss | None = None,
    max_runs: int = MAX_RUNS,
    progress: bool = True,
) -> DenySet:
    """The smallest set of nodes whose denial brings the outputs within `tolerance` of the fp32 run.

        found = fxamp.find_deny(model, converted, (x,), tolerance=1e-3)
        converted = fxamp.convert(model, overrides=found.overrides)

    Low nodes, and blocks that are converted by themselves, are ordered by the error they introduce; the shortest
    prefix that is enough is found by bisection, and then halves, quarters ... of it are taken out again where the
    tolerance allows, until no single node can be. Where a neighbour of a GEMM does as well, it stands in the GEMM's
    place. What runs are left go to the search for fewer nodes: each set that fails says of which others one is needed,
    and the smallest set that has one of each is tried next. What is not proved by then, the result says.

    Args:
        model: the fp32 model; its parameters are used for the fp32 run.
        converted: what fxamp.convert gave for it.
        inputs: of one call, as `example_inputs` of convert().
        tolerance: largest relative error of any output, and of the loss where a loss function is given.
        loss_fn: gives a scalar of the output; None: outputs alone are compared.
        max_runs: graphs that may be rewritten and run.
        progress: show a bar where tqdm is installed and standard error is a terminal.

    Returns:
        The nodes, as `overrides` for convert(), and how near they bring the outputs.

    Raises:
        OptionError: a tolerance or a number of runs that is not positive, a single run, or outputs that are finite in
            neither run.
    """
    if not _is_positive(tolerance) or not _is_positive(max_runs) or not isinstance(max_runs, int):
        given = f"tolerance={tolerance!r}, max_runs={max_runs!r}"
        raise OptionError(f"{given}: both must be positive numbers, and the second a whole one.")
    if max_runs < 2:
        raise OptionError("max_runs=1 is too few: the first run denies nothing, and the second everything.")
    check_pair(model, converted)
    if engine_of(converted) is None:
        check_left(converted, "find_deny finds nothing to deny")
        return DenySet((), compare(model, converted, inputs, loss_fn).output, tolerance, 0, True, True)
    with Progress("bisect", max_runs, progress) as bar:
        search = _Search(model, call_of(converted, inputs), loss_fn, tolerance, max_runs, bar.step)
        compared = compare(model, converted, inputs, loss_fn)
        if compared.not_finite == 1.0:
            raise OptionError("no output is finite, in float32 either: there is no error to search by. See find_nan.")
        rows = sorted(compared.rows, key=lambda row: -row.introduced)
        low = [search.key_of(row) for row in rows if row.name in search.blocks or _is_chosen_low(row)]
        search.gemms = {search.key_of(row) for row in rows if row.colour == "allow"}
        return search.smallest(list(dict.fromkeys(low)))


def _is_positive(number: Any) -> bool:
    return isinstance(number, (int, float)) and number > 0


def _is_chosen_low(row: NodeError) -> bool:
    return row.precision == "low" and row.colour != "clear"


class _Search:
    def __init__(
        self,
        model: nn.Module,
        call: Call,
        loss_fn: Loss | None,
        tolerance: float,
        max_runs: int,
        step: Callable[[], None],
    ) -> None:
        self.call, self.loss_fn = call, loss_fn
        self.sets = SubsetSearch(self._run, tolerance, max_runs, step)
        with flags_of(call.model, model):
            self.exact = record(dataclasses.replace(call, weights=model), in_float32(call), None, as_float32=True)
        self.gemms: Collection[str] = ()
        parts = list(self.exact.parts.values())
        self.graphs = [part.variant.graph for part in parts]
        nodes = [(part, node) for part in parts for node in part.variant.graph.nodes]
        self.blocks = {node.name: path for part, node in nodes if (path := boundary_of(call, node, part))}

    def key_of(self, row: NodeError) -> str:
        """What denies a row's node."""
        return row.module if is_layer(self.call, row.module) else self.blocks.get(row.name, row.name)

    def smallest(self, candidates: Sequence[str]) -> DenySet:
        if self.sets.passes(()):
            return self.result((), True, True)
        if not self.sets.passes(candidates):
            return self.result(tuple(candidates), False)
        chosen, is_minimal = self.reduced(self.sets.shortest_prefix(candidates), candidates)
        if not is_minimal:
            return self.result(tuple(chosen), False)
        fewest, is_smallest = self.sets.smallest(chosen, candidates)
        if len(fewest) < len(chosen):
            chosen, is_minimal = self.reduced(fewest, candidates)
        return self.result(tuple(chosen), is_minimal, is_smallest)

    def reduced(self, chosen: Sequence[str], candidates: Sequence[str]) -> tuple[Sequence[str], bool]:
        """The set without what can be spared, and with few GEMMs; and whether no single name can be spared any more."""
        chosen, is_minimal = self.sets.reduced(chosen)
        better = self.with_fewer_gemms(chosen, candidates)
        return (chosen, is_minimal) if better == chosen else self.sets.reduced(better)

    def with_fewer_gemms(self, chosen: Sequence[str], candidates: Sequence[str]) -> Sequence[str]:
        """The set with GEMMs exchanged for neighbours that bring the error down as well, for as long as runs are left.

        Where what reads a GEMM's result loses it, both denials may mend that, and the GEMM's costs the Tensor Cores.
        """
        for gemm in (name for name in tuple(chosen) if name in self.gemms):
            near = self.neighbours(gemm)
            for other in (name for name in candidates if name in near and name not in chosen):
                exchanged = [other if name == gemm else name for name in chosen]
                if self.sets.is_used_up and frozenset(exchanged) not in self.sets.known:
                    return chosen
                if self.sets.passes(exchanged):
                    chosen = exchanged
                    break
        return chosen

    def neighbours(self, name: str) -> set[str]:
        """What reads a node's value, or a view of it, and what the node reads; no GEMMs."""
        found: set[str] = set()
        for node in (node for graph in self.graphs for node in graph.nodes if node.name == name):
            frontier = [*node.users, *node.all_input_nodes]
            while frontier:
                near = frontier.pop()
                if near.name not in found and near is not node:
                    found.add(near.name)
                    frontier += near.users if ir.mark(near).op in TRAITS["view"] else ()
        return found.difference(self.gemms)

    def _run(self, denied: Sequence[str]) -> float:
        call = self.call
        overrides = {**call.engine.options.overrides, **dict.fromkeys(denied, "deny")}
        plain_blocks = set(denied).intersection(self.blocks.values())
        mixed = record(call, Rewriter(call, plain_blocks, overrides=overrides), None)
        errors = [error_of_all(self.exact.outputs, mixed.outputs)]
        if self.loss_fn is not None:
            with plain_modes():
                one, other = (self.loss_fn(_outputs(found.outputs)) for found in (self.exact, mixed))
            errors.append(error_of(one.detach(), other.detach()))
        return max(errors)

    def result(self, nodes: tuple[str, ...], is_minimal: bool, is_smallest: bool = False) -> DenySet:
        error, given = self.sets.error(nodes), dict(self.call.engine.options.overrides)
        return DenySet(nodes, error, self.sets.tolerance, self.sets.runs, is_minimal, is_smallest, given)


def _outputs(found: Sequence[Any]) -> Any:
    return found[0] if len(found) == 1 else tuple(found)
