"""Recurrent layers on fake tensors of a GPU, without asking cuDNN.

Before torch calls cuDNN it asks where in memory the weights lie (`try_get_weight_buf` in
aten/src/ATen/native/cudnn/RNN.cpp), and fake tensors lie nowhere. Without cuDNN it takes a set of ops for each step of
the sequence, which is slow to follow.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

SEQUENCES = frozenset((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu))
"""Recurrent layers on whole sequences."""


def asks_cudnn(target: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call would ask where its weights lie."""
    return target in SEQUENCES and isinstance(args[0], torch.Tensor) and args[0].device.type != "cpu"


def like_recurrent(data: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    """What a recurrent layer gives, by its sizes: (output, last states...).

        like_recurrent(x, states, weights, has_biases, layers, dropout, training, is_bidirectional, batch_first)
        like_recurrent(data, batch_sizes, states, weights, has_biases, layers, dropout, training, is_bidirectional)

    Args:
        data: (steps, batch, size), (batch, steps, size), or (elements, size) of a packed sequence.
        states: (layers * directions, batch, size) each; an LSTM's are two.
    """
    is_padded = isinstance(args[0], (tuple, list)) or args[0].is_floating_point()
    hx, weights, is_bidirectional = (
        args[0 if is_padded else 1],
        args[1 if is_padded else 2],
        args[6 if is_padded else 7],
    )
    states = list(hx) if isinstance(hx, (tuple, list)) else [hx]
    features = states[0].shape[-1] * (2 if is_bidirectional else 1)
    results = [data.new_empty((*data.shape[:-1], features)), *[data.new_empty(state.shape) for state in states]]
    if torch.is_grad_enabled() and any(value.requires_grad for value in (data, *states, *weights)):
        results = [result.requires_grad_().clone() for result in results]  # no leaves: they may be written in place
    return tuple(results)


@contextlib.contextmanager
def without_cudnn(model: nn.Module) -> Iterator[None]:
    """Let the recurrent layers inside a model, if there are any, run without cuDNN."""
    was = torch._C._get_cudnn_enabled()
    if not was or not any(isinstance(module, nn.RNNBase) for module in model.modules()):
        yield
        return
    try:
        torch._C._set_cudnn_enabled(False)
        yield
    finally:
        torch._C._set_cudnn_enabled(True)
