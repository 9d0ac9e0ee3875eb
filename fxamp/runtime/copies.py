"""Numbers on another device, and which tensors one kernel takes."""

from collections.abc import Iterator, Sequence

import torch


def copy_on(device: torch.device, number: torch.Tensor) -> torch.Tensor:
    """A tensor of a few numbers on `device`: itself where it is there, else a copy, for which only the host waits.

    torch copies to pinned host memory where nobody waits, and what reads it there may be first.
    """
    return number if number.device == device else number.to(device, non_blocking=device.type != "cpu")


def by_kind(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.device, list[int]]]:
    """(device, places in the list) of the tensors of each device and dtype: what one multi-tensor kernel takes."""
    if tensors:
        given: list[torch.Tensor | None] = list(tensors)
        found = torch._C._group_tensors_by_device_and_dtype([given], True)
        yield from ((device, places) for (device, _), (_, places) in found.items())


def wide_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """float32 copies of dense tensors, those of a device and dtype by one multi-tensor copy."""
    copies = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    for _, places in by_kind(tensors):
        torch._foreach_copy_([copies[place] for place in places], [tensors[place] for place in places])
    return copies


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of torch's own class, and dense."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided
