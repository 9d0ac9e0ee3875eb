"""Scalars in the user's code that low precision would destroy (DESIGN 4.4a).

x + 1e-5            # fp16: below eps/2 of 1.0, lost for every x of ordinary size
x.masked_fill(m, -1e9)   # fp16: beyond 65504, an error or -inf
x.clamp(min=1e-12)  # fp16: rounds to 0
"""

import math
from typing import Any, Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from fxamp import ir
from fxamp.dtypes import dtype_name, smallest_subnormal

# op -> the (position, keyword) of scalars that take part in its arithmetic.
_SCALARS: dict[str, tuple[tuple[int, str], ...]] = {
    "add": ((0, "input"), (1, "other"), (-1, "alpha")),
    "sub": ((0, "input"), (1, "other"), (-1, "alpha")),
    "rsub": ((1, "other"),),
    "mul": ((0, "input"), (1, "other")),
    "div": ((0, "input"), (1, "other")),
    "addcmul": ((-1, "value"),),
    "addcdiv": ((-1, "value"),),
    "clamp": ((1, "min"), (2, "max")),
    "clamp_min": ((1, "min"),),
    "clamp_max": ((1, "max"),),
    "hardtanh": ((1, "min_val"), (2, "max_val")),
    "threshold": ((1, "threshold"), (2, "value")),
    "masked_fill": ((2, "value"),),
    "fill": ((1, "value"),),
    "full": ((1, "fill_value"),),
    "full_like": ((1, "fill_value"),),
    "new_full": ((2, "fill_value"),),
    "where": ((1, "input"), (2, "other")),
    "lerp": ((2, "weight"),),
    "pad": ((3, "value"),),
    "setitem": ((2, "value"),),
    "remainder": ((1, "other"),),
    "fmod": ((1, "other"),),
    "maximum": ((1, "other"),),
    "minimum": ((1, "other"),),
}
_ADDENDS = frozenset({"add", "sub", "rsub"})
# Values that stand for "nothing here" and stay what they are in any dtype.
_FILLS = frozenset({"masked_fill", "fill", "full", "full_like", "new_full", "where", "pad", "setitem"})


def destroyed_literal(node: fx.Node, low: torch.dtype) -> str | None:
    """What is wrong with a scalar of the node in `low`, None when nothing is."""
    op = ir.mark(node).op
    for position, keyword in _SCALARS.get(op, ()):
        value = ir.argument_of(node, position, keyword)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            problem = _problem(value, op, low)
            if problem:
                return f"the literal {value!r} {problem}"
    return None


def is_beyond_range(node: fx.Node, low: torch.dtype) -> bool:
    """Whether a finite scalar of the node is larger than `low` can hold."""
    values = [ir.argument_of(node, position, keyword) for position, keyword in _SCALARS.get(ir.mark(node).op, ())]
    return any(
        isinstance(value, (int, float)) and math.isfinite(value) and abs(value) > torch.finfo(low).max
        for value in values
    )


def _problem(value: float, op: str, low: torch.dtype) -> str:
    facts, name = torch.finfo(low), dtype_name(low)
    if value == 0 or not math.isfinite(value):
        return ""
    if abs(value) > facts.max:
        return f"is beyond {name}'s largest number {facts.max:g}"
    if abs(value) < smallest_subnormal(low):
        return f"vanishes in {name} (smallest number {smallest_subnormal(low):.3g})"
    if op in _ADDENDS and abs(value) < facts.eps / 2:
        return f"is lost when it is added to a number near 1 in {name} (eps/2 = {facts.eps / 2:.3g})"
    return ""


Fit = Literal["normal", "small", "beyond"]


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers that a sparse tensor stores."""
    tensor = tensor.detach()
    return tensor.coalesce().values() if tensor.layout == torch.sparse_coo else tensor.values()


def fit_in(tensor: Any, low: torch.dtype) -> Fit:
    """How a parameter or buffer fits into `low`: "beyond" where a finite number overflows, "small" where those of
    ordinary size are no normal numbers.

    The size is the root mean square of the non-zero elements: a weight of N(0, 0.02) has single elements near 0
    that may round to a subnormal without harm, a layer scale of 1e-6 has nothing else. Infinities (a mask's) are
    exact. Fake and meta tensors hold no numbers and are taken to be normal. Of a vmapped weight all are looked at.
    """
    while isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta or not tensor.is_floating_point():
        return "normal"
    if isinstance(tensor, FakeTensor) or tensor.numel() == 0:
        return "normal"
    with torch.no_grad():
        values = tensor.detach() if tensor.layout == torch.strided else _stored(tensor)
        largest = float(values.abs().max())
        if not math.isfinite(largest):
            values = torch.where(values.isfinite(), values, 0)
            largest = float(values.abs().max())
        count = int(torch.count_nonzero(values))
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
        size = norm / max(count, 1) ** 0.5
    facts = torch.finfo(low)
    if largest > facts.max:
        return "beyond"
    return "normal" if count == 0 or size >= facts.smallest_normal else "small"
