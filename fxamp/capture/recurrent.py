"""Recurrent modules as one graph node on explicit weights.

    output, hidden = nn.LSTM(8, 16)(x)
    lstm(x, (zeros, zeros), [weight_ih_l0, ...], ...)     # in the graph

The modules' own forwards ask for sizes and keep a list of weights, which binds a graph to shapes and to tensors; what
they compute is said here again without either. A `PackedSequence` is taken apart and put together as they do.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import rnn

from fxamp.capture.proxies import rank_of

_KERNELS: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}
_NAMES = frozenset(kernel.__name__ for kernel in _KERNELS.values())
PackedSequence: Any = rnn.PackedSequence


def is_recurrent(module: nn.Module) -> bool:
    """Whether the module's forward is one that is said here: torch's own, also in a subclass."""
    return type(module).forward in _FORWARDS


def as_node(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], has_example: bool
) -> Callable[..., Any] | None:
    """What to call in the place of a recurrent module's forward; None where the module must stay whole.

    Args:
        args, kwargs: of the call.
        has_example: whether values are known at all; without them inputs are taken to be batched.
    """
    if not is_recurrent(module):
        return None
    given = args[0] if args else kwargs.get("input")
    batched = 2 if isinstance(module, nn.RNNCellBase) else 3
    rank = batched if not has_example or isinstance(given, rnn.PackedSequence) else rank_of(given)
    if rank not in (batched - 1, batched):
        return None
    return functools.partial(_FORWARDS[type(module).forward], module, rank == batched)


# ------------------------------------------------------------------------------------------------- sequences


def _sequence(module: Any, is_batched: bool, input: Any, hx: Any = None) -> Any:
    if isinstance(input, rnn.PackedSequence):
        return _packed(module, input, hx)
    batch_dim = 0 if module.batch_first else 1
    if not is_batched:
        input = input.unsqueeze(batch_dim)
        hx = _each(hx, lambda state: state.unsqueeze(1))
    states = _initial(module, input, input.size(batch_dim)) if hx is None else hx
    output, *last = _run(module, (input, _as_given(module, states)), (module.batch_first,))
    hidden = tuple(last) if module.mode == "LSTM" else last[0]
    if not is_batched:
        return output.squeeze(batch_dim), _each(hidden, lambda state: state.squeeze(1))
    return output, hidden


def _packed(module: Any, packed: Any, hx: Any) -> Any:
    data, batch_sizes, to_sorted, to_unsorted = packed
    if hx is None:
        states = _initial(module, data, batch_sizes[0])
    else:
        states = _each(hx, lambda state: _reordered(state, to_sorted))
    output, *last = _run(module, (data, batch_sizes, _as_given(module, states)), ())
    hidden = _each(tuple(last) if module.mode == "LSTM" else last[0], lambda state: _reordered(state, to_unsorted))
    return PackedSequence(output, batch_sizes, to_sorted, to_unsorted), hidden


def _run(module: Any, inputs: tuple[Any, ...], layout: tuple[Any, ...]) -> list[Any]:
    """Output and last states, as items of the kernel's result."""
    weights = [getattr(module, name) for name in module._flat_weights_names]
    numbers = (module.bias, module.num_layers, module.dropout, module.training, module.bidirectional)
    result = _KERNELS[module.mode](*inputs, weights, *numbers, *layout)
    return [result[position] for position in range(3 if module.mode == "LSTM" else 2)]


def _initial(module: Any, data: Any, batch: Any) -> Any:
    layers = module.num_layers * (2 if module.bidirectional else 1)
    hidden = data.new_zeros((layers, batch, module.proj_size or module.hidden_size))
    return (hidden, data.new_zeros((layers, batch, module.hidden_size))) if module.mode == "LSTM" else hidden


def _reordered(state: Any, permutation: Any) -> Any:
    return state if permutation is None else state.index_select(1, permutation)


def _as_given(module: Any, states: Any) -> Any:
    """An LSTM's states as a tuple of two."""
    return (states[0], states[1]) if module.mode == "LSTM" else states


def _each(states: Any, change: Callable[[Any], Any]) -> Any:
    if states is None:
        return None
    return tuple(change(state) for state in states) if isinstance(states, (tuple, list)) else change(states)


def name_first_states(graph: fx.Graph) -> None:
    """`zeros(4, 3, 16, dtype=float32)` -> `x.new_zeros((4, 3, 16))` for a layer on x, in a graph of Dynamo's.

    torch's own forwards ask for x's dtype, which Dynamo writes out; x may have another one by the time it is read.
    """
    for node in graph.nodes:
        if node.target is not torch.zeros or not _stands_in_forward(node):
            continue
        (reader,) = node.users
        node.op, node.target = "call_method", "new_zeros"
        node.args, node.kwargs = (reader.args[0], node.args), {}


def _stands_in_forward(node: fx.Node) -> bool:
    """Whether torch's own forward of a recurrent layer makes these zeros, for the layer's kernel alone."""
    owners = [owner for _, owner in node.meta["nn_module_stack"].values()]
    readers = [getattr(user.target, "__name__", "") for user in node.users]
    return bool(owners) and owners[-1].forward in _FORWARDS and len(readers) == 1 and readers[0] in _NAMES


# ----------------------------------------------------------------------------------------------------- cells


def _lstm_cell(module: Any, is_batched: bool, input: Any, hx: Any = None) -> Any:
    if hx is not None:
        hx = (hx[0], hx[1])
    return _cell(module, torch.lstm_cell, is_batched, input, hx, 2)


def _gru_cell(module: Any, is_batched: bool, input: Any, hx: Any = None) -> Any:
    return _cell(module, torch.gru_cell, is_batched, input, hx, 1)


def _rnn_cell(module: Any, is_batched: bool, input: Any, hx: Any = None) -> Any:
    kernel = {"tanh": torch.rnn_tanh_cell, "relu": torch.rnn_relu_cell}[module.nonlinearity]
    return _cell(module, kernel, is_batched, input, hx, 1)


def _cell(module: Any, kernel: Callable[..., Any], is_batched: bool, input: Any, hx: Any, count: int) -> Any:
    if not is_batched:
        input = input.unsqueeze(0)
        hx = _each(hx, lambda state: state.unsqueeze(0))
    if hx is None:
        zeros = input.new_zeros((input.size(0), module.hidden_size))
        hx = zeros if count == 1 else (zeros, zeros)
    result = kernel(input, hx, module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh)
    states = result if count == 1 else (result[0], result[1])
    return states if is_batched else _each(states, lambda state: state.squeeze(0))


_FORWARDS: dict[Any, Callable[..., Any]] = {
    nn.LSTM.forward: _sequence,
    nn.GRU.forward: _sequence,
    nn.RNN.forward: _sequence,
    nn.LSTMCell.forward: _lstm_cell,
    nn.GRUCell.forward: _gru_cell,
    nn.RNNCell.forward: _rnn_cell,
}
