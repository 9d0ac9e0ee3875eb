"""Memory for the weights of a recurrent layer as cuDNN reads them: one piece, in cuDNN's order.

Weights that lie apart are copied into one piece by torch at every call, which keeps it for backward as well, and warns
(`try_get_weight_buf` and `_cudnn_rnn` in aten/src/ATen/native/cudnn/RNN.cpp). For parameters that is what
`nn.RNNBase.flatten_parameters` is for; here the same is done for their low copies.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

GATES = {"gru": 3, "lstm": 4, "rnn_relu": 1, "rnn_tanh": 1}
"""Recurrent ops on whole sequences, and the blocks in the rows of their weights."""

Shapes = tuple[tuple[int, ...], ...]


class RecurrentCall(NamedTuple):
    """A recurrent call on a whole sequence, all of whose weights are copied together.

    Attributes:
        op: as in `GATES`.
        numbers: of its weights among those that are copied, in the order of the call.
    """

    op: str
    layers: int
    is_bidirectional: bool
    numbers: tuple[int, ...]


def empty_together(
    calls: Sequence[RecurrentCall], shapes: Sequence[Sequence[int]], dtype: torch.dtype, like: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Memory for the copies that cuDNN will read as one piece, by their number; none where it will not.

    The tensors of a call share one storage and are no views, so autograd takes each for a result of its own.

    Args:
        shapes: of all copies that are made together.
        like: one of their weights.
    """
    if not _reads_whole(like):
        return {}
    found: dict[int, torch.Tensor] = {}
    for call in calls:
        places = _places(call, tuple(tuple(shapes[number]) for number in call.numbers), dtype, like.device)
        if places is None:
            continue
        size, offsets, has_gaps = places
        whole = torch.empty(size, dtype=dtype, device=like.device)
        if has_gaps:  # such as the biases that cuDNN always reads: those of a layer without biases are zeros
            whole.zero_()
        storage = whole.untyped_storage()
        for number, offset in zip(call.numbers, offsets, strict=True):
            shape = tuple(shapes[number])
            stride = (shape[1], 1) if len(shape) == 2 else (1,)
            found[number] = whole.new_empty(0).set_(storage, offset, shape, stride)
    return found


def recurrent_layers(model: nn.Module) -> list[nn.RNNBase]:
    """The layers whose weights a kernel reads together."""
    return [module for module in model.modules() if isinstance(module, nn.RNNBase)]


def lay_together(model: nn.Module, is_low: Callable[[object], bool]) -> None:
    """Move the low weights of each recurrent layer to memory that is one piece, where one is read.

    As with any `.data = `, their version counters do not see it.
    """
    for layer in recurrent_layers(model):
        if all(map(is_low, layer.parameters())):
            _lay_together(layer)


def _lay_together(layer: nn.RNNBase) -> None:
    weights: list[torch.Tensor] = [getattr(layer, name) for name in layer._flat_weights_names]
    kinds = {(type(weight), weight.dtype, weight.device) for weight in weights}
    if len(kinds) > 1 or type(weights[0]) is not nn.Parameter:  # a shard (DTensor), say, has no memory of its own
        return
    numbers = tuple(range(len(weights)))
    call = RecurrentCall(layer.mode.lower(), layer.num_layers, layer.bidirectional, numbers)
    shapes = [weight.shape for weight in weights]
    places = empty_together((call,), shapes, weights[0].dtype, weights[0])
    with torch.no_grad():
        for number, place in places.items():
            weights[number].data = place.copy_(weights[number])


def _reads_whole(weight: torch.Tensor) -> bool:
    if not weight.is_cuda or isinstance(weight, FakeTensor):
        return False
    return torch.backends.cudnn.enabled and torch._use_cudnn_rnn_flatten_weight()


@functools.lru_cache(maxsize=256)
def _places(
    call: RecurrentCall, shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> tuple[int, tuple[int, ...], bool] | None:
    """(elements of the whole, where each weight begins, whether some belong to no weight); None if cuDNN says none."""
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
            weights = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
            size = _flatten(call, weights)
    except RuntimeError:  # a dtype or a size it has no layout for: torch runs its own kernels, which need none
        return None
    offsets = tuple(int(weight.storage_offset()) for weight in weights)
    return size, offsets, size > sum(weight.numel() for weight in weights)


def _flatten(call: RecurrentCall, weights: list[torch.Tensor]) -> int:
    """Move the weights into one piece, as torch does it for modules; its number of elements."""
    from torch.backends.cudnn import rnn  # there is none in a build without CUDA

    directions = 1 + call.is_bidirectional
    per_layer = len(weights) // (call.layers * directions)
    is_projected = per_layer % 2 == 1
    whole = torch._cudnn_rnn_flatten_weight(
        weights,
        per_layer,
        weights[0].size(1),
        rnn.get_cudnn_mode(call.op.upper()),  # type: ignore[no-untyped-call]
        weights[0].size(0) // GATES[call.op],
        weights[per_layer - 1].size(0) if is_projected else 0,
        call.layers,
        False,
        call.is_bidirectional,
    )
    return whole.numel()
