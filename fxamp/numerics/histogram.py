"""Exponents of real values, counted: bounded memory however many values there are."""

import dataclasses
import math

import torch

LOWEST, HIGHEST = -149, 128
"""Exponents of float32: 2**-149 is its smallest number, 2**127 times almost 2 its largest."""
_BINS = HIGHEST - LOWEST + 1


@dataclasses.dataclass
class Histogram:
    """How many values have which exponent: a value v is counted at floor(log2 |v|).

    Attributes:
        counts: by exponent, from LOWEST; int64.
        zeros, infinite, nan: values that have none.
        largest: largest finite magnitude.
    """

    counts: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64))
    zeros: int = 0
    infinite: int = 0
    nan: int = 0
    largest: float = 0.0

    def add(self, values: torch.Tensor) -> None:
        """Count a tensor's values."""
        flat = values.detach().reshape(-1)
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
        exponents = torch.frexp(numbers).exponent - 1
        bins = (exponents.clamp(LOWEST, HIGHEST - 1) - LOWEST).long()
        self.counts += torch.bincount(bins, minlength=_BINS).cpu()
        self.largest = max(self.largest, float(numbers.abs().max()))

    def merge(self, other: "Histogram") -> None:
        """Add another histogram's counts."""
        self.counts += other.counts
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
        return self._share(exponent_of_zero(low) - round(math.log2(scale)), below=True)

    def share_overflown(self, low: torch.dtype, scale: float = 1.0) -> float:
        """Share of the non-zero values that `low` cannot hold, after multiplication by `scale`, a power of two.

        Counted by exponent: values between the largest number and the next power of two are told by `overflows`.
        """
        return self._share(math.frexp(torch.finfo(low).max)[1] - round(math.log2(scale)), below=False)

    def overflows(self, low: torch.dtype) -> bool:
        """Whether any finite value rounds to infinity in `low`."""
        return math.isinf(float(torch.tensor(self.largest, dtype=torch.float64).to(low)))

    def _share(self, exponent: int, below: bool) -> float:
        index = min(max(exponent - LOWEST, 0), _BINS)
        part = self.counts[:index] if below else self.counts[index:]
        return int(part.sum()) / self.nonzero if self.nonzero else 0.0

    def exponents(self) -> dict[int, int]:
        """Exponent -> count, for those that occur."""
        return {LOWEST + int(index): int(self.counts[index]) for index in self.counts.nonzero().flatten()}


def exponent_of_zero(low: torch.dtype) -> int:
    """Values with a smaller exponent round to zero: half of the smallest subnormal, 2**-25 in float16."""
    facts = torch.finfo(low)
    return math.frexp(facts.smallest_normal * facts.eps)[1] - 2
