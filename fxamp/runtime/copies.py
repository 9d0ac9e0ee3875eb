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
