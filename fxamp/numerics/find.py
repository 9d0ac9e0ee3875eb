"""Name the op that overflowed in a call."""

from typing import Any

from torch import nn

from fxamp.model.engine import engine_of
from fxamp.model.unconverted import check_left
from fxamp.numerics.between import given_back_inside, made_around, of_gradient
from fxamp.numerics.flow import CallFlow
from fxamp.numerics.nan import BadNode, Loss, bad_code, describe
from fxamp.numerics.origin import is_of_output, of_loss, of_output, origin_of, vanished_origin
from fxamp.numerics.run import call_of, check_module, in_float32
from fxamp.numerics.watcher import watch_flow


def find_nan(converted: nn.Module, inputs: Any, loss_fn: Loss | None = None) -> BadNode | None:
    """The first node, forward or backward, whose output is not finite; None where all that matters is finite.

        print(fxamp.find_nan(model, (x,), loss_fn=lambda output: scaler.scale(criterion(output, y))))

    Where forward runs as it is written, the op and the line of code that stands in no graph are named too.
    Infinities that are written in the code or come in with a mask are left out, and so are those that the model gives
    back as float32 does (masked scores); a GEMM that computes with one is named. Of those that are made, the one that
    reaches the output is named, or else the one that reaches the gradient of a parameter or an input, or else the first
    that float32 has not.

    Args:
        inputs: of one call, as `example_inputs` of convert().
        loss_fn: gives a scalar of the output, scaled as in training; without it only the forward is looked at.

    Returns:
        The node, what it read, whether float32 is finite there, and the deny entries that mend it; `str()` tells it.

    Raises:
        OptionError: the model was not converted, no inputs, or a loss that is no scalar.
    """
    check_module(converted, "model")
    if engine_of(converted) is None:
        check_left(converted, "find_nan looks at nothing")
        return None
    call = call_of(converted, inputs)
    flow = watch_flow(call, loss_fn)
    if flow.is_finite and not flow.has_bad_values:
        return None
    exact = watch_flow(call, loss_fn, in_float32(call), as_float32=True)
    origin = origin_of(flow, exact)
    made = made_around(flow, exact, origin)
    if made is not None:
        return bad_code(made, flow, exact)
    if origin is None or is_of_output(origin):
        origin = of_loss(flow) or origin or vanished_origin(flow, exact) or of_output(flow, exact) or of_gradient(flow)
    if origin is None and flow.error is not None:  # what stopped it, float32 has too
        origin = vanished_origin(flow, CallFlow())
    elif origin is not None:
        origin = given_back_inside(flow, origin)
    return None if origin is None else describe(call, flow, origin, loss_fn, exact)
