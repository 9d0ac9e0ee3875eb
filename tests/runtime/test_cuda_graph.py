"""What stands around a recording, with torch.cuda played by stand-ins; on a GPU tools/gpu_runtime shows the rest."""

import contextlib
import gc
import threading
import warnings
import weakref

import pytest
import torch

from fxamp.runtime import cuda_graph
from fxamp.runtime.cuda_graph import WAITS, Recorder, waits_noted


class Cuda:
    """Streams, modes and graphs by name."""

    def __init__(self, monkeypatch, breaks=None):
        self.mode, self.current, self.breaks, self.recorded, self.log = 0, "outside", breaks, [], []
        fakes = {
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "mode", {"default": 0, "warn": 1}.get(mode, mode)),
            "Stream": lambda device: f"one of {device}",
            "device": lambda device: contextlib.nullcontext(),
            "current_stream": lambda device=None: Stream(self.current),
            "set_stream": lambda stream: setattr(self, "current", stream.name),
            "CUDAGraph": lambda: type("Graph", (), {"replay": lambda self: None})(),
            "graph": self.graph,
            "graph_pool_handle": lambda: (0, 7),
            "current_device": lambda: 0,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        self.allocates_for = None
        monkeypatch.setattr(torch.cuda.memory, "_cuda_endAllocateToPool", self.end)
        monkeypatch.setattr(torch.cuda.memory, "_cuda_releasePool", lambda device, pool: self.log.append("release"))

    @contextlib.contextmanager
    def graph(self, graph, pool=None, stream=None, capture_error_mode="global"):
        if self.mode == 2:
            raise RuntimeError(WAITS)  # a recording begins with a wait
        if self.allocates_for:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")  # empty_cache(), of torch itself
        self.allocates_for = pool
        self.recorded.append((stream, capture_error_mode))
        outside, self.current = self.current, stream
        try:
            yield
        except Exception:
            if self.breaks:
                raise RuntimeError(self.breaks) from None  # and the stream stays, and the allocator: torch ends here
            self.allocates_for = None
            raise
        self.current, self.allocates_for = outside, None

    def end(self, device, pool):
        if self.allocates_for != pool:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.log.append("end")
        self.allocates_for = None


class Stream:
    device = torch.device("cpu")

    def __init__(self, name):
        self.name = name


def test_waits_of_this_thread_are_noted_and_other_warnings_go_on(monkeypatch):
    cuda = Cuda(monkeypatch)
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with waits_noted() as waits:
            assert cuda.mode == 1
            warnings.warn(WAITS, stacklevel=1)
            warnings.warn("something else", stacklevel=1)
            elsewhere = threading.Thread(target=warnings.warn, args=(WAITS,))
            elsewhere.start()
            elsewhere.join()
    assert len(waits) == 1 and waits[0].startswith(__file__)
    assert [str(warning.message) for warning in others] == ["something else"]
    assert cuda.mode == 0


def test_a_mode_of_the_users_is_left_alone(monkeypatch):
    cuda = Cuda(monkeypatch)
    cuda.mode = 2
    with waits_noted() as waits:
        assert cuda.mode == 2
    assert cuda.mode == 2 and waits == []


def test_a_recording_runs_on_the_warm_ups_stream_and_lets_other_threads_be(monkeypatch):
    cuda = Cuda(monkeypatch)
    replay, made = Recorder(torch.device("cpu")).record(lambda: cuda.current)
    assert made == "one of cpu" and callable(replay)
    assert cuda.recorded == [("one of cpu", "thread_local")] and cuda.current == "outside"


def test_a_user_who_forbids_waits_gets_a_recording(monkeypatch):
    cuda = Cuda(monkeypatch)
    cuda.mode = 2
    Recorder(torch.device("cpu")).record(lambda: None)
    assert cuda.mode == 2 and len(cuda.recorded) == 1


@pytest.mark.parametrize("breaks", [None, "operation failed due to a previous error during capture"])
def test_a_recording_that_fails_raises_what_broke_it_and_leaves_the_stream(monkeypatch, breaks):
    cuda = Cuda(monkeypatch, breaks)

    def step():
        raise ValueError("the model's own words")

    with pytest.raises(ValueError, match="the model's own words"):
        Recorder(torch.device("cpu")).record(step)
    # A small good recording came last, on the same device: its generator of random numbers is the one to free.
    assert cuda.current in ("outside", "one of cpu") and cuda.recorded[1:] == [("one of cpu", "global")]
    # A recording that torch has not ended would stay under way for the allocator, which then frees nothing any more.
    assert cuda.log == (["end", "release"] if breaks else [])


def test_a_recording_that_fails_keeps_nothing_of_what_it_made(monkeypatch):
    """Where memory ran out, the eager step that follows needs it."""
    Cuda(monkeypatch)
    made = []

    def step():
        activation = torch.ones(2)
        made.append(weakref.ref(activation))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    gc.disable()
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            Recorder(torch.device("cpu")).record(step)
        assert made[0]() is None
    finally:
        gc.enable()


def test_the_step_is_told_of_by_line(monkeypatch):
    Cuda(monkeypatch)
    with cuda_graph.waits_noted() as waits:
        warnings.warn_explicit(f"{WAITS} (Triggered internally)", UserWarning, "model.py", 7)
    assert waits == ["model.py:7"]
