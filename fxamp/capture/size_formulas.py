"""What numbers that hang on sizes are, by the sizes of the inputs: for all sizes that meet a condition."""

from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fxamp.capture.inputs import CONSTANTS
from fxamp.capture.size_guards import SizeGuard, symbolically
from fxamp.capture.sizes import Sizes

_Places = dict[sympy.Symbol, tuple[int, int]]  # of a size: of the input, and the dimension


_SEQUENCES = (tuple, list, torch.Size)


class _Sequence(NamedTuple):
    kind: type
    parts: tuple[Any, ...]


class SizeFormulas(NamedTuple):
    """What nodes give for inputs of any sizes that meet a condition.

    Attributes:
        guard: the condition.
        formulas: by the nodes' places: numbers, expressions of symbols, and sequences of these.
        places: which size each symbol is.
    """

    guard: SizeGuard
    formulas: dict[int, Any]
    places: _Places

    def __call__(self, inputs: list[Any]) -> dict[int, Any] | None:
        """What they give; None where the inputs do not meet the condition."""
        if not self.guard(inputs):
            return None
        sizes = {symbol: inputs[place].shape[dim] for symbol, (place, dim) in self.places.items()}
        return {place: _at(formula, sizes) for place, formula in self.formulas.items()}


def size_formulas(sizes: Sizes, example: list[Any], until: float) -> SizeFormulas | None:
    """The formulas for inputs of varying sizes; None where there are none, or not before `until`.

    Args:
        sizes: the nodes.
        example: inputs, see `sizes.of_any_size`.
        until: a time, of `time.monotonic()`.
    """

    def look(mode: FakeTensorMode, inputs: list[Any]) -> tuple[dict[int, Any], _Places]:
        tensors = [(place, value) for place, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        extents: list[Any] = [
            (extent, place, dim) for place, value in tensors for dim, extent in enumerate(value.shape)
        ]
        places = {extent.node.expr: (place, dim) for extent, place, dim in extents if isinstance(extent, torch.SymInt)}
        return {place: _formula(value, places) for place, value in sizes.of(mode, inputs, until)}, places

    found = symbolically(look, example)
    return None if found is None else SizeFormulas(found[0], *found[1])


def _formula(value: Any, places: _Places) -> Any:
    """What stands for a value on symbolic sizes.

    Raises:
        ValueError: it hangs on more than the sizes of inputs.
    """
    if type(value) in _SEQUENCES:
        return _Sequence(type(value), tuple(_formula(part, places) for part in value))
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        if expression.free_symbols <= places.keys():
            return expression
    elif isinstance(value, (int, float, *CONSTANTS)):
        return value
    raise ValueError(f"{value} hangs on more than sizes of inputs")


def _at(formula: Any, sizes: dict[sympy.Symbol, int]) -> Any:
    if isinstance(formula, _Sequence):
        return formula.kind([_at(part, sizes) for part in formula.parts])
    if not isinstance(formula, sympy.Basic):
        return formula
    if formula.is_Symbol:
        return sizes[formula]
    return int(formula.xreplace({symbol: sympy.Integer(sizes[symbol]) for symbol in formula.free_symbols}))
