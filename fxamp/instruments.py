"""The measuring tools that take a model as it is: they convert it first, so they stand above `convert`."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from fxamp.convert import convert_as
from fxamp.dtypes import device_of
from fxamp.errors import OptionError
from fxamp.model.engine import engine_of
from fxamp.numerics.measuring import LossFn, check_batches, profile_converted, split_batch
from fxamp.numerics.ranges import Ranges
from fxamp.numerics.run import arguments
from fxamp.options import check_model, check_options
from fxamp.review.announce import only_looking
from fxamp.review.audit import Audit, audit_converted

_NOTHING = object()


@only_looking()
def profile(model: nn.Module, batches: Iterable[Any], loss_fn: LossFn | None = None, progress: bool = True) -> Ranges:
    """Run real data through the model in fp32, and record the exponents of every value and gradient.

        ranges = fxamp.profile(model, loader, loss_fn=nn.CrossEntropyLoss())
        print(ranges); ranges.plot("ranges.png")
        model = fxamp.convert(model, dtype=torch.float16, ranges=ranges)

    The model, its parameters' gradients and its buffers are left as they are.

    Args:
        model: converted or not.
        batches: each the inputs of one call (a tensor, a tuple, a dict); where `loss_fn` takes two arguments, each is
            (inputs, targets).
        loss_fn: gives a scalar loss of (output) or (output, targets); None: no gradients are recorded.
        progress: show a bar where tqdm is installed and standard error is a terminal.

    Returns:
        A histogram of exponents for each node, over all batches; `str()` is a table.

    Raises:
        OptionError: no batch, an empty one, inputs that are not finite, or a loss that is not.
    """
    if engine_of(model) is not None:
        return profile_converted(model, batches, loss_fn, progress)
    source = iter(check_batches(batches))
    first = next(source, _NOTHING)
    if first is _NOTHING:
        raise OptionError("profile got no batches. Give an iterable with at least one (a generator may be used up).")
    inputs, _ = split_batch(first, loss_fn)
    converted = _as_float16(model, inputs)
    return profile_converted(converted, chain([first], source), loss_fn, progress)


@only_looking()
def audit(model: nn.Module, inputs: Any) -> Audit:
    """Find what low precision would do to a model's numbers; nothing is changed.

        print(fxamp.audit(model, example_inputs))

    For models that stay on torch.autocast or torch.compile: literals low precision cannot hold, masks, epsilons,
    squares, numbers that overflow on `inputs`, integer positions, rounding before log or rsqrt, protected regions,
    GEMMs that Tensor Cores do not like, large float32 regions; each with its source line, the values it had on
    `inputs`, and a remedy.

    Args:
        model: converted or not; one that is not is looked at as float16 would run it.
        inputs: of one call, as `example_inputs` of convert(), with real numbers: the model runs on them once.

    Returns:
        The findings, the most severe first; `str()` is a list to read, and it can be written as JSON and SARIF.

    Raises:
        OptionError: no inputs, or inputs that the model does not take.
        CaptureError: the model cannot be captured; the message names the line.
    """
    if inputs is None:
        raise OptionError("audit runs the model once: give the inputs of one call, as example_inputs of convert().")
    converted = model if engine_of(model) is not None else _as_float16(model, inputs, pad_to=0)
    return audit_converted(converted, inputs)


def _as_float16(model: nn.Module, inputs: Any, pad_to: int = 8) -> nn.Module:
    """The model converted to be measured, also where FXAMP_DISABLE keeps it from being converted to train."""
    check_model(model)
    return convert_as(model, check_options(device_of(model), torch.float16, pad_to=pad_to), arguments(inputs))
