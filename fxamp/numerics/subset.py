"""A small set that passes a test, found in a bounded number of runs."""

from collections.abc import Callable, Sequence

from fxamp.numerics.hitting_sets import TooHard, smallest_hitting_set


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

    def smallest(self, chosen: Sequence[str], candidates: Sequence[str]) -> tuple[Sequence[str], bool]:
        """The smallest set of candidates that passes; `chosen`, which does, where the runs are too few to find one.

        Implicit hitting sets (Ignatiev, Previti, Liffiton, Marques-Silva 2015, there for unsatisfiable cores): where a
        set fails, one that passes holds a name outside of it. The smallest set with a name of each of those outsides
        is no larger than the smallest that passes: if it passes itself, it is that, else its outside is one more.

        Returns:
            The set, and whether it is known to be the smallest, provided that no name added makes a set fail. Where a
            set was seen to be much worse than a part of it, single names are tried too, and no more is claimed.
        """
        others = [_without(candidates, [name]) for name in chosen]
        while True:
            try:
                hit = smallest_hitting_set(self._outsides(chosen, candidates), len(chosen) - 1, candidates)
            except TooHard:
                return chosen, False
            if hit is None:
                return self._but_one(chosen, candidates)
            if self.is_used_up and frozenset(hit) not in self.known:
                return chosen, False
            if others and not self.is_used_up:
                self.passes(others.pop(0))
            elif self.passes(hit):
                return self._but_one(hit, candidates)
            else:
                self._narrow(_without(candidates, hit), candidates)

    def _but_one(self, chosen: Sequence[str], candidates: Sequence[str]) -> tuple[Sequence[str], bool]:
        if len(chosen) == 1 or not self._has_harmed():
            return chosen, True
        known = ([name] for name in candidates if not self.is_used_up or frozenset([name]) in self.known)
        single = next(filter(self.passes, known), None)
        return (chosen, False) if single is None else (single, True)

    def _has_harmed(self) -> bool:
        """Whether a set that failed has more than twice the error of a part of it."""
        failed = {known: error for known, error in self.known.items() if error > self.tolerance}
        return any(failed[one] > 2 * error for one in failed for part, error in self.known.items() if part < one)

    def _outsides(self, chosen: Sequence[str], candidates: Sequence[str]) -> list[frozenset[str]]:
        """What sets that failed lack, without what holds another such outside.

        One that holds all of `chosen`, which passes, tells nothing.
        """
        failed = [known for known, error in self.known.items() if error > self.tolerance]
        outsides = [frozenset(candidates).difference(known) for known in failed if not known.issuperset(chosen)]
        return [each for each in dict.fromkeys(outsides) if not any(other < each for other in outsides)]

    def _narrow(self, outside: Sequence[str], candidates: Sequence[str]) -> None:
        """Halve what a set that failed lacks, for as long as all but the half still fail."""
        while len(outside) > 1:
            middle = -(-len(outside) // 2)
            for half in (outside[:middle], outside[middle:]):
                if self.is_used_up:
                    return
                if not self.passes(_without(candidates, half)):
                    outside = half
                    break
            else:
                return


def _without(names: Sequence[str], left_out: Sequence[str]) -> list[str]:
    return [name for name in names if name not in left_out]
