"""Low copies of a bucket of weights, made by one multi-tensor copy; their gradients come back the same way.

    low_weight, low_bias = packed_cast(torch.float16, weight, bias)

A copy may be larger than its weight: what a padded GEMM reads costs no kernel of its own where rows are added. A weight
that is stored low (O2), with room for the rows behind it, is not copied at all: it is read with them.

The copies are fresh at every call, so no write to a parameter, by whatever route, is missed, and two forwards may
precede one backward. A backward after an optimizer step uses the weights of its forward, as under autocast.
"""

import dataclasses
import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from fxamp import recorded
from fxamp.runtime.optimizer_steps import steps_taken
from fxamp.runtime.padded_weights import (
    Growth,
    copy_grown,
    empty_grown,
    grown,
    grown_shape,
    grows_in_rows,
    in_room,
    own_part,
)
from fxamp.runtime.plain import must_be_plain
from fxamp.runtime.recurrent_memory import RecurrentCall, empty_together
from fxamp.runtime.streams import MadeOn, made_on
from fxamp.runtime.writes import versions_of

Growths = tuple[Growth | None, ...]
"""One for each weight of a bucket: how its copy grows, None where it does not."""
Calls = tuple[RecurrentCall, ...]


def packed_cast(
    dtype: torch.dtype,
    *weights: torch.Tensor,
    pads: Growths | None = None,
    are_buffers: bool = False,
    recurrent: Calls = (),
) -> tuple[torch.Tensor, ...]:
    """Fresh copies of `weights` in `dtype`, with their strides; gradients flow back in the weights' dtype.

    One `_foreach_copy_` each way, also for copies that grow by rows; a copy that grows otherwise is filled and
    written by itself; a low weight that has the room is a view. Plain `.to` (and a pad) where that would not do: while
    torch.compile, torch.export or torch.jit trace (Inductor fuses plain casts), under functorch transforms and
    forward-mode AD, and for tensor subclasses. Likewise for buffers where one holds what an earlier call computed, with
    its history: backward would walk through the history of each of a bucket, and that of an earlier call is gone.

    Args:
        dtype: of the copies.
        weights: all of one dtype, on one device.
        pads: how each copy grows; None where none does.
        are_buffers: whether these are buffers, which have no gradient as a rule; otherwise they are parameters.
        recurrent: the calls whose weights these are: cuDNN reads the copies for one of them as one piece of memory.
    """
    if must_be_plain(*weights) or (are_buffers and any([buffer.requires_grad for buffer in weights])):
        low = tuple([weight.to(dtype) for weight in weights])
        return low if pads is None else tuple(map(_grown, low, pads))
    if torch.is_grad_enabled() and not are_buffers:
        return _apply(dtype, pads, recurrent, *weights)  # type: ignore[no-untyped-call, no-any-return]
    return _fresh(weights, dtype, pads, recurrent)


def _grown(low: torch.Tensor, growth: Growth | None) -> torch.Tensor:
    return low if growth is None else grown(low, *growth)


def _fresh(
    weights: tuple[torch.Tensor, ...], dtype: torch.dtype, pads: Growths | None, recurrent: Calls
) -> tuple[torch.Tensor, ...]:
    places: dict[int, torch.Tensor] = {}
    if recurrent:
        growths = pads or (None,) * len(weights)
        shapes = [
            weight.shape if growth is None else grown_shape(weight.shape, growth[0])
            for weight, growth in zip(weights, growths, strict=True)
        ]
        places = empty_together(recurrent, shapes, dtype, weights[0])
    if pads is not None:
        return _grown_copies(weights, dtype, pads, places)
    if not places:
        return _copies(weights, dtype)
    copies = tuple(
        [places[at] if at in places else torch.empty_like(each, dtype=dtype) for at, each in enumerate(weights)]
    )
    torch._foreach_copy_(copies, weights)
    return copies


def _copies(tensors: tuple[torch.Tensor, ...] | list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    copies = tuple([torch.empty_like(tensor, dtype=dtype) for tensor in tensors])
    torch._foreach_copy_(copies, tensors)
    return copies


def _grown_copies(
    weights: Sequence[torch.Tensor], dtype: torch.dtype, pads: Growths, places: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    made, parts, sources, zeros = [], [], [], []
    for number, (weight, growth) in enumerate(zip(weights, pads, strict=True)):
        place = places.get(number)
        if growth is None:
            copy = part = torch.empty_like(weight, dtype=dtype) if place is None else place
        elif place is None and weight.dtype == dtype and (view := in_room(weight, growth)) is not None:
            made.append(view)
            continue
        elif grows_in_rows(weight, growth[0]):
            copy, size = empty_grown(weight, growth[0], dtype) if place is None else place, weight.size(0)
            part, room = copy[:size], copy[size:]
            if growth[1]:
                room.fill_(growth[1])
            else:
                zeros.append(room)
        else:
            made.append(copy_grown(weight, growth, dtype, place))
            continue
        made.append(copy)
        parts.append(part)
        sources.append(weight)
    if zeros:
        torch._foreach_zero_(zeros)
    if parts:
        torch._foreach_copy_(parts, sources)
    return tuple(made)


class _PackedCast(torch.autograd.Function):
    """The cast of one bucket.

    1. A weight without a gradient (unused, or unused in this backward) gets None, not zeros: nothing decays it.
    2. A copy of a frozen weight does not require a gradient, so none is computed for it.
    3. Of the gradient of a copy that grew, the weight's own part comes back.
    4. Sparse and expanded gradients, gradients that will be differentiated, and batches of gradients
       (`is_grads_batched`) take plain `.to`.
    """

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, pads: Growths | None, recurrent: Calls, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.pads = weights[0].dtype, pads
        copies = _fresh(weights, dtype, pads, recurrent)
        if pads is not None:
            ctx.shapes = [weight.shape for weight in weights]
        is_needed = ctx.needs_input_grad[3:]
        if False in is_needed:
            ctx.mark_non_differentiable(*[copies[i] for i, needed in enumerate(is_needed) if not needed])
        return copies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        is_differentiated = torch.is_grad_enabled()
        is_plain = not is_differentiated and not _are_batched(grads)
        if ctx.pads is None and is_plain:
            usual = [grad for grad in grads if grad is not None and grad.is_contiguous()]
            if len(usual) == len(grads):
                return None, None, None, *_copies(usual, ctx.dtype)
        if ctx.pads is not None:
            grads = tuple(
                [_own_gradient(*of_one, ctx.dtype) for of_one in zip(grads, ctx.shapes, ctx.pads, strict=True)]
            )
        back: list[torch.Tensor | None] = list(grads)
        together: list[int] = []
        for position, grad in enumerate(grads):
            if grad is None or grad.dtype == ctx.dtype:
                continue
            if is_plain and (grad.is_contiguous() or _is_dense(grad)):
                together.append(position)
            else:
                back[position] = grad.to(ctx.dtype)
        if together:
            copies = _copies([grads[position] for position in together], ctx.dtype)  # type: ignore[misc]
            for position, copy in zip(together, copies, strict=True):
                back[position] = copy
        return None, None, None, *back


def _are_batched(grads: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether these are gradients for many gradients of the results at once; then each of them is."""
    first = next((grad for grad in grads if grad is not None), None)
    return first is not None and torch._C._functorch.is_legacy_batchedtensor(first)


def _own_gradient(
    grad: torch.Tensor | None, shape: torch.Size, growth: Growth | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """What of a gradient is the weight's own: a view where rows were added, else converted at once."""
    if grad is None or growth is None:
        return grad
    part = own_part(grad, shape, growth[0])
    return part if part.dim() == len(shape) and _is_dense(part) else part.to(dtype).reshape(shape)


def _is_dense(grad: torch.Tensor) -> bool:
    """Whether a copy has the gradient's strides; sparse and expanded ones have none."""
    return grad.layout is torch.strided and bool(torch.ops.aten.is_non_overlapping_and_dense(grad))


# What Function.apply ends in; before that it unwraps what a functorch transform left behind, tensor by tensor
# (80 us for 160 weights), and none is active here.
_apply = super(torch.autograd.Function, _PackedCast).apply


class KeptCast:
    """Low copies that are kept from call to call while gradients are off: what `freeze` puts in a graph.

    They are made again when a weight was moved, replaced or written in place, and after a step of any optimizer: fused
    ones leave no trace in a tensor. A write through `p.data` cannot be seen. While gradients are on it is
    `packed_cast`; so it is while a CUDA graph is recorded, whose replays read the weights as they are then.
    """

    def __init__(self, number: int) -> None:
        self.__name__ = self.__qualname__ = f"kept_cast_{number}"  # generated code needs a name for it
        self._kept: _Kept | None = None

    def __call__(
        self,
        dtype: torch.dtype,
        *weights: torch.Tensor,
        pads: Growths | None = None,
        are_buffers: bool = False,
        recurrent: Calls = (),
    ) -> tuple[torch.Tensor, ...]:
        if (
            torch.is_grad_enabled()
            or must_be_plain(*weights)
            or not _can_be_kept(weights)
            or recorded.is_capturing(weights[0].device)
        ):
            return packed_cast(dtype, *weights, pads=pads, are_buffers=are_buffers, recurrent=recurrent)
        kept = self._kept  # read once: copies of a model share this, and may be called by other threads
        if kept is None or not kept.is_of(weights):
            # Before the copies: a write meanwhile is seen by the next call.
            seen, storages = _Kept.state_of(weights), _storages(weights)
            with torch.inference_mode(False):  # an inference tensor could not be used outside inference mode
                copies = packed_cast(dtype, *[weight.detach() for weight in weights], pads=pads, recurrent=recurrent)
            made = made_on(weights[0].device)
            self._kept = kept = _Kept(tuple(map(weakref.ref, weights)), storages, seen, copies, made)
        elif kept.made is not None:
            kept.made.lend(kept.copies)
        return kept.copies

    def forget(self) -> None:
        """Make the copies again at the next call."""
        self._kept = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}  # weak references cannot be pickled


@dataclasses.dataclass(frozen=True)
class _Kept:
    """Copies, and of which tensors in which state: an address and a version alone may be those of another one, or of
    the same one with other memory (`.data = `).
    """

    weights: tuple[weakref.ref[torch.Tensor], ...]
    storages: tuple[StorageWeakRef, ...]
    state: tuple[Any, ...]
    copies: tuple[torch.Tensor, ...]
    made: MadeOn | None

    def is_of(self, weights: tuple[torch.Tensor, ...]) -> bool:
        same = all(seen() is weight for seen, weight in zip(self.weights, weights, strict=True))
        same = same and self.state == self.state_of(weights)
        return same and not any(map(_IS_GONE, map(_NUMBER, self.storages)))

    @staticmethod
    def state_of(weights: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        lie = [(weight.data_ptr(), weight.shape, weight.stride()) for weight in weights]
        return steps_taken(), lie, versions_of(weights)


_NUMBER = operator.attrgetter("cdata")
_IS_GONE = torch.UntypedStorage._expired  # what `StorageWeakRef.expired` asks, which takes 0.6 us


def _storages(weights: tuple[torch.Tensor, ...]) -> tuple[StorageWeakRef, ...]:
    return tuple([StorageWeakRef(weight.untyped_storage()) for weight in weights])  # type: ignore[no-untyped-call]


def _can_be_kept(weights: tuple[torch.Tensor, ...]) -> bool:
    first = weights[0]
    return not (isinstance(first, FakeTensor) or first.is_inference() or first.is_meta)
