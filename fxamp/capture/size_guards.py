"""Conditions on sizes of inputs: what was found on symbolic ones is so under these, as torch.compile guards it."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxamp.sparse import is_sparse
from fxamp.sparse_fakes import like_sparse

log = logging.getLogger("fxamp")

# Attribute of an example's tensor: which of its sizes Dynamo compiles for without knowing them.
VARYING = "_fxamp_varying"


@dataclasses.dataclass(frozen=True)
class SizeGuard:
    """A condition on the sizes of inputs, which Dynamo can trace.

    Args:
        condition: of the tensors, by name: {"t0": ..., "t1": ...}.
        numbers: (position, value) of the inputs that are none.
    """

    condition: Callable[[dict[str, torch.Tensor]], bool]
    numbers: tuple[tuple[int, Any], ...]

    def __call__(self, inputs: list[Any]) -> bool:
        if any(inputs[position] != value for position, value in self.numbers):
            return False
        try:
            return self.condition({f"t{place}": value for place, value in enumerate(inputs) if is_tensor(value)})
        except ArithmeticError:  # forward divides by what is 0 for these sizes, and is to say so itself
            return False


_Found = TypeVar("_Found")


def symbolically(
    look: Callable[[FakeTensorMode, list[Any]], _Found], example: list[Any]
) -> tuple[SizeGuard, _Found] | None:
    """What is found on symbolic sizes, and the condition under which it is so; None where that cannot be told.

    Args:
        look: is given fake tensors whose varying sizes are symbols, and their mode.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.source import LocalSource  # takes a second to import, as what is behind it does
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    environment = ShapeEnv(duck_shape=False)  # sizes that are equal by chance are two
    try:
        mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
        inputs = [_symbolic(value, LocalSource(f"t{place}"), mode) for place, value in enumerate(example)]
        with torch.no_grad(), enable_python_dispatcher():  # some of torch 2.11's own forms take sizes for numbers
            found = look(mode, inputs)
        named = [(value, LocalSource(f"t{place}")) for place, value in enumerate(inputs) if is_tensor(value)]
        conditions = environment.produce_guards(
            [value for value, _ in named], [source for _, source in named], ignore_static=False
        )
        # The fakes lie in memory without gaps, so what is said of strides says nothing.
        of_sizes = [f"({text})" for text in conditions if ".stride()" not in text and ".storage_offset()" not in text]
        condition = eval(f"lambda L: {' and '.join(of_sizes) or True}", dict(SYMPY_INTERP))
        guard = SizeGuard(condition, _numbers(example))
        return (guard, found) if guard(example) else None
    except Exception as error:  # whatever torch's symbolic shapes do not know: the sizes of the example are known
        log.debug("sizes are not generalised: %s: %s", type(error).__name__, error)
        return None


def _symbolic(value: Any, source: Any, mode: FakeTensorMode) -> Any:
    """A fake tensor of the same rank, dtype and device, whose varying sizes may be any; anything else as it is."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    if not is_tensor(value):
        return value
    twin = torch.empty(value.shape, dtype=value.dtype, device="meta")
    sizes = [
        DimDynamic.DYNAMIC if dim in getattr(value, VARYING, ()) else DimDynamic.STATIC for dim in range(value.dim())
    ]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    made = mode.from_tensor(twin, source=source, symbolic_context=context)
    with mode:
        return empty_like(value, made.shape)


def of_any_size(value: Any) -> Any:
    """Of a tensor what stands for all its sizes, without its memory; anything else as it is."""
    if not is_tensor(value):
        return value
    made = value.new_empty(()).expand(value.shape)
    setattr(made, VARYING, tuple(range(made.dim())))
    return made


def empty_like(value: torch.Tensor, shape: Any) -> torch.Tensor:
    """A tensor of a shape, and of a value's dtype, device and layout."""
    if is_sparse(value):
        return like_sparse(value, shape)
    return torch.empty(shape, dtype=value.dtype, device=value.device)


def _numbers(inputs: list[Any]) -> tuple[tuple[int, Any], ...]:
    """(position, value) of the inputs that are no tensors."""
    return tuple((place, value) for place, value in enumerate(inputs) if not is_tensor(value))


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
