"""A smallest set that holds a member of each of some sets."""

from collections.abc import Collection, Sequence

_MAX_STEPS = 5_000


class TooHard(Exception):
    """No answer within the number of steps."""


def smallest_hitting_set(sets: Collection[frozenset[str]], most: int, order: Sequence[str]) -> list[str] | None:
    """Names of which each set holds one, as few as there can be; of alternatives those that come first in `order`.

    Branch and bound: of an unhit set with the fewest members each is tried, for as long as sets that share no member
    are no more than the names that are left to choose.

    Args:
        sets: of names, none of them empty.
        most: how many names there may be.
        order: all names.

    Returns:
        The names; None where more than `most` are needed.

    Raises:
        TooHard: the search took too many steps.
    """
    rank = {name: place for place, name in enumerate(order)}
    steps = 0

    def search(unhit: Sequence[frozenset[str]], most: int) -> list[str] | None:
        nonlocal steps
        steps += 1
        if steps > _MAX_STEPS:
            raise TooHard
        if not unhit:
            return []
        if _apart(unhit) > most:
            return None
        hardest = min(unhit, key=len)
        for name in sorted(hardest, key=rank.__getitem__):
            rest = search([each for each in unhit if name not in each], most - 1)
            if rest is not None:
                return [name, *rest]
        return None

    unhit = sorted(sets, key=lambda each: sorted(map(rank.__getitem__, each)))
    found = (search(unhit, size) for size in range(_apart(unhit), most + 1))
    return next((names for names in found if names is not None), None)


def _apart(sets: Collection[frozenset[str]]) -> int:
    """How many sets, taken from the smallest on, share no member: each needs a name of its own."""
    count, taken = 0, set[str]()
    for each in sorted(sets, key=len):
        if taken.isdisjoint(each):
            count += 1
            taken |= each
    return count
