"""How conversion, the host's part of a step, and memory grow with nodes and with parameters: `tools/scale`.

Each point is measured in a process of its own, after a small model was converted there. Seconds are those of the
thread, so that other programs do not count; executed lines of Python repeat exactly.
"""

import argparse
import concurrent.futures
import functools
import gc
import itertools
import math
import multiprocessing
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fxamp.convert import convert
from fxamp.counting import results
from fxamp.counting.work import lines
from fxamp.counting.zoo.language import GPT2
from fxamp.counting.zoo.vision import ResNet
from fxamp.review.report import report

LOW = torch.bfloat16
ROUNDS = 7
TRACED_NODES = 5000
"""Executed lines of larger graphs are not counted: under a trace function a conversion takes twenty times as long."""

Point = dict[str, float]
Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


def _blocks(depth: int) -> Made:
    return GPT2(16, 8, depth, 2, 4), (torch.zeros(1, 4, dtype=torch.long),)


def _convolutions(depth: int) -> Made:
    return ResNet((depth,), 4, 8), (torch.randn(2, 3, 8, 8),)


def _wide(width: int) -> Made:
    return GPT2(16, width, 4, 2, 4), (torch.zeros(1, 4, dtype=torch.long),)


# What grows: how it is called, by what it is measured, the model of a size, the sizes.
AXES: dict[str, tuple[str, Callable[[int], Made], tuple[int, ...]]] = {
    "transformer blocks": ("nodes", _blocks, (4, 12, 40, 120, 270)),
    "bottleneck blocks": ("nodes", _convolutions, (8, 24, 80, 240)),
    "width of 4 blocks": ("parameters", _wide, (64, 192, 512, 1024)),
}
MEASURES = {
    "convert_s": "conversion, s",
    "convert_lines": "conversion, executed lines",
    "kept_bytes": "the converted model keeps, bytes of Python",
    "peak_bytes": "conversion, peak bytes of Python",
    "fp32_ms": "step, host, fp32, ms",
    "autocast_ms": "step, host, autocast, ms",
    "O1_ms": "step, host, O1, ms",
    "O1_lines": "step, O1, executed lines",
    "convert_tensors": "conversion, peak bytes of tensors",
    "fp32_tensors": "step, fp32, peak bytes of tensors",
    "autocast_tensors": "step, autocast, peak bytes of tensors",
    "O1_tensors": "step, O1, peak bytes of tensors",
}
# Computing grows with the weights; on a CPU it hides the host's part.
_OF_COMPUTE = ("fp32_ms", "autocast_ms", "O1_ms")
OF_AXIS = {"nodes": tuple(MEASURES), "parameters": tuple(name for name in MEASURES if name not in _OF_COMPUTE)}


def point(axis: str, size: int) -> Point:
    """Everything that is measured of one model; called in a fresh process."""
    torch.set_num_threads(1)
    by, make, sizes = AXES[axis]
    small, arguments = make(min(sizes) // 2)
    _train(_converted(small, arguments), arguments)  # what is loaded and cached once
    model, arguments = make(size)
    converted, seconds = _timed(lambda: _converted(model, arguments))
    found: Point = {
        "size": size,
        "nodes": report(converted).total_nodes,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "convert_s": seconds,
    }
    _train(converted, arguments)  # the first call of a graph does more
    if by == "nodes":
        found |= _step_times(model, converted, arguments)
    if found["nodes"] <= TRACED_NODES:
        fresh, _ = make(size)
        found["convert_lines"] = lines(functools.partial(_converted, fresh, arguments))
        found["O1_lines"] = lines(functools.partial(_train, converted, arguments))
    del converted
    fresh, _ = make(size)
    found |= _python_bytes(lambda: _converted(fresh, arguments))
    return found | _tensor_bytes(make, size)


def _converted(model: nn.Module, arguments: tuple[torch.Tensor, ...]) -> nn.Module:
    return convert(model, LOW, example_inputs=arguments)


def _train(model: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
    model(*arguments).float().sum().backward()


def _train_autocast(model: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
    with torch.autocast("cpu", LOW):
        out = model(*arguments)
    out.float().sum().backward()


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.thread_time()
    made = function()
    return made, time.thread_time() - start


def _step_times(model: nn.Module, converted: nn.Module, arguments: tuple[torch.Tensor, ...]) -> Point:
    """Medians of the thread's time, the ways in turns."""
    ways: dict[str, Callable[[], None]] = {
        "fp32_ms": lambda: _train(model, arguments),
        "autocast_ms": lambda: _train_autocast(model, arguments),
        "O1_ms": lambda: _train(converted, arguments),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS + 2):
        for way, step in ways.items():
            times[way].append(1e3 * _timed(step)[1])
            model.zero_grad()
    return {way: statistics.median(found[2:]) for way, found in times.items()}


def _python_bytes(function: Callable[[], Any]) -> Point:
    """Bytes of Python objects: at the worst moment, and kept as long as the result lives."""
    gc.collect()
    tracemalloc.start()
    made = function()
    peak = tracemalloc.get_traced_memory()[1]
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del made
    return {"kept_bytes": kept, "peak_bytes": peak}


def _tensor_bytes(make: Callable[[int], Made], size: int) -> Point:
    """Peaks of what tensors take, over what was there before: parameters are, gradients are not."""
    model, arguments = make(size)
    found = {"fp32_tensors": tensor_peak(lambda: _train(model, arguments))}
    model.zero_grad()
    found["autocast_tensors"] = tensor_peak(lambda: _train_autocast(model, arguments))
    model.zero_grad()
    made: list[nn.Module] = []
    found["convert_tensors"] = tensor_peak(lambda: made.append(_converted(model, arguments)))
    found["O1_tensors"] = tensor_peak(lambda: _train(made[0], arguments))
    return found


def tensor_peak(function: Callable[[], Any]) -> float:
    """Bytes that tensors take at the worst moment of a call, over those before."""
    return float(max(itertools.accumulate(tensor_changes(function), initial=0)))


def tensor_changes(function: Callable[[], Any]) -> list[int]:
    """What torch's allocator gave (bytes) and took back (negative) during a call, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    events = recorded.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return [nbytes for _, nbytes in changes]


def fit(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Least squares of log y against log x.

        fit([1, 10, 100], [3, 30, 300]) == (1.0, 0.0)

    Returns:
        the exponent, and the residual: root mean square, as a share of y (0.05: five per cent).
    """
    logs = [math.log(x) for x in xs], [math.log(y) for y in ys]
    slope, intercept = statistics.linear_regression(*logs)
    residuals = [y - (slope * x + intercept) for x, y in zip(*logs, strict=True)]
    return slope, math.expm1(math.sqrt(statistics.fmean(r * r for r in residuals)))


def exponents(axis: str, points: Sequence[Point]) -> dict[str, tuple[float, float, float]]:
    """For each measure: exponent, residual, and the exponent between the last two points."""
    by = AXES[axis][0]
    found = {}
    for measure in OF_AXIS[by]:
        known = [(entry[by], entry[measure]) for entry in points if entry.get(measure)]
        if len(known) >= 3:
            xs, ys = zip(*known, strict=True)
            found[measure] = (*fit(xs, ys), fit(xs[-2:], ys[-2:])[0])
    return found


def tables(data: dict[str, list[Point]]) -> str:
    """Markdown: for each axis what was measured at each point, with exponents beside."""
    parts = []
    for axis, points in data.items():
        by = AXES[axis][0]
        heads = [f"{axis}: {by}", *(_short(entry[by]) for entry in points), "exponent", "residual", "at the end"]
        rows = []
        for measure, (exponent, residual, last) in exponents(axis, points).items():
            values = (_short(entry.get(measure)) for entry in points)
            rows.append([MEASURES[measure], *values, f"{exponent:.2f}", f"{residual:.0%}", f"{last:.2f}"])
        parts.append(results.as_table(rows, heads))
    return "\n\n".join(parts)


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    unit, name = next(((unit, name) for unit, name in ((1e6, " M"), (1e3, " k")) if value >= 10 * unit), (1.0, ""))
    scaled = value / unit
    return f"{scaled:,.0f}{name}" if scaled >= 100 else f"{scaled:.3g}{name}"


def measure_all(axes: Iterable[str], most: int | None, found: dict[str, list[Point]]) -> Iterator[str]:
    """Every point (of each axis the first `most`) into `found`, each in a process of its own, one after the other.

    Yields:
        a line for each point that was not there.
    """
    context = multiprocessing.get_context("spawn")
    for axis in axes:
        points = found.setdefault(axis, [])
        for size in AXES[axis][2][:most]:
            if any(known["size"] == size for known in points):
                continue
            with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
                points.append(pool.submit(point, axis, size).result())
            yield f"{axis} {size}: {points[-1]}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scale", description=__doc__.splitlines()[0])
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--points", type=int, help="only the first so many of each axis; at least 3 for a fit")
    results.add_save(parser, "scale")
    parser.add_argument("--fresh", action="store_true", help="measure again what the saved file has")
    typed = list(sys.argv[1:] if arguments is None else arguments)
    given = parser.parse_args(typed)
    start = time.perf_counter()
    before = results.load(given.save) if given.save and not given.fresh else None
    data: dict[str, list[Point]] = before["data"] if before else {}
    spent = before["seconds"] if before else 0.0
    if before:
        known = sum(map(len, data.values()))
        print(f"{known} points are {given.save}'s; --fresh measures them again", file=sys.stderr)
    for line in measure_all(given.axes, given.points, data):
        print(line, file=sys.stderr, flush=True)
        if given.save:
            seconds = spent + time.perf_counter() - start
            results.save(results.make("tools/scale", typed, data, seconds), given.save)
    print(tables(data))
