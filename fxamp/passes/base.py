"""The base of every pass, and the one place that runs them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import fx

from fxamp.errors import InvariantError

Invariant = Callable[[fx.Graph], None]


@dataclasses.dataclass(frozen=True)
class Pass:
    """One change of a graph, or one analysis of it; fields are its options.

    Attributes:
        requires: invariants that must hold before.
        ensures: invariants that hold after, checked on the result.
    """

    requires: ClassVar[tuple[Invariant, ...]] = ()
    ensures: ClassVar[tuple[Invariant, ...]] = ()

    def apply(self, graph: fx.Graph) -> bool:
        """Change the graph in place; return whether anything changed."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        return type(self).__name__


def run_passes(graph: fx.Graph, passes: Sequence[Pass], always: Sequence[Invariant] = ()) -> bool:
    """Run passes in order, checking invariants before and after each.

    Args:
        graph: changed in place.
        passes: in the order they run.
        always: invariants that hold between any two passes.

    Returns:
        Whether any pass changed the graph.

    Raises:
        InvariantError: naming the pass, the rule, the node and what was found.
    """
    changed = False
    done: list[str] = []
    for step in passes:
        _check(graph, (*always, *step.requires), f"before {step.name}", done)
        changed = step.apply(graph) or changed
        done.append(step.name)
        _check(graph, (*always, *step.ensures), f"after {step.name}", done)
    return changed


def _check(graph: fx.Graph, invariants: Sequence[Invariant], when: str, done: list[str]) -> None:
    for invariant in invariants:
        try:
            invariant(graph)
        except InvariantError as error:
            ran = ", ".join(done) or "none"
            raise InvariantError(f"{when}, {invariant.__name__}: {error} (passes that ran: {ran})") from None
