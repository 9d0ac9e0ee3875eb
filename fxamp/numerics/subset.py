"""A small set that passes a test, found in a bounded number of runs."""

import itertools
from collections.abc import Callable, Iterator, Sequence

# A set of at most this many names is compared with smaller ones, made of this many candidates: 298 sets at most.
_LARGEST_COMPARED, _COMPARED_WITH = 4, 12


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

    def smaller(self, chosen: Sequence[str], candidates: Sequence[str]) -> Sequence[str]:
        """A set of fewer names, where one of the first candidates passes before the runs are used up; else `chosen`.

        What is part of a set that did not pass is not tried.
        """
        while 1 < len(chosen) <= _LARGEST_COMPARED:
            found = next(filter(self.passes, self._untried(candidates[:_COMPARED_WITH], len(chosen) - 1)), None)
            if found is None:
                return chosen
            chosen = found
        return chosen

    def _untried(self, candidates: Sequence[str], size: int) -> Iterator[Sequence[str]]:
        """Sets of one size, those of the first candidates first, for as long as runs are left."""
        for places in sorted(itertools.combinations(range(len(candidates)), size), key=sum):
            names = [candidates[place] for place in places]
            failed = (known for known, error in self.known.items() if error > self.tolerance)
            if self.is_used_up:
                return
            if not any(known.issuperset(names) for known in failed):
                yield names
