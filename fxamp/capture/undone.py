"""A call of forward that may have to be taken back: one way to run it fails half way, and another one is tried."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxamp.capture.reached import Reached, named_by
from fxamp.capture.snapshots import Elements, Numbers, put_all_back
from fxamp.randomness import generator_states, set_generators


class Before:
    """All that a call may change, as it is before it: of the model, of what it is given, of what its functions reach,
    and the random generators that all code shares.

    Of parameters, which forward seldom writes, large ones are not copied. (Models that take elements of iterators run
    as they are written from the first call on.)
    """

    def __init__(self, forward: Callable[..., Any], model: nn.Module, given: Any) -> None:
        names, held = named_by(forward, model)
        modules = list(model.modules())
        kinds = {type(module) for module in modules}
        self._registered = [Elements(each) for part in modules for each in (part._parameters, part._buffers)]
        self._numbers: list[Numbers] = []
        with contextlib.suppress(RuntimeError):  # of inference tensors and transformed ones nobody can tell
            self._numbers += [Numbers(buffer, most=math.inf) for buffer in model.buffers()]
            self._numbers += [Numbers(weight) for weight in model.parameters()]
        self._reached = Reached(names, [*held, *kinds, model, given], most=math.inf)
        devices = {weight.device.index or 0 for weight in model.parameters() if weight.is_cuda}
        self._generators = generator_states(devices)

    def put_back(self) -> bool:
        """Make all as it was; whether that could be done."""
        is_whole = not any(each.is_lost for each in self._numbers)
        set_generators(self._generators)
        put_all_back([*self._registered, *self._numbers])
        return self._reached.put_back() and is_whole


def before_call(forward: Callable[..., Any], model: nn.Module, given: Any) -> Before | None:
    """The same; None while torch.compile traces, which runs nothing."""
    return None if torch.compiler.is_compiling() else Before(forward, model, given)
