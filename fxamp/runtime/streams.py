"""Tensors that are kept from call to call, where calls come on several of CUDA's streams."""

from collections.abc import Iterable

import torch


class MadeOn:
    """The stream on which tensors were made: another one waits for it before it reads them, once."""

    def __init__(self, device: torch.device) -> None:
        stream = torch.cuda.current_stream(device)
        self._device = device
        self._made = stream.record_event()
        self._known = {stream.cuda_stream}

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the current stream read the tensors; their memory is not handed out again before it has."""
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream in self._known:
            return
        stream.wait_event(self._made)
        for tensor in tensors:
            tensor.record_stream(stream)
        self._known.add(stream.cuda_stream)  # last: a thread that finds it here waits no more


def made_on(device: torch.device) -> MadeOn | None:
    """The present stream; None of a device that has no streams."""
    return MadeOn(device) if device.type == "cuda" else None
