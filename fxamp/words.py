"""Numbers and lists in words."""

from collections.abc import Iterable


def bytes_in_words(nbytes: int) -> str:
    """bytes_in_words(2_500_000) == "2.5 MB"."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("unreachable")


def size_in_words(nbytes: int) -> str:
    """`bytes_in_words`, where 0 stands for a size that is not known."""
    return bytes_in_words(nbytes) if nbytes else "values of unknown size"


def plural(count: int, noun: str) -> str:
    """plural(1, "cast") == "1 cast", plural(2, "cast") == "2 casts"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def percent(share: float) -> str:
    """percent(0.264) == "26%", percent(0.001) == "less than 1%"."""
    return "less than 1%" if 0 < share < 0.01 else f"{share:.0%}"


def listed(names: Iterable[str], most: int, between: str = ", ") -> str:
    """listed(["a", "b"], 2) == "a, b", listed(["a", "b", "c", "d"], 2) == "a, b and 2 more"."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return between.join(every[:most]) + more
