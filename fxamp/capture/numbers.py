"""Numbers that are not Python's own: what a graph holds of them, and what numpy asks of a traced value."""

import enum
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch

# What numpy makes of `number * x`, where `number` is one of its scalars: as in eager, x decides.
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "true_divide": operator.truediv,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "power": operator.pow,
    "matmul": operator.matmul,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "not_equal": operator.ne,
}


# What torch takes Python's types for: `torch.zeros(3, dtype=int)`.
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def plain_number(value: Any) -> Any:
    """A scalar of numpy, or of a class derived from a number, as Python's own; a type of numbers as the dtype it stands
    for; anything else as it is.

    Generated code writes constants as they print, and `np.float64(0.5)` is no name there.
    """
    if isinstance(value, type):
        return _DTYPES.get(value, value)
    if is_numpys(value) and value.ndim == 0:
        return value.item()
    for kind in (int, float, complex):
        if isinstance(value, kind) and type(value) not in (bool, kind) and not isinstance(value, enum.Enum):
            return kind(value)  # type: ignore[arg-type]
    return value


def operator_of(ufunc: Any, method: str, inputs: tuple[Any, ...]) -> Callable[[Any, Any], Any] | None:
    """The operator behind a call of a numpy ufunc with a scalar, None where there is none."""
    if method != "__call__" or len(inputs) != 2 or any(getattr(each, "ndim", 0) for each in inputs if is_numpys(each)):
        return None
    return _OPERATORS.get(ufunc.__name__)


def is_numpys(value: Any) -> bool:
    """Whether it is an array or a scalar of numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray))
