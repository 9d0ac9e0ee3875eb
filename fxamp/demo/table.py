"""The demo's tables, and the claims it checks."""

import dataclasses
from collections.abc import Callable, Sequence

from tabulate import tabulate

from fxamp.demo.loop import Result

LOSS_TOLERANCE = 0.01
"""How far fxamp's final loss may be from fp32's, as a share of it."""

COLUMNS: dict[str, Callable[[Result], str]] = {
    "precision": lambda result: result.mode.name,
    "seed": lambda result: str(result.seed),
    "final loss": lambda result: f"{result.loss:.4f}",
    "test loss": lambda result: f"{result.held_out_loss:.4f}",
    "test accuracy": lambda result: f"{result.accuracy:.2%}",
    "low / nodes": lambda result: "-" if result.nodes is None else f"{result.low} / {result.nodes}",
    "casts": lambda result: f"{result.casts:g}",
    "tensors cast": lambda result: f"{result.tensors_cast:g}",
    "skipped": lambda result: str(result.skipped),
    "ms / step": lambda result: f"{result.milliseconds:.1f}",
    "seconds": lambda result: f"{result.seconds:.1f}",
}

LEGEND = """\
final loss: of training, the mean over the last tenth of the steps. casts: calls that convert tensors from one floating
dtype to another in one step (forward, loss, backward), counted while it ran, whoever asked for them; tensors cast: how
many tensors those are (fxamp converts many weights in one call). skipped: steps left out, a gradient overflowed.
ms / step: the median."""


def table(results: Sequence[Result]) -> str:
    """One row for each run."""
    rows = [[cell(result) for cell in COLUMNS.values()] for result in results]
    align = ["left", *["right"] * (len(COLUMNS) - 1)]
    return tabulate(rows, headers=list(COLUMNS), disable_numparse=True, colalign=align)


@dataclasses.dataclass(frozen=True)
class Claim:
    """Something the demo promises, and what it found."""

    text: str
    holds: bool

    def __str__(self) -> str:
        return f"{'PASS' if self.holds else 'FAIL'}  {self.text}"


def claims(fp32: Sequence[Result], mixed: Sequence[Result]) -> list[Claim]:
    """The three claims for each of fxamp's runs: its loss, its accuracy, its casts.

    Args:
        fp32: the same training with several seeds; one of them is `mixed`'s.
        mixed: autocast's and fxamp's runs, all with one seed.
    """
    same = next(result for result in fp32 if result.seed == mixed[0].seed)
    autocast = {result.mode.dtype: result for result in mixed if result.mode.engine == "autocast"}
    found = []
    for result in mixed:
        if result.mode.engine == "fxamp":
            found += [
                loss_claim(result, same),
                accuracy_claim(result, same, fp32),
                casts_claim(result, autocast[result.mode.dtype]),
            ]
    return found


def loss_claim(ours: Result, fp32: Result) -> Claim:
    """The final loss is fp32's."""
    change = ours.loss / fp32.loss - 1
    text = f"final loss within {LOSS_TOLERANCE:.0%} of fp32's: {ours.loss:.4f} for {fp32.loss:.4f} ({change:+.2%})"
    return Claim(f"{ours.mode.name}: {text}", abs(change) <= LOSS_TOLERANCE)


def accuracy_claim(ours: Result, same: Result, fp32: Sequence[Result]) -> Claim:
    """The accuracy is no further from fp32's of the same seed than fp32's worst is from its best.

    (Between these two it need not be: where two seeds end alike, the one in the middle is the best, or all but that.)
    """
    apart = max(result.accuracy for result in fp32) - min(result.accuracy for result in fp32)
    text = (
        f"test accuracy no further from fp32's than its {len(fp32)} seeds are apart ({apart:.2%}): "
        f"{ours.accuracy:.2%} for {same.accuracy:.2%}"
    )
    return Claim(f"{ours.mode.name}: {text}", abs(ours.accuracy - same.accuracy) <= apart)


def casts_claim(ours: Result, autocast: Result) -> Claim:
    """Fewer casts than autocast in the same dtype."""
    text = f"fewer casts a step than autocast: {ours.casts:g} for {autocast.casts:g}"
    return Claim(f"{ours.mode.name}: {text}", ours.casts < autocast.casts)


def median_of(results: Sequence[Result]) -> Result:
    """The run with the middle accuracy (of an even number, the better of the two in the middle)."""
    return sorted(results, key=lambda result: result.accuracy)[len(results) // 2]
