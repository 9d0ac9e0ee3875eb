"""Whether a CUDA graph is being recorded: its ops are noted, not run, so nobody may wait for their results."""

import torch


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on `device` now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
