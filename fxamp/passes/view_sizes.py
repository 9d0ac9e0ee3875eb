"""What -1 stands for in `x.view(batch, -1)`: the same number in every call, or what is left of this one."""

import math
from typing import Any

from torch import fx


def is_rest_static(
    source: tuple[int, ...],
    known: tuple[bool, ...],
    shape: tuple[int, ...],
    sizes: tuple[Any, ...],
    dims: list[bool],
    inferred: int,
) -> bool:
    """Whether -1 stands for a product of static sizes: those left and right of it are the source's own.

    `view(batch, -1)` of (batch, 1, 7) has 7 columns in this call only: the source's 1 may be another number.

    Args:
        source: sizes of what is viewed.
        known: whether each of them is static.
        shape: sizes of the view.
        sizes: the arguments that ask for them: numbers and nodes.
        dims: whether each of them is static, but for `inferred`.
        inferred: where the -1 stands.
    """
    starts = [start for start in range(len(source)) if all(known[start:])]
    for first in range(inferred, -1, -1):
        others = [flag for dim, flag in enumerate(dims) if dim >= first and dim != inferred]
        same = [start for start in starts if math.prod(source[start:]) == math.prod(shape[first:])]
        if all(others) and any(_is_left_alone(source, known, shape, sizes, dims, start, first) for start in same):
            return True
    return False


def _is_left_alone(
    source: tuple[int, ...],
    known: tuple[bool, ...],
    shape: tuple[int, ...],
    sizes: tuple[Any, ...],
    dims: list[bool],
    start: int,
    first: int,
) -> bool:
    """Whether the first sizes of a view hold as much as the first `start` of its source, in every call."""
    moving = [size for size, flag in zip(source[:start], known, strict=False) if not flag]
    if not moving:
        return all(dims[:first])
    if start == first and source[:start] == shape[:first]:
        pairs = zip(sizes[:first], known, strict=False)
        return all(isinstance(size, fx.Node) or flag for size, flag in pairs)
    return 1 not in moving and any(isinstance(size, fx.Node) for size in sizes[:first])
