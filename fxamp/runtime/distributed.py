"""Agreement between ranks: one found_inf for all, one norm for all, and the dtype gradients travel in."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fxamp.dtypes import LOW_DTYPES
from fxamp.errors import OptionError

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})  # a parameter made of a DTensor is a DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    if type(tensor) in PLAIN:
        return tensor
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def locals_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """`local` of each; asked of all at once, it costs little where none is a DTensor."""
    return tensors if set(map(type, tensors)) <= PLAIN else list(map(local, tensors))


def several_ranks() -> bool:
    """Whether this process is one of several in a job."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def groups_of(tensors: list[torch.Tensor]) -> list[Any]:
    """The process groups over which these tensors are DTensors, each once."""
    found: list[Any] = []
    for tensor in () if set(map(type, tensors)) <= PLAIN else tensors:
        if type(tensor) is torch.Tensor:
            continue
        mesh = getattr(tensor, "device_mesh", None)
        for group in mesh.get_all_groups() if mesh is not None else ():
            if group not in found:
                found.append(group)
    return found


def agree_(found_inf: torch.Tensor, groups: list[Any]) -> None:
    """Set `found_inf` (0-d float32) in place to its maximum over all ranks of every group."""
    for group in groups:
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group)


def shard_groups(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The process groups among which a DTensor is divided: those of its sharded mesh dimensions; () for a plain one."""
    mesh = None if type(tensor) is torch.Tensor else getattr(tensor, "device_mesh", None)
    if mesh is None:
        return ()
    return tuple(mesh.get_group(dim) for dim, placed in enumerate(tensor.placements) if placed.is_shard())  # type: ignore[attr-defined]


def without_partial(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor whose ranks hold addends, added up; any other tensor as it is."""
    placements = () if type(tensor) is torch.Tensor else getattr(tensor, "placements", ())
    if not any(placed.is_partial() for placed in placements):
        return tensor
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if placed.is_partial() else placed for placed in placements]
    added: torch.Tensor = tensor.redistribute(placements=whole)  # type: ignore[attr-defined]
    return added


def norm_over(norm: torch.Tensor, groups: tuple[Any, ...]) -> torch.Tensor:
    """Euclidean norm of shards held by all ranks of all groups, from this rank's (0-d float32)."""
    for group in groups:
        square = norm.square()
        dist.all_reduce(square, group=group)
        norm = square.sqrt()
    return norm


def reduce_gradients_in(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Choose the dtype in which DistributedDataParallel adds up gradients.

        ddp = DistributedDataParallel(converted)
        fxamp.reduce_gradients_in(ddp, torch.float16)      # float32 gradients at half the traffic
        fxamp.reduce_gradients_in(ddp, torch.float32)      # O2: sums of 16-bit gradients in float32

    Gradients are divided by the number of ranks before they are added, so that a sum of fp16 gradients
    overflows no sooner than a single one; one that does is found by the loss scaler on every rank alike.

    Args:
        model: DistributedDataParallel, before its first backward.
        dtype: torch.float32, torch.float16 or torch.bfloat16. Without this call DDP adds in the dtype the
            gradients have: float32 in O1, the parameters' in O2 and O3.

    Raises:
        OptionError: another model or dtype.
    """
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise OptionError(
            f"reduce_gradients_in() takes a DistributedDataParallel, got a {type(model).__name__}. For FSDP2 "
            "it is MixedPrecisionPolicy(reduce_dtype=...) of fully_shard."
        )
    if dtype not in (torch.float32, *LOW_DTYPES):
        raise OptionError(f"dtype={dtype!r} must be torch.float32, torch.float16 or torch.bfloat16.")
    model.register_comm_hook(model.process_group, _reducing_in(dtype))


def _reducing_in(dtype: torch.dtype) -> Callable[..., torch.futures.Future[torch.Tensor]]:
    # DDP reads these two annotations and refuses a hook without them.
    def reduce(
        group: Any,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        travelling = gradients.to(dtype).div_(dist.get_world_size(group))
        sent = dist.all_reduce(travelling, group=group, async_op=True)
        assert sent is not None
        future: torch.futures.Future[torch.Tensor] = sent.get_future().then(
            lambda done: gradients.copy_(done.value()[0])
        )
        return future

    return reduce
