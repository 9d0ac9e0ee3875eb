"""Exponents of real values, counted: bounded memory however many values there are."""

import dataclasses
import math
from typing import Any

import torch

from fxamp.dtypes import LOW_DTYPES, dtype_name
from fxamp.sparse import held

LOWEST, HIGHEST = -149, 128
"""Exponents of float32: 2**-149 is its smallest number, 2**127 times almost 2 its largest."""
_BINS = HIGHEST - LOWEST + 1


@dataclasses.dataclass
class Histogram:
    """How many values have which exponent: a value v is counted at floor(log2 |v|).

    Attributes:
        counts: by exponent, from LOWEST; int64.
        powers: of these, those that are powers of two: half of the smallest subnormal is a tie, and rounds to zero.
        rounded_up: by low dtype, of these those that it rounds to the next power of two: from 2**15, float16 to inf.
        zeros, infinite, nan: values that have none.
        largest: largest finite magnitude.
    """

    counts: torch.Tensor = dataclasses.field(default_factory=lambda: no_counts())
    powers: torch.Tensor = dataclasses.field(default_factory=lambda: no_counts())
    rounded_up: dict[torch.dtype, torch.Tensor] = dataclasses.field(
        default_factory=lambda: {low: no_counts() for low in LOW_DTYPES}
    )
    zeros: int = 0
    infinite: int = 0
    nan: int = 0
    largest: float = 0.0

    def add(self, values: torch.Tensor) -> None:
        """Count a tensor's values."""
        flat = held(values).reshape(-1)
        flat = flat.float() if flat.dtype != torch.float64 else flat
        finite = torch.isfinite(flat)
        count = int(finite.sum())
        if count < flat.numel():
            self.nan += int(torch.isnan(flat).sum())
            self.infinite = self.infinite + flat.numel() - count - int(torch.isnan(flat).sum())
            flat = flat[finite]
        numbers = flat[flat != 0]
        self.zeros += flat.numel() - numbers.numel()
        if numbers.numel() == 0:
            return
        halves, exponents = torch.frexp(numbers.abs())  # a number is its half, from 0.5 up to 1, times 2**exponent
        bins = ((exponents - 1).clamp(LOWEST, HIGHEST - 1) - LOWEST).long()
        self.counts = self.counts + _counted(bins)
        self.powers = self.powers + _counted(bins[halves == 0.5])
        for low in LOW_DTYPES:
            self.rounded_up[low] = self.rounded_up[low] + _counted(bins[halves >= 1 - torch.finfo(low).eps / 4])
        self.largest = max(self.largest, float(numbers.abs().max()))

    def merge(self, other: "Histogram") -> None:
        """Add another histogram's counts."""
        self.counts = self.counts + other.counts
        self.powers = self.powers + other.powers
        self.rounded_up = {low: counts + other.rounded_up[low] for low, counts in self.rounded_up.items()}
        self.zeros += other.zeros
        self.infinite += other.infinite
        self.nan += other.nan
        self.largest = max(self.largest, other.largest)

    @property
    def nonzero(self) -> int:
        """Finite values that are not zero."""
        return int(self.counts.sum())

    @property
    def total(self) -> int:
        """All values."""
        return self.nonzero + self.zeros + self.infinite + self.nan

    def share_flushed(self, low: torch.dtype, scale: float = 1.0) -> float:
        """Share of the non-zero values that `low` rounds to zero, after multiplication by `scale`, a power of two."""
        place = _place(exponent_of_zero(low), scale)
        return self._share(int(self.counts[: max(place, 0)].sum()) + _at(self.powers, place))

    def share_overflown(self, low: torch.dtype, scale: float = 1.0) -> float:
        """Share of the non-zero values that `low` cannot hold, after multiplication by `scale`, a power of two."""
        place = _place(math.frexp(torch.finfo(low).max)[1], scale)
        return self._share(int(self.counts[max(place, 0) :].sum()) + _at(self.rounded_up[low], place - 1))

    def overflows(self, low: torch.dtype) -> bool:
        """Whether any finite value rounds to infinity in `low`."""
        return math.isinf(float(torch.tensor(self.largest, dtype=torch.float64, device="cpu").to(low)))

    def _share(self, count: int) -> float:
        return count / self.nonzero if self.nonzero else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values; counts by exponent."""
        plain = {field: getattr(self, field) for field in ("zeros", "infinite", "nan", "largest")}
        rounded_up = {dtype_name(low): by_exponent(counts) for low, counts in self.rounded_up.items()}
        return {**plain, "exponents": self.exponents(), "powers": by_exponent(self.powers), "rounded_up": rounded_up}

    def exponents(self) -> dict[int, int]:
        """Exponent -> count, for those that occur."""
        return by_exponent(self.counts)


def by_exponent(counts: torch.Tensor) -> dict[int, int]:
    """Exponent -> count, for those that occur, of counts as a Histogram has them."""
    return {LOWEST + int(index): int(counts[index]) for index in counts.nonzero().flatten()}


def no_counts() -> torch.Tensor:
    """Of nothing yet."""
    return torch.zeros(_BINS, dtype=torch.int64, device="cpu")


def _counted(bins: torch.Tensor) -> torch.Tensor:
    return torch.bincount(bins, minlength=_BINS).cpu()


def _place(exponent: int, scale: float) -> int:
    """Where the counts of values begin that have this exponent after multiplication by a power of two."""
    return exponent - round(math.log2(scale)) - LOWEST


def _at(counts: torch.Tensor, place: int) -> int:
    return int(counts[place]) if 0 <= place < _BINS else 0


def exponent_of_zero(low: torch.dtype) -> int:
    """Values with a smaller exponent round to zero, and so does this power of two: the tie, 2**-25 in float16."""
    facts = torch.finfo(low)
    return math.frexp(facts.smallest_normal * facts.eps)[1] - 2
