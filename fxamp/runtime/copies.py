"""Numbers on another device, and which tensors one kernel takes."""

from collections.abc import Iterator, Sequence

import torch


def copy_on(device: torch.device, number: torch.Tensor) -> torch.Tensor:
    """A tensor of a few numbers on `device`: itself where it is there, else a copy, for which only the host waits.

    torch copies to pinned host memory where nobody waits, and what reads it there may be first.
    """
    return number if number.device == device else number.to(device, non_blocking=device.type != "cpu")


class Skipped:
    """Whether `found_inf` is above 0, as a bool tensor on any device that asks: it is copied there once."""

    def __init__(self, found_inf: torch.Tensor) -> None:
        self._found_inf = found_inf
        self._on: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """0-d, on `device`."""
        if device not in self._on:
            self._on[device] = copy_on(device, self._found_inf) > 0
        return self._on[device]


@torch.no_grad()
def select_(pairs: list[tuple[torch.Tensor, torch.Tensor]], skipped: Skipped) -> None:
    """For each (current, old): current becomes old, bit for bit, where the step is skipped. One kernel for each."""
    for current, old in pairs:
        torch.where(skipped.on(current.device), old, current, out=current)


def by_kind(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.device, list[int]]]:
    """(device, places in the list) of the tensors of each device and dtype: what one multi-tensor kernel takes."""
    if tensors:
        given: list[torch.Tensor | None] = list(tensors)
        found = torch._C._group_tensors_by_device_and_dtype([given], True)
        yield from ((device, places) for (device, _), (_, places) in found.items())


def wide_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """float32 copies of dense tensors, those of a device and dtype by one multi-tensor copy."""
    return _written([torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors], tensors)


def own_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of any tensors, dense ones of a device and floating dtype by one multi-tensor copy."""
    are_dense = [is_plain(tensor) and tensor.is_floating_point() for tensor in tensors]
    dense = [tensor for tensor, is_dense in zip(tensors, are_dense, strict=True) if is_dense]
    copies = iter(_written([torch.empty_like(tensor) for tensor in dense], dense))
    return [next(copies) if is_dense else t.clone() for t, is_dense in zip(tensors, are_dense, strict=True)]


def _written(copies: list[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    for _, places in by_kind(tensors):
        torch._foreach_copy_([copies[place] for place in places], [tensors[place] for place in places])
    return copies


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of torch's own class, and dense."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided
