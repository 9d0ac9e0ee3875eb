"""Recording CUDA graphs: on which stream, what stands in the way, and how to come back where it fails."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")
WAITS = "called a synchronizing CUDA operation"  # torch's words


class Recorder:
    """Records graphs of what runs on one device, on a stream of its own.

    Steps before the first recording run on the same stream (`warm_up`): autograd's nodes that add up gradients belong
    to the stream on which they were made, and live on where somebody keeps them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[list[str]]:
        """Run an eager step as it will be recorded; gives where it waited for the device, which a graph cannot."""
        outside = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outside)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream), waits_noted() as waits:
            yield waits
        outside.wait_stream(self.stream)

    def record(self, step: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record `step`, which is not executed; threads that load data may use CUDA meanwhile.

        Returns:
            what replays it, and what it returned: tensors that each replay fills.
        """
        graph, broke = torch.cuda.CUDAGraph(), list[BaseException]()
        with torch.cuda.device(self.device), _waits_allowed():
            outside, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
            try:
                with torch.cuda.graph(graph, pool, self.stream, "thread_local"):
                    try:
                        made = step()
                    except BaseException as error:
                        broke.append(error)
                        raise
            except BaseException as error:
                _recover(outside, pool)
                # CUDA's word on the recording follows from the first. Popped: held here it would hold what its frames
                # hold, all activations of the step, until the next garbage collection.
                raise broke.pop() if broke else error  # noqa: B904
        return graph.replay, made


def _recover(stream: torch.cuda.Stream, pool: Any) -> None:
    """Undo what a recording leaves behind that CUDA has invalidated.

    1. torch.cuda.graph stays on its stream.
    2. The allocator takes the recording to be under way: it gives no memory back, and `empty_cache()`, with which the
       next recording begins, fails (`captures_underway` in c10/cuda/CUDACachingAllocator.cpp).
    3. The generator of random numbers refuses to be used outside of a graph until another one was recorded (pytorch
       issue 171263).
    """
    torch.cuda.set_stream(stream)
    with contextlib.suppress(RuntimeError):  # torch has ended it: then the pool is its graph's to release
        device = torch.cuda.current_device()
        torch.cuda.memory._cuda_endAllocateToPool(device, pool)  # type: ignore[attr-defined]
        torch.cuda.memory._cuda_releasePool(device, pool)  # type: ignore[attr-defined]
    # torch's own stream for recordings may be another device's.
    other = torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=other):
        torch.zeros((), device=stream.device)


@contextlib.contextmanager
def _waits_allowed() -> Iterator[None]:
    """Recording begins with waiting for the device, which a user who looks for waits may have forbidden."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextlib.contextmanager
def waits_noted() -> Iterator[list[str]]:
    """Collects "file:line" of each operation for which this thread waits for the device."""
    notes: list[str] = []
    if torch.cuda.get_sync_debug_mode() != 0:  # the user watches
        yield notes
        return
    here = threading.get_ident()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=WAITS)
        show = warnings.showwarning

        def note(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **others: Any) -> None:
            if WAITS not in str(message):
                show(message, category, filename, lineno, *rest, **others)
            elif threading.get_ident() == here:
                notes.append(f"{filename}:{lineno}")

        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield notes
        finally:
            torch.cuda.set_sync_debug_mode("default")
