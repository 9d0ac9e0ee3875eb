"""A progress bar where tqdm is installed and somebody watches, nothing else."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Progress:
    """`with Progress("bisect", 64) as bar: bar.step()`."""

    def __init__(self, name: str, total: int | None, is_shown: bool = True) -> None:
        self.bar: Any = _bar(name, total) if is_shown else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def step(self) -> None:
        """One more is done."""
        if self.bar is not None:
            self.bar.update()


def watched(items: Iterable[T], name: str, is_shown: bool = True) -> Iterator[T]:
    """The items, with a bar that moves as they are taken."""
    try:
        total = len(items)  # type: ignore[arg-type]
    except TypeError:
        total = None
    with Progress(name, total, is_shown) as bar:
        for item in items:
            yield item
            bar.step()


def _bar(name: str, total: int | None) -> Any:
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return None
    return tqdm(desc=name, total=total, disable=None, leave=False)
