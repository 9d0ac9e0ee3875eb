"""What a look at a model leaves as it was."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from fxamp.capture.kept_items import containers_kept
from fxamp.capture.traces import State
from fxamp.numerics.modes import plain_modes
from fxamp.numerics.runner import switched_back
from fxamp.randomness import generators_kept
from fxamp.sparse import hold_the_same, is_sparse
from fxamp.tree import every_module


@contextlib.contextmanager
def state_kept(*models: nn.Module) -> Iterator[None]:
    """Attributes, what lists and dictionaries among them hold, buffers, and the random generators of Python, numpy and
    torch are afterwards what they were: a look must not train batch norm.

    So are blocks that ran as they are written, which they do until a backward that recomputes them is over. The
    caller's autocast and inference mode are off in between.
    """
    with plain_modes(), containers_kept(*models), _random_and_buffers_kept(*models), switched_back():
        yield


@contextlib.contextmanager
def _random_and_buffers_kept(*models: nn.Module) -> Iterator[None]:
    buffers = {id(value): value for model in models for value in model.buffers()}.values()
    saved = [(value, value.detach().clone()) for value in buffers]
    attributes = [State(model) for model in models]
    devices = sorted({value.device.index or 0 for model in models for value in model.parameters() if value.is_cuda})
    with generators_kept(devices):
        try:
            yield
        finally:
            for state in attributes:
                state.restore()
            for value, before in saved:
                if not hold_the_same(value, before):  # by .data: a backward that saved the buffer may still come
                    with torch.no_grad():
                        (value if is_sparse(value) else value.data).copy_(before)  # which a sparse one's .data ignores


@contextlib.contextmanager
def tensors_of(weights: nn.Module, model: nn.Module) -> Iterator[None]:
    """Let Dynamo, and what it leaves outside of its graphs, find the parameters and buffers of another model."""
    others = dict(every_module(weights))
    pairs = [(part, others.get(path, part)) for path, part in model.named_modules()] if weights is not model else []
    tables = [
        (getattr(part, table), getattr(other, table))
        for part, other in pairs
        if other is not part
        for table in ("_parameters", "_buffers")
    ]
    before = [dict(own) for own, _ in tables]
    for own, theirs in tables:
        own.update({name: theirs.get(name, tensor) for name, tensor in own.items()})
    try:
        yield
    finally:
        for (own, _), held in zip(tables, before, strict=True):
            own.update(held)
