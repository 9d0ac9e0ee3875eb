"""A small set that passes a test, found in a bounded number of runs."""

from collections.abc import Callable, Sequence


class SubsetSearch:
    """Runs a test on sets of names, each set once.

    Args:
        judge: gives the error of a run with the set.
        tolerance: a set passes whose error is not larger.
        max_runs: how often `judge` may be asked by what searches here.
        step: called after each run.
    """

    def __init__(
        self,
        judge: Callable[[Sequence[str]], float],
        tolerance: float,
        max_runs: int,
        step: Callable[[], None] = lambda: None,
    ) -> None:
        self.judge, self.tolerance, self.max_runs, self.step = judge, tolerance, max_runs, step
        self.known: dict[frozenset[str], float] = {}

    def error(self, chosen: Sequence[str]) -> float:
        """Of one run with the set, which is made where it is not known."""
        key = frozenset(chosen)
        if key not in self.known:
            self.known[key] = self.judge(chosen)
            self.step()
        return self.known[key]

    def passes(self, chosen: Sequence[str]) -> bool:
        """Whether the set is enough."""
        return self.error(chosen) <= self.tolerance

    @property
    def runs(self) -> int:
        """How many sets were tried."""
        return len(self.known)

    @property
    def is_used_up(self) -> bool:
        """Whether no further run may be made."""
        return self.runs >= self.max_runs

    def shortest_prefix(self, candidates: Sequence[str]) -> Sequence[str]:
        """By bisection, of candidates that pass together."""
        short, enough = 0, len(candidates)
        while enough - short > 1 and not self.is_used_up:
            middle = (short + enough) // 2
            if self.passes(candidates[:middle]):
                enough = middle
            else:
                short = middle
        return candidates[:enough]

    def reduced(self, chosen: Sequence[str]) -> tuple[Sequence[str], bool]:
        """Take out ever smaller parts for as long as the rest passes (delta debugging: Zeller, Hildebrandt 2002).

        Returns:
            The set, and whether no single name can be taken out of it any more.
        """
        parts = 2
        while len(chosen) > 1:
            size = -(-len(chosen) // parts)
            smaller = None
            for start in range(0, len(chosen), size):
                if self.is_used_up:
                    return chosen, False
                rest = [*chosen[:start], *chosen[start + size :]]
                if self.passes(rest):
                    smaller = rest
                    break
            if smaller is not None:
                chosen, parts = smaller, max(parts - 1, 2)
            elif size == 1:
                break
            else:
                parts = min(2 * parts, len(chosen))
        return chosen, True
