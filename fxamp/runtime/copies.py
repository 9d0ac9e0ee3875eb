"""Numbers on another device."""

import torch


def copy_on(device: torch.device, number: torch.Tensor) -> torch.Tensor:
    """A tensor of a few numbers on `device`: itself where it is there, else a copy, for which only the host waits.

    torch copies to pinned host memory where nobody waits, and what reads it there may be first.
    """
    return number.to(device, non_blocking=device.type != "cpu")
