"""Measuring steps: time in turns, memory of each alone, one step under the profiler, one under the counter."""

import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fxamp.counting.counts import Counter
from fxamp.counting.speed.modes import Prepared
from fxamp.numerics import kernels

WARM_UP = 3
"""Steps before the one whose memory is measured; a GraphedStep captures in that one."""
BURST_MILLISECONDS = 20.0
MIN_BURST, MAX_BURST = 3, 10
"""Steps in a row: of one alone the host's way in and out, when the device waits, would count as the step's time."""
MIN_ROUNDS, MAX_ROUNDS = 3, 20

HOST_STEPS = 2
"""Of a burst, whose issuing is the host's time. LossScaler reads in each step the outcome of the step before the last
(fxamp.runtime.watch.LAG), so later steps of a burst may wait for the device; GradScaler waits in none where the
optimizer is fused."""
LAUNCHES, LAUNCH_BURSTS = 100, 20
SETTLING_SECONDS, SETTLING_CALLS = 0.03, 6

# aten's ops stand for kernels in a profile of the CPU.
_ATEN_GEMM = re.compile(r"^aten::(.*(conv(?!ert)|attention|rnn|lstm)|(add|b|baddb)?mm$)", re.IGNORECASE)
# Inductor names a fused kernel after all it fuses: none is a mere copy.
_COPY = re.compile(r"^(?!triton_).*(copy|Memcpy DtoD)", re.IGNORECASE)
# The host's part of a CPU profile: ops that only call others.
_WRAPPERS = re.compile(r"^(?!aten::)|^aten::(to|linear|matmul|conv2d|convolution|_to_copy|contiguous|reshape|clone)$")


@dataclasses.dataclass(frozen=True)
class Profile:
    """One step on the device.

    Attributes:
        launches: kernels and copies.
        busy_ms, gemm_ms, copy_ms: their time, that of GEMMs (convolutions, attention and RNNs too), and that of
            kernels that copy, nearly all of which convert; a compiled step fuses its casts into others.
        copies: kernels that copy.
    """

    launches: int
    busy_ms: float
    gemm_ms: float
    copy_ms: float
    copies: int


UNSEEN = Profile(0, 0.0, 0.0, 0.0, 0)
"""Of a step that could not be profiled."""


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def allocated(device: str) -> int:
    """Bytes in tensors now; 0 on a CPU, which does not say."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def peak_of(step: Callable[[], Any], device: str) -> int:
    """Bytes that one step adds at its worst moment to what was allocated before."""
    if device != "cuda":
        step()
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = allocated(device)
    step()
    wait(device)
    return torch.cuda.max_memory_allocated() - before


def timed(step: Callable[[], Any], count: int, device: str) -> tuple[float, float]:
    """Milliseconds of one of `count` steps in a row on the device, and of the host for each of the first two."""
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            step()
        milliseconds = 1e3 * (time.perf_counter() - start) / count
        return milliseconds, milliseconds
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    wait(device)
    start = time.perf_counter()
    began.record()
    for number in range(count):
        step()
        if number < HOST_STEPS:
            host = time.perf_counter() - start
    ended.record()
    wait(device)
    return began.elapsed_time(ended) / count, 1e3 * host / min(count, HOST_STEPS)


@dataclasses.dataclass(frozen=True)
class Times:
    """Medians over rounds, of a step: milliseconds on the device, and of the host."""

    milliseconds: float
    host_ms: float
    rounds: int


def in_turns(
    steps: Mapping[str, Callable[[], Any]],
    seconds: float,
    device: str,
    before: Callable[[str], Any] = lambda name: None,
) -> dict[str, Times | Exception]:
    """Time all steps A B C A B C ...; one that fails gives its exception, and the others go on.

    Args:
        seconds: for all of it; at least `MIN_ROUNDS` rounds are made.
        before: called with the name, outside the time.
    """
    start, bursts = time.perf_counter(), dict.fromkeys(steps, 1)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    failed: dict[str, Exception] = {}
    for number in range(MAX_ROUNDS + 1):
        if number > MIN_ROUNDS and time.perf_counter() - start > seconds:
            break
        for name, step in steps.items():
            if name in failed:
                continue
            before(name)
            try:
                sample = timed(step, bursts[name], device)
            except Exception as error:  # out of memory beside others, most likely
                failed[name] = error.with_traceback(None)  # whose frames hold what the step had allocated
                continue
            if number:
                found[name].append(sample)
            else:  # the first round only says how long a step is
                bursts[name] = max(MIN_BURST, min(MAX_BURST, int(BURST_MILLISECONDS / max(sample[0], 1e-3))))
    return {name: failed.get(name) or _medians(samples) for name, samples in found.items()}


def _medians(samples: list[tuple[float, float]]) -> Times:
    device, host = zip(*samples, strict=True)
    return Times(statistics.median(device), statistics.median(host), len(samples))


def launch_us(device: str) -> float:
    """Microseconds of one op on one element, the least of many bursts: what the host needs to launch it.

    A profiler that stays attached to CUDA makes every later launch slower, and this with it.
    """
    one = torch.zeros((), device=device)
    return 1e3 * min(timed(lambda: one.add_(1), LAUNCHES, device)[0] for _ in range(LAUNCH_BURSTS))


def profiled(step: Callable[[], Any], device: str) -> Profile:
    """One step under torch.profiler; on a CPU its ops stand for kernels.

    A profile that begins while the one before is still being torn down may see no kernel (pytorch/kineto#1554): then
    once more.
    """
    found = _profiled(step, device)
    return found if found.launches else _profiled(step, device)


def _profiled(step: Callable[[], Any], device: str) -> Profile:
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if device == "cuda" else [ProfilerActivity.CPU]
    wait(device)
    with profile(activities=kinds) as recorded:
        step()
        wait(device)
    events = recorded.profiler.kineto_results.events()
    chosen = [(event.name(), event.duration_ns() / 1e6) for event in events if _is_launch(event, device)]
    if device == "cuda":
        _let_go()
    kinds_seen = [kind_of(name) for name, _ in chosen]
    spent = {"gemm": 0.0, "copy": 0.0, "": 0.0}
    for kind, (_, milliseconds) in zip(kinds_seen, chosen, strict=True):
        spent[kind] += milliseconds
    return Profile(len(chosen), sum(spent.values()), spent["gemm"], spent["copy"], kinds_seen.count("copy"))


def _let_go() -> None:
    """Leave the profiler's own thread time to detach from CUDA, which it does at the end of a later call of CUDA's:
    a next profile before that has crashed (pytorch/kineto#1169).
    """
    for _ in range(SETTLING_CALLS):
        time.sleep(SETTLING_SECONDS / SETTLING_CALLS)
        wait("cuda")


def kind_of(kernel: str) -> str:
    """ "gemm" (attention, convolutions and RNNs too), "copy" or ""; of a kernel, or of an op of a CPU profile."""
    if _ATEN_GEMM.search(kernel) or kernels.kind_of(kernel, None).endswith("gemm"):
        return "gemm"
    return "copy" if _COPY.search(kernel) else ""


def _is_launch(event: Any, device: str) -> bool:
    if device == "cuda":
        return event.device_type().name == "CUDA" and not event.is_user_annotation()
    return not _WRAPPERS.search(event.name())


def counted_nbytes(prepared: Prepared) -> int | None:
    """Bytes that the ops of forward, loss and backward read and write; None where Python does not see them."""
    if prepared.loss is None:
        return None
    counter = Counter()
    with counter, torch.autograd.set_multithreading_enabled(False):
        prepared.loss().backward()  # type: ignore[no-untyped-call]
    return counter.counts.nbytes
