"""Sequences whose length a graph cannot change: pad them before they enter the model."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fxamp.errors import OptionError


@dataclasses.dataclass(frozen=True)
class PaddedBatch:
    """Padded sequences, and which of their elements are real.

    Attributes:
        values: the batch, its length a multiple of what was asked for.
        lengths: (batch,) int64, each sequence's own length; one number without a batch dimension.
        mask: bool, (batch, length) or (length,), True where an element is real.
    """

    values: Tensor
    lengths: Tensor
    mask: Tensor


def pad_to_multiple(
    batch: Tensor | Sequence[Tensor], multiple: int = 8, dim: int = -1, value: float = 0
) -> PaddedBatch:
    """The batch with its sequence dimension padded at the end to the next multiple.

        tokens = pad_to_multiple(tokens, 8)                # (32, 129) -> (32, 136)
        loss = cross_entropy(model(tokens.values)[tokens.mask], targets[...])
        pad_to_multiple([a, b, c], 8, dim=0).lengths       # sequences of different lengths, stacked

    A batch that fits already comes back as it is, without a copy.

    Args:
        batch: one tensor, or sequences of different lengths along `dim` and equal in all else, which are stacked
            along a new first dimension.
        multiple: in elements; 8 for fp16 and bf16 (16 bytes), 64 or 128 also fills whole tiles of a GEMM.
        dim: the sequence dimension: of the tensor, or of each sequence.
        value: what the new elements hold; for targets of a loss its `ignore_index`.

    Raises:
        OptionError: `multiple` is not a positive integer, `dim` is not a dimension, or there is nothing to pad.

    Source: Train with Mixed Precision, NVIDIA, section 4.1: "pad the sequence length to be a multiple of 8".
    """
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise OptionError(f"multiple={multiple!r} is not allowed. Give a positive integer, such as 8.")
    if isinstance(batch, Tensor):
        place = _dim_of(batch, dim)
        length = batch.shape[place]
        values = _pad_end(batch, place, -length % multiple, value)
        lengths = torch.full(batch.shape[: min(place, 1)], length, device=batch.device)
        return PaddedBatch(values, lengths, _mask(lengths, values.shape[place]))
    sequences = list(batch)
    if not sequences:
        raise OptionError("batch holds no sequences. Give at least one tensor.")
    return _stack(sequences, multiple, dim, value)


def _stack(sequences: list[Tensor], multiple: int, dim: int, value: float) -> PaddedBatch:
    places = {_dim_of(sequence, dim) for sequence in sequences}
    place = places.pop()
    shapes = {(*s.shape[:place], *s.shape[place + 1 :]) for s in sequences}
    if places or len(shapes) > 1:
        shown = ", ".join(str(tuple(sequence.shape)) for sequence in sequences[:4])
        raise OptionError(f"batch holds sequences of shapes {shown}: they may differ in dimension {dim} only.")
    lengths = torch.tensor([s.shape[place] for s in sequences], device=sequences[0].device)
    longest = int(lengths.max())
    total = longest + -longest % multiple
    padded = [_pad_end(s, place, total - s.shape[place], value) for s in sequences]
    return PaddedBatch(torch.stack(padded), lengths, _mask(lengths, total))


def _dim_of(tensor: Tensor, dim: int) -> int:
    if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        shape = tuple(tensor.shape)
        raise OptionError(f"dim={dim!r} is not a dimension of a tensor of shape {shape}.")
    return dim % tensor.dim()


def _pad_end(tensor: Tensor, dim: int, extra: int, value: float) -> Tensor:
    if not extra:
        return tensor
    behind = (0, 0) * (tensor.dim() - 1 - dim)
    return functional.pad(tensor, (*behind, 0, extra), value=value)


def _mask(lengths: Tensor, total: int) -> Tensor:
    positions = torch.arange(total, device=lengths.device)
    return positions < lengths.unsqueeze(-1)
