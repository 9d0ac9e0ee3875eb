"""What stands around a recording, with torch.cuda played by stand-ins; on a GPU tools/gpu_runtime shows the rest."""

import contextlib
import threading
import warnings

import pytest
import torch

from fxamp.runtime import cuda_graph
from fxamp.runtime.cuda_graph import WAITS, Recorder, waits_noted


class Cuda:
    """Streams, modes and graphs by name."""

    def __init__(self, monkeypatch, breaks=None):
        self.mode, self.current, self.breaks, self.recorded = 0, "outside", breaks, []
        fakes = {
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "mode", {"default": 0, "warn": 1}[mode]),
            "Stream": lambda device: "own",
            "device": lambda device: contextlib.nullcontext(),
            "current_stream": lambda device=None: Stream(self.current),
            "set_stream": lambda stream: setattr(self, "current", stream.name),
            "CUDAGraph": lambda: type("Graph", (), {"replay": lambda self: None})(),
            "graph": self.graph,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    @contextlib.contextmanager
    def graph(self, graph, stream=None, capture_error_mode="global"):
        self.recorded.append((stream, capture_error_mode))
        outside, self.current = self.current, stream
        try:
            yield
        except Exception:
            if self.breaks:
                raise RuntimeError(self.breaks) from None  # and the stream stays: torch leaves it last
            raise
        self.current = outside


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
    assert made == "own" and callable(replay)
    assert cuda.recorded == [("own", "thread_local")] and cuda.current == "outside"


@pytest.mark.parametrize("breaks", [None, "operation failed due to a previous error during capture"])
def test_a_recording_that_fails_raises_what_broke_it_and_leaves_the_stream(monkeypatch, breaks):
    cuda = Cuda(monkeypatch, breaks)

    def step():
        raise ValueError("the model's own words")

    with pytest.raises(ValueError, match="the model's own words"):
        Recorder(torch.device("cpu")).record(step)
    assert cuda.current in ("outside", None)  # a small good recording came last
    assert cuda.recorded[1:] == [(None, "global")]


def test_the_step_is_told_of_by_line(monkeypatch):
    Cuda(monkeypatch)
    with cuda_graph.waits_noted() as waits:
        warnings.warn_explicit(f"{WAITS} (Triggered internally)", UserWarning, "model.py", 7)
    assert waits == ["model.py:7"]
