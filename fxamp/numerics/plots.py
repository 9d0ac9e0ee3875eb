"""Pictures of measured ranges, like Figures 2 and 3 of NVIDIA's guide on training with mixed precision."""

import importlib
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fxamp.dtypes import dtype_name
from fxamp.errors import OptionError
from fxamp.numerics.histogram import Histogram, exponent_of_zero
from fxamp.whole import checked_path, write_whole

if TYPE_CHECKING:
    from fxamp.numerics.ranges import Ranges

_LOST, _DENORMAL, _KEPT = "#d0493b", "#e6a23c", "#3b7dd8"
_LEFTMOST, _RIGHTMOST = -60, 30
"""Exponents further out are put into one bar at each end."""


def plot_ranges(ranges: "Ranges", path: str | Path) -> Path:
    """Draw activations, activation gradients, and the gradients under the loss scale; the format is the file's.

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
    """
    target = checked_path(path, "the picture cannot be written")
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise OptionError("plots need matplotlib. Run: pip install 'fxamp[review]'") from error
    values = Histogram()
    for node in ranges.nodes.values():
        values.merge(node.values)
    gradients, scale = ranges.gradients, ranges.loss_scale
    panels = [("activations", values, 1.0)]
    if gradients.nonzero:
        panels.append(("activation gradients", gradients, 1.0))
        panels.append((f"activation gradients, loss scale 2^{round(math.log2(scale or 1.0))}", gradients, scale or 1.0))
    size = (9, 2.9 * len(panels))
    figure, axes = pyplot.subplots(len(panels), 1, figsize=size, squeeze=False, constrained_layout=True)
    for axis, (title, histogram, factor) in zip(axes[:, 0], panels, strict=True):
        _draw(axis, title, histogram, factor, ranges.low)
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, format=target.suffix[1:] or None)
    except ValueError as error:
        raise OptionError(f"the picture cannot be written to {str(target)!r}: {error}.") from error
    finally:
        pyplot.close(figure)
    return write_whole(target, drawn.getvalue(), "the picture")


def _draw(axis: Any, title: str, histogram: Histogram, scale: float, low: torch.dtype) -> None:
    shift = round(math.log2(scale))
    counts: dict[int, int] = {}
    for exponent, count in histogram.exponents().items():
        moved = min(max(exponent + shift, _LEFTMOST), _RIGHTMOST)
        counts[moved] = counts.get(moved, 0) + count
    total = max(1, histogram.total)
    zero, normal = exponent_of_zero(low), math.frexp(torch.finfo(low).smallest_normal)[1] - 1
    top = math.frexp(torch.finfo(low).max)[1]
    colours = [_LOST if e < zero or e >= top else _DENORMAL if e < normal else _KEPT for e in counts]
    axis.bar(list(counts), [100 * count / total for count in counts.values()], color=colours, width=0.9)
    axis.set_yscale("log")
    axis.set_xlim(_LEFTMOST - 1, max([20, *counts]) + 1)
    axis.set_ylabel("% of all values")
    axis.set_xlabel("exponent: floor(log2 |value|)")
    for position, word in ((zero, "becomes 0"), (normal, "denormal"), (top, "overflows")):
        axis.axvline(position - 0.5, color="#667085", linewidth=0.8, linestyle="--")
        axis.annotate(
            word,
            (position - 0.5, 0.98),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top",
            ha="right",
            fontsize=8,
            color="#475467",
        )
    lost = histogram.share_flushed(low, scale)
    over = histogram.share_overflown(low, scale)
    axis.set_title(
        f"{title}: {lost:.2%} of the non-zero values become 0 in {dtype_name(low)}, {over:.2%} overflow, "
        f"{histogram.zeros / total:.1%} are 0",
        fontsize=9,
    )
