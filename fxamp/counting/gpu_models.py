"""The counted models on a GPU: what a step takes there, and how far results are from float32's.

    tools/gpu_models                         # within 460 s; the rows go to docs/results/gpu_models.json
    tools/gpu_models --jobs 8                # distances of so many models at a time
    tools/gpu_models --dry-run               # tiny sizes on the CPU

Times, kernels and memory are those of forward, loss and backward in float16, the models in turns with autocast, which
computes the loss in its region. Distances (relative, L2, of outputs and of gradients) are in float16 and bfloat16,
without dropout, over some seeds. A further call goes on with what is missing.
"""

import argparse
import concurrent.futures
import contextlib
import copy
import gc
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fxamp.convert import convert
from fxamp.counting import results
from fxamp.counting.gpu_models_table import COMPARED, DTYPES, TIMED, Row, failures, markdown
from fxamp.counting.speed import measure
from fxamp.counting.speed.modes import in_half
from fxamp.counting.zoo import COUNTED, Step
from fxamp.dtypes import dtype_name
from fxamp.errors import nearest
from fxamp.runtime.tf32 import set_tf32

SCALES = tuple(2.0**power for power in (16, 12, 8, 4, 0))
"""Loss scales in float16: the first with which gradients are finite."""
TURNS_SECONDS, TINY_TURNS_SECONDS = 1.2, 0.1
RESERVE_SECONDS = 5.0


def step_of(name: str, seed: int, device: str, is_tiny: bool) -> Step:
    """A model in training mode, its inputs and its loss."""
    torch.manual_seed(seed)
    with torch.device(device):
        step = COUNTED[name](is_tiny)
    step.model.train()
    return step


def loss_of(step: Step, way: str, dtype: torch.dtype, device: str) -> tuple[nn.Module, Callable[[], tuple[Any, Any]]]:
    """The model prepared in one way, and what gives its outputs and its loss; O2 and half take a copy."""
    call = step.inputs, dict(step.keywords)
    model: nn.Module = step.model if way in ("fp32", "autocast", "O1") else copy.deepcopy(step.model)
    if way == "half":
        model, call = in_half(model, call, dtype)
    elif way in ("O1", "O2"):
        model = convert(model, dtype, example_inputs=call, opt_level=way)

    region = torch.autocast(device, dtype) if way == "autocast" else contextlib.nullcontext()

    def run() -> tuple[Any, Any]:
        with region:
            outputs = model(*call[0], **call[1])
            return outputs, step.loss_of(outputs)

    return model, run


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Context: nothing is dropped; a mask drawn in another dtype, or for a padded shape, is another one."""
    for module in model.modules():
        is_drop = "drop" in type(module).__name__.lower() or "StochasticDepth" in type(module).__name__
        for name, value in vars(module).items():
            if isinstance(value, float) and ((is_drop and name == "p") or "drop" in name.lower()):
                setattr(module, name, 0.0)
    with mock.patch.object(nn.functional, "dropout", lambda values, *args, **kwargs: values):
        yield


def distances(name: str, seed: int, device: str, is_tiny: bool) -> dict[str, list[float]]:
    """ "O1 float16" and so on -> distances of outputs and of gradients from float32's."""
    set_tf32(False)
    step = step_of(name, seed, device, is_tiny)
    with without_dropout(step.model):
        return _distances(step, device)


def _distances(step: Step, device: str) -> dict[str, list[float]]:
    _, run = loss_of(step, "fp32", torch.float32, device)
    wanted = _results(step.model, run, 1.0)
    found = {}
    for dtype in DTYPES.values():
        scale = 0.0
        for way in COMPARED:
            model, run = loss_of(step, way, dtype, device)
            for power in (scale,) if scale else SCALES if dtype == torch.float16 else (1.0,):
                outputs, gradients = _results(model, run, power)
                if all(bool(value.isfinite().all()) for value in gradients):
                    scale = scale or power
                    break
            found[f"{way} {dtype_name(dtype)}"] = [distance(outputs, wanted[0]), distance(gradients, wanted[1])]
            del model, run, outputs, gradients
            step.model.zero_grad(set_to_none=True)
    return found


def _results(model: nn.Module, run: Callable[[], Any], scale: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and gradients; buffers, which a norm moves, are as they were afterwards."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    outputs, loss = run()
    (loss.float() * scale).backward()
    floats = [value.detach().float() for value in tree_leaves(outputs) if _is_float(value)]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)
    return floats, [gradient.float() / scale for gradient in gradients]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def distance(ours: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Relative, L2, over all tensors."""
    if len(ours) != len(wanted):
        raise ValueError(f"{len(ours)} tensors, expected {len(wanted)}")
    squares = [(one - other).double().square().sum() for one, other in zip(ours, wanted, strict=True)]
    sizes = [other.double().square().sum() for other in wanted]
    return float(torch.stack(squares).sum().sqrt() / torch.stack(sizes).sum().sqrt().clamp_min(1e-30))


def times(name: str, device: str, is_tiny: bool) -> Row:
    """Way -> milliseconds, kernels, copies, peak bytes; the reason where it failed."""
    set_tf32(False)
    step = step_of(name, 0, device, is_tiny)
    steps: dict[str, Callable[[], Any]] = {}
    found: Row = {}
    for way in TIMED:
        try:
            model, run = loss_of(step, way, torch.float16, device)
            steps[way] = _step(model, run)
            for _ in range(measure.WARM_UP):
                steps[way]()
            peak = measure.peak_of(steps[way], device)
            seen = measure.profiled(steps[way], device)
            found[way] = {
                "kernels": seen.launches, "copies": seen.copies, "busy_ms": seen.busy_ms, "gemm_ms": seen.gemm_ms,
                "copy_ms": seen.copy_ms, "peak_gb": peak / 1e9,
            }  # fmt: skip
        except Exception as error:
            steps.pop(way, None)
            found[way] = {"failed": _words(error)}
        gc.collect()
    timed = measure.in_turns(steps, TINY_TURNS_SECONDS if is_tiny else TURNS_SECONDS, device)
    for way, value in timed.items():
        if isinstance(value, Exception):
            found[way] = {"failed": _words(value)}
        else:
            found[way] |= {"ms": value.milliseconds, "host_ms": value.host_ms}
    return found


def _step(model: nn.Module, run: Callable[[], Any]) -> Callable[[], None]:
    parameters = list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        run()[1].backward()

    return step


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


class Models:
    """The rows of one file: `distances` by model and seed, `times` by model."""

    def __init__(self, path: Path, device: str, is_tiny: bool, typed: Sequence[str]) -> None:
        self.path, self.device, self.is_tiny, self.typed = path, device, is_tiny, typed
        old = results.load(path)
        self.data: Row = old["data"] if old else {"tiny": is_tiny, "distances": {}, "times": {}}
        self.start, self.before = time.perf_counter(), old["seconds"] if old else 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def save(self) -> None:
        made = results.make("tools/gpu_models", self.typed, self.data, self.before + self.seconds, self.device)
        results.save(made, self.path)

    def measure_distances(self, names: Sequence[str], seeds: int, jobs: int, budget: float) -> None:
        """In processes of their own, so many at a time; one that fails for want of memory is left to a next call."""
        due = [
            (name, seed) for seed in range(seeds) for name in names if f"{name}/{seed}" not in self.data["distances"]
        ]
        for (name, seed), value in _each(due, jobs, budget - self.seconds, self.device, self.is_tiny):
            if isinstance(value, dict):
                self.data["distances"][f"{name}/{seed}"] = value
            else:
                print(f"{name}, seed {seed}: {_words(value)}", flush=True)
                if "out of memory" not in str(value):
                    self.data["distances"][f"{name}/{seed}"] = {"failed": _words(value)}
            self.save()

    def measure_times(self, names: Sequence[str], budget: float) -> None:
        for name in names:
            if name in self.data["times"] or self.seconds > budget - RESERVE_SECONDS:
                continue
            try:
                self.data["times"][name] = times(name, self.device, self.is_tiny)
            except Exception as error:
                self.data["times"][name] = {"failed": _words(error)}
            self.save()
            gc.collect()
            torch.cuda.empty_cache()


def _each(
    due: Sequence[tuple[str, int]], jobs: int, seconds: float, device: str, is_tiny: bool
) -> Iterator[tuple[tuple[str, int], Any]]:
    pool = concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    futures = {pool.submit(distances, name, seed, device, is_tiny): (name, seed) for name, seed in due}
    try:
        for future in concurrent.futures.as_completed(futures, timeout=max(seconds, 1.0)):
            yield futures[future], future.exception() or future.result()
    except TimeoutError:
        print(f"{sum(not future.done() for future in futures)} distances are left to a next call", flush=True)
        for process in list(pool._processes.values()):
            process.kill()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _other_run(path: Path, is_dry: bool) -> str:
    """What the rows in the file are of, where it is not what this call would measure."""
    record = results.load(path)
    if record is None:
        return ""
    here = (results.machine("cpu" if is_dry else "cuda"), is_dry, str(torch.__version__))
    there = (record["machine"], record["data"].get("tiny", False), record["versions"]["torch"])
    return "" if here == there else f"{there[0]} with torch {there[2]}{', a dry run' if there[1] else ''}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 where something failed."""
    parser = argparse.ArgumentParser(
        prog="gpu_models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: all. {', '.join(COUNTED)}")
    parser.add_argument("--parts", nargs="+", choices=("distances", "times"), default=["distances", "times"])
    parser.add_argument("--jobs", type=int, default=1, help="models whose distances are measured at a time; default 1")
    parser.add_argument("--seeds", type=int, default=3, help="of distances; default 3")
    parser.add_argument("--budget", type=float, default=460.0, help="seconds of this call; default 460")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU: no claim about time")
    parser.add_argument("--save", type=Path, help="the file of the rows")
    typed = list(sys.argv[1:] if arguments is None else arguments)
    given = parser.parse_args(typed)
    for name in given.models:
        if name not in COUNTED:
            parser.error(f"{name!r} is none of the models.{nearest(name, COUNTED)}")
    is_dry = given.dry_run or not torch.cuda.is_available()
    path = given.save or (Path("runs/gpu_models_dry.json") if is_dry else results.FOLDER / "gpu_models.json")
    if other := _other_run(path, is_dry):
        parser.error(f"{path} has rows of {other}. Give another file with --save.")
    models = Models(path, "cpu" if is_dry else "cuda", is_dry, typed)
    names = given.models or list(COUNTED)
    if "distances" in given.parts:
        models.measure_distances(names, given.seeds, given.jobs, given.budget)
    if "times" in given.parts:
        models.measure_times(names, given.budget)
    models.save()
    print(markdown(models.data))
    return 1 if failures(models.data) else 0
