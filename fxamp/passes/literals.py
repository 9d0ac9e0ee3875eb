"""Scalars in the user's code that low precision would destroy.

x + 1e-5            # fp16: below eps/2 of 1.0, lost for every x of ordinary size
x.masked_fill(m, -1e9)   # fp16: beyond 65504, an error or -inf
x.clamp(min=1e-12)  # fp16: rounds to 0
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._sympy.symbol import SymT, symbol_is_type

from fxamp import ir
from fxamp.dtypes import dtype_name, smallest_subnormal
from fxamp.sparse import held

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
    "tensor": ((0, "data"),),
    "new_tensor": ((1, "data"),),
    "as_tensor": ((0, "data"),),
    "asarray": ((0, "obj"),),
    "scalar_tensor": ((0, "s"),),
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


# On a number that a graph reads at each call: the rules asked how it fits; True: also as an addend.
ASKED = "asked"
NumberFit = Literal["", "lost", "vanishes", "beyond", "unknown"]
Number = float | torch.SymFloat | torch.SymInt


def destroyed_literal(node: fx.Node, low: torch.dtype) -> str | None:
    """What is wrong with a scalar of the node in `low`, None when nothing is."""
    for title, value in _scalars(node):
        fit = number_fit(value, low, ir.mark(node).op in _ADDENDS)
        if fit:
            return f"the {title} {_PROBLEMS[fit](low)}"
    return None


def is_beyond_range(node: fx.Node, low: torch.dtype) -> bool:
    """Whether a finite scalar of the node is larger than `low` can hold."""
    return any(number_fit(value, low, is_added=False) == "beyond" for _, value in _scalars(node))


def number_fit(value: Number, low: torch.dtype, is_added: bool) -> NumberFit:
    """What `low` does to a number; "" for nothing that matters. Each answer about one of Dynamo's is a guard."""
    try:
        return _fit_of_size(abs(value), low, is_added)  # type: ignore[arg-type]
    except Exception:  # of sympy: of float(a < b), math.floor(a) and the like it finds no bounds
        if isinstance(value, torch.SymFloat | torch.SymInt):
            return "unknown"
        raise


def _fit_of_size(size: Number, low: torch.dtype, is_added: bool) -> NumberFit:
    facts = torch.finfo(low)
    if size > facts.max:
        return "beyond" if size != math.inf else ""
    if size < smallest_subnormal(low):
        return "vanishes" if size != 0 else ""
    return "lost" if is_added and size < facts.eps / 2 else ""


_PROBLEMS: dict[str, Callable[[torch.dtype], str]] = {
    "unknown": lambda low: f"may not fit into {dtype_name(low)}: torch cannot tell how large it is",
    "beyond": lambda low: f"is beyond {dtype_name(low)}'s largest number {torch.finfo(low).max:g}",
    "vanishes": lambda low: f"vanishes in {dtype_name(low)} (smallest number {smallest_subnormal(low):.3g})",
    "lost": lambda low: (
        f"is lost when it is added to a number near 1 in {dtype_name(low)} (eps/2 = {torch.finfo(low).eps / 2:.3g})"
    ),
}


def _scalars(node: fx.Node) -> Iterator[tuple[str, Number]]:
    """The numbers of the node's arithmetic, and what to call them; those read at each call are marked as `ASKED`."""
    op = ir.mark(node).op
    for position, keyword in _SCALARS.get(op, ()):
        given = ir.argument_of(node, position, keyword)
        if isinstance(given, (int, float, list, tuple)) and not isinstance(given, bool):
            yield from ((f"literal {number!r}", number) for number in _numbers_in(given))
        elif isinstance(given, fx.Node) and (number := number_now(given)) is not None:
            given.meta[ASKED] = op in _ADDENDS or given.meta.get(ASKED, False)
            value = number.node.hint if isinstance(number, torch.SymFloat | torch.SymInt) else number
            yield f"number {value!r} ({given.target if given.op == 'get_attr' else given.name})", number


def _numbers_in(given: Any) -> Iterator[Number]:
    """A number, or those in the lists that a tensor is made of."""
    if isinstance(given, (list, tuple)):
        for part in given:
            yield from _numbers_in(part)
    elif isinstance(given, (int, float)) and not isinstance(given, bool):
        yield given


def number_now(node: fx.Node) -> Number | None:
    """What a number is in the call of the capture: the model's, an argument, or computed of such alone.

    None for everything else, sizes among it.
    """
    value = node.meta.get("val")
    if isinstance(value, torch.SymFloat | torch.SymInt):
        return value if _is_of_numbers(value) else None
    if not _is_number(node) or not all(map(_is_number, computed_of([node]))):
        return None
    return cast(float, value)


def _is_of_numbers(value: torch.SymFloat | torch.SymInt) -> bool:
    """Whether one of Dynamo's numbers is known, and computed of Python's numbers alone: of no size of a tensor."""
    symbols = value.node.expr.free_symbols
    return value.node.hint is not None and all(_is_a_number(symbol, value.node.shape_env) for symbol in symbols)


def _is_a_number(symbol: Any, shapes: Any) -> bool:
    """Whether a symbol stands for a number of Python's: an attribute, an item or an argument by itself."""
    sources = shapes.var_to_sources.get(symbol)
    is_size = not sources or any(map(_is_of_a_tensor, sources))
    return symbol_is_type(symbol, SymT.FLOAT) or not is_size


def _is_of_a_tensor(source: Any) -> bool:
    """By its name: who converts without Dynamo does not import it."""
    return type(source).__name__ == "TensorPropertySource"


def computed_of(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes that others are computed of, and those themselves."""
    found, waiting = set(nodes), list(nodes)
    while waiting:
        new = [given for given in waiting.pop().all_input_nodes if given not in found]
        found.update(new)
        waiting += new
    return found


def _is_number(node: fx.Node) -> bool:
    is_read = node.op in ("get_attr", "placeholder")
    is_computed = node.op == "call_function" and bool(node.all_input_nodes)
    return type(node.meta.get("val")) in (int, float) and (is_read or is_computed)


Fit = Literal["normal", "small", "beyond"]


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
    if isinstance(tensor, FakeTensor) or (values := held(tensor)).numel() == 0:
        return "normal"
    with torch.no_grad():
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
