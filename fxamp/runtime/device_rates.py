"""Learning rates on the device, where a CUDA graph reads them: a new rate is then no new graph."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fxamp.runtime import gradients


class DeviceRates:
    """A float32 tensor for the rate of each group whose optimizer can read it from the device; `capturable` is on.

    Args:
        optimizer: its state exists: what it keeps on the host is moved.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        make_capturable(optimizer)
        device = next(gradients.parameters(optimizer)).device
        # float32: fused kernels read nothing else.
        self.tensors = [torch.zeros((), dtype=torch.float32, device=device) for _ in self._groups()]

    def follow(self) -> None:
        """Write each present rate into its tensor, which graphs read."""
        for group, rate in zip(self._groups(), self.tensors, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                rate.copy_(group["lr"], non_blocking=True)
            else:
                rate.fill_(group["lr"])

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While capturing, groups hold device tensors; outside, what the user and schedulers put there."""
        groups = self._groups()
        given = [group["lr"] for group in groups]
        for group, rate in zip(groups, self.tensors, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, rate in zip(groups, given, strict=True):
                group["lr"] = rate

    def _groups(self) -> list[dict[str, Any]]:
        return [group for group in self.optimizer.param_groups if reads_rate_from_device(group)]


def reads_rate_from_device(group: dict[str, Any]) -> bool:
    """Whether the optimizer takes a device tensor as its rate; else a new rate means a new graph."""
    return bool(group.get("capturable") or group.get("fused"))


def make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Switch `capturable` on, where an optimizer has it, and move the numbers to the device that it keeps on the host.

    These are step counters; of NAdam a product, too.
    """
    for group in optimizer.param_groups:
        if "capturable" not in group:
            continue
        group["capturable"] = True
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() == 0:
                    state[name] = value.to(parameter.device)
