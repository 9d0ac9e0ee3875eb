"""Whether what runs now is noted down for later: nobody may wait for the data then, which is another's by that time.

CUDA graphs, torch.compile, torch.export and torch.jit.trace do so.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch

from fxamp.errors import OptionError

_here = threading.local()


class RecordedTooSoonError(OptionError):
    """A call that is recorded would have to be captured first."""


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on `device` now goes into a CUDA graph."""
    return device.type == "cuda" and _is_cuda_capturing()


def _is_cuda_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def is_recorded() -> bool:
    """Whether calls of this thread go into anybody's graph, or run as those that will. Dynamo comes through here."""
    if torch.compiler.is_compiling():
        return True
    is_wanted = getattr(_here, "is_wanted", False)
    return is_wanted or torch._C._get_tracing_state() is not None or _is_cuda_capturing()


@contextlib.contextmanager
def as_if_recorded() -> Iterator[None]:
    """Calls of this thread run as those will that are recorded."""
    before = getattr(_here, "is_wanted", False)
    _here.is_wanted = True
    try:
        yield
    finally:
        _here.is_wanted = before
