"""The speed suite: sets of modes measured in turns, row by row into a file, within a budget; a second call goes on.

tools/gpu_speed                         # what 460 s allow; call it again for the rest
tools/gpu_speed --dry-run               # everything, tiny, on the CPU: that it runs; its times mean nothing
"""

import argparse
import contextlib
import dataclasses
import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from fxamp.counting import results
from fxamp.counting.speed import measure
from fxamp.counting.speed.modes import BASELINE, COMPILED, COMPILED_FIRST, MODES, SCALE, SETS, Prepared, Setting
from fxamp.counting.speed.rows import BUILT, STARTED, TOO_LONG, Rows
from fxamp.counting.speed.table import markdown
from fxamp.counting.speed.workloads import FAMILIES, SIZES, workload
from fxamp.runtime.tf32 import set_tf32

T = TypeVar("T")
RESERVE_SECONDS = 8.0
"""Kept of the budget for timing what is built, and for writing."""
TURNS_SECONDS, TINY_TURNS_SECONDS = 4.0, 0.2

NO_ROOM = "out of memory"
"""Status of a row."""
SKIPPED = "gradients overflowed: steps were skipped, which take less"
"""Note of a row."""
NO_MEMORY = ("out of memory", "OutOfMemoryError", "ALLOC_FAILED", "ALLOCATION_FAILED")
"""Words of the allocator, of CUDA's driver (also for a graph), of a compiler that quotes them, of cuBLAS and cuDNN."""


class OverBudgetError(BaseException):
    """A row took longer than it may; not an Exception, so that nobody who retries on errors catches it."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """Seconds: of a call, of building one mode, and of building one that has to be compiled."""

    call: float
    row: float
    compiled: float


class Suite:
    """One call of the suite.

    Args:
        rows: where they go; what is in it and done is not measured again.
        inner: the compiler of compiled modes.
        budget: its seconds count from now.
    """

    def __init__(self, rows: Rows, inner: str, budget: Budget) -> None:
        self.rows, self.inner, self.budget = rows, inner, budget
        self.device, self.dtype, self.tiny = rows.device, rows.dtype, rows.tiny
        self.start = time.perf_counter()
        if self.device == "cuda":  # the libraries' own memory belongs to no mode
            torch.ones(64, 64, device=self.device).matmul(torch.ones(64, 64, device=self.device))
        self.unprofiled_launch_us = measure.launch_us(self.device)
        self.broken = ""

    @property
    def left(self) -> float:
        """Seconds; none once the device has failed, which only a new process mends."""
        return 0.0 if self.broken else self.budget.call - (time.perf_counter() - self.start)

    @property
    def why_not(self) -> str:
        """Status of a row that this call cannot measure any more."""
        return f"not run: {self.broken or f'the budget of {self.budget.call:.0f} s was spent'}"

    def row_budget(self, mode: str) -> float:
        return self.budget.compiled if mode in COMPILED else self.budget.row

    def run(self, models: Sequence[str], sizes: Sequence[str], modes: Sequence[str]) -> None:
        """Measure what is not in the file yet, set by set for all models; then what took too long in a call before,
        or the process with it.
        """
        # oneDNN has no low LSTM for some CPUs ("could not create a primitive descriptor").
        with torch.backends.mkldnn.flags(enabled=False) if self.device == "cpu" else contextlib.nullcontext():
            for again in (False, True):
                for members in SETS:
                    chosen = [mode for mode in members if mode in modes]
                    for model in _ordered(models, members):
                        for size in sizes:
                            self._run_set(model, size, chosen, again)

    def _run_set(self, model: str, size: str, chosen: Sequence[str], again: bool) -> None:
        todo = self._todo(model, size, chosen, again)
        if not todo:
            return
        if self.left < RESERVE_SECONDS:
            for mode in todo if not again else ():
                self.rows.put(model, size, mode, status=self.why_not)
            return
        if again and not COMPILED.issuperset(todo):
            for mode in todo:
                if self.left > RESERVE_SECONDS:
                    self._measure_set(model, size, [mode])
            return
        self._measure_set(model, size, todo)
        for mode in todo:  # beside the others there was no room: once more with the baseline alone
            if self.rows.status(model, size, mode) != NO_ROOM or len(todo) == 1:
                continue
            if self.left > RESERVE_SECONDS:
                self._measure_set(model, size, [mode])
            else:
                self.rows.put(model, size, mode, status=self.why_not)

    def _todo(self, model: str, size: str, chosen: Sequence[str], again: bool) -> list[str]:
        """What is due; a compiled mode takes the other one with it."""
        due = [mode for mode in chosen if self.rows.is_due(model, size, mode, again=again)]
        if COMPILED.isdisjoint(due):
            return due
        return [mode for mode in chosen if mode in due or self.rows.status(model, size, mode) == "ok"]

    def _measure_set(self, model: str, size: str, todo: Sequence[str]) -> None:
        """Build each mode beside the baseline, then time all of them in turns."""
        run = self.rows.new_run()
        torch._dynamo.reset()
        self._clean()
        torch._dynamo.config.allow_rnn = True  # else LSTMs are left out of the graphs, and stay in float32
        try:
            setting = Setting(
                model, workload(model, size, torch.device(self.device), self.tiny), self.dtype, self.inner
            )
            self._switch(BASELINE)
            before = measure.allocated(self.device)
            setting.shared  # noqa: B018  what it takes is measured here, before any mode is built
            shared_bytes = measure.allocated(self.device) - before
        except Exception as error:
            for mode in todo:
                self.rows.put(model, size, mode, status=_failure(error))
            return
        built: dict[str, Prepared] = {}
        statuses: dict[str, str] = {}
        for mode in dict.fromkeys((BASELINE, *todo)):
            began, work, is_asked = time.perf_counter(), setting.work, mode in todo
            if is_asked:
                self.rows.put(model, size, mode, status=STARTED, run=run)
            prepared, facts = self._build(setting, mode, shared_bytes, is_asked)
            if is_asked:
                facts |= {"run": run, "batch": work.batch_size, "unit": work.unit}
                self.rows.put(model, size, mode, build_seconds=round(time.perf_counter() - began, 1), **facts)
            if prepared is not None:
                built[mode] = prepared
            statuses[mode] = facts["status"]
        if not self.broken and not statuses[BASELINE].startswith(("not run", TOO_LONG)):  # else they stay undone
            self._time(setting, size, built, todo)

    def _time(self, setting: Setting, size: str, built: dict[str, Prepared], todo: Sequence[str]) -> None:
        model, asked = setting.name, [mode for mode in built if mode in todo]
        for mode in asked:
            self.rows.put(model, size, mode, status=STARTED)
        seconds = min(TINY_TURNS_SECONDS if self.tiny else TURNS_SECONDS, max(1.0, self.left - RESERVE_SECONDS / 2))
        launch_us = measure.launch_us(self.device)
        steps = {mode: prepared.step for mode, prepared in built.items()}
        times = measure.in_turns(steps, seconds, self.device, self._switch)
        found = {mode: _timed(times[mode], times.get(BASELINE), setting.work.units) for mode in times}
        if any(_is_of_device(facts["status"]) for facts in found.values()):  # rows stay as if the process had crashed
            self.broken = f"the device failed while {model} was timed; call again"
            return
        if len(asked) > 1 and found.get(BASELINE, {}).get("status") == NO_ROOM:
            found = dict.fromkeys(found, found[BASELINE])  # times are worth little without it: each is tried alone
        for mode in asked:
            facts = found[mode] | {"launch_us": launch_us, "unprofiled_launch_us": self.unprofiled_launch_us}
            if built[mode].scale() < SCALE:
                facts["note"] = "; ".join(filter(None, (self.rows.note(model, size, mode), SKIPPED)))
            self.rows.put(model, size, mode, **facts)

    def _build(
        self, setting: Setting, mode: str, shared_bytes: int, is_asked: bool
    ) -> tuple[Prepared | None, dict[str, Any]]:
        """A mode, warmed up, and, where its row is asked for, what is measured of it alone."""
        if self.left < RESERVE_SECONDS:
            return None, {"status": self.why_not}
        row_budget = self.row_budget(mode)
        limit = min(row_budget, self.left - RESERVE_SECONDS / 2)
        try:
            with _alarm(limit):
                return self._warm(setting, mode, shared_bytes, is_asked)
        except OverBudgetError:
            status = self.why_not if limit < row_budget else f"{TOO_LONG} {limit:.0f} s"
        except Exception as error:
            status = _failure(error)
            if _is_of_device(status):
                self.broken = f"the device failed in {mode} of {setting.name}; call again"
        self._clean()
        return None, {"status": status}

    def _warm(self, setting: Setting, mode: str, shared_bytes: int, is_asked: bool) -> tuple[Prepared, dict[str, Any]]:
        self._switch(mode)
        gc.collect()  # what is let go of while a mode is built would be missing from what it takes
        before = measure.allocated(self.device)
        prepared = MODES[mode](setting)
        for _ in range(measure.WARM_UP):
            loss = prepared.step()
        is_finite = bool(loss.isfinite())
        _clear_gradients(prepared)
        if not is_asked:
            return prepared, {"status": BUILT}
        own = shared_bytes if prepared.is_sharing else measure.allocated(self.device) - before
        peak = own + measure.peak_of(prepared.step, self.device)
        notes = ["" if is_finite else "the loss is not finite"]
        seen = _beside_time("profile", lambda: measure.profiled(prepared.step, self.device), notes) or measure.UNSEEN
        nbytes = _beside_time("bytes", lambda: measure.counted_nbytes(prepared), notes)
        _clear_gradients(prepared)
        notes.insert(0, prepared.note())
        return prepared, {
            "status": BUILT,
            "peak_gb": peak / 1e9 if self.device == "cuda" else None,
            "launches": seen.launches,
            "busy_ms": seen.busy_ms,
            "gemm_ms": seen.gemm_ms,
            "copy_ms": seen.copy_ms,
            "counted_gb": None if nbytes is None else nbytes / 1e9,
            "note": "; ".join(note for note in notes if note),
        }

    def _switch(self, mode: str) -> None:
        """TF32 is a switch of the process; torch.compile guards on it."""
        set_tf32(mode == "TF32")

    def _clean(self) -> None:
        gc.collect()
        if self.device == "cuda" and not self.broken:
            torch.cuda.empty_cache()


def _ordered(models: Sequence[str], members: Sequence[str]) -> list[str]:
    """Few models first where a row takes minutes."""
    return sorted(models, key=lambda model: COMPILED.issuperset(members) and model not in COMPILED_FIRST)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise OverBudgetError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _clear_gradients(prepared: Prepared) -> None:
    for parameter in prepared.parameters:
        parameter.grad = None


def _beside_time(what: str, measuring: Callable[[], T | None], notes: list[str]) -> T | None:
    """What `measuring` gives; None where it fails, which is noted: the row's time can be measured all the same."""
    try:
        return measuring()
    except Exception as error:
        status = _failure(error)
        if status == NO_ROOM or _is_of_device(status):
            raise
        notes.append(f"{what}: {status.removeprefix('failed: ')}")
        return None


def _is_of_device(status: str) -> bool:
    """Whether a failure is one after which nothing runs in this process; being out of memory is none."""
    return "CUDA error" in status


def _failure(error: Exception) -> str:
    text = str(error).strip().splitlines()
    if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in NO_MEMORY):
        return NO_ROOM
    return f"failed: {type(error).__name__}: {text[0][:150] if text else ''}"


def _timed(found: Any, baseline: Any, units: int) -> dict[str, Any]:
    if isinstance(found, Exception):
        return {"status": _failure(found)}
    has_baseline = isinstance(baseline, measure.Times)
    return {
        "status": "ok",
        "ms": found.milliseconds,
        "host_ms": found.host_ms,
        "rounds": found.rounds,
        "throughput": units / found.milliseconds * 1e3,
        "baseline_ms": baseline.milliseconds if has_baseline else None,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 where no row was measured, of a dry run where one has failed."""
    parser = argparse.ArgumentParser(
        prog="gpu_speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--budget", type=float, default=460.0, help="seconds of this call; default 460")
    parser.add_argument("--row-budget", type=float, default=40.0, help="seconds to build one mode; default 40")
    parser.add_argument(
        "--compile-budget", type=float, default=200.0, help="seconds to build one mode that is compiled; default 200"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU: no claim about time")
    parser.add_argument("--inner", help="compiler of the compiled modes; default inductor, in a dry run aot_eager")
    parser.add_argument("--save", type=Path, help="rows as JSON, beside it the table as .md; they are continued")
    parser.add_argument("--fresh", action="store_true", help="forget the rows that the file has")
    typed = list(sys.argv[1:] if arguments is None else arguments)
    given = parser.parse_args(typed)
    is_dry = given.dry_run or not torch.cuda.is_available()
    path = given.save or (Path("runs/gpu_speed_dry.json") if is_dry else results.FOLDER / "gpu_speed.json")
    if why := results.why_not_writable(path):
        parser.error(f"--save {path} cannot be written: {why}.")
    if given.fresh:
        path.unlink(missing_ok=True)
    if other := _other_run(path, given.dtype, is_dry):
        parser.error(f"{path} has rows of {other}. Give another file with --save, or forget them with --fresh.")
    inner = given.inner or ("aot_eager" if is_dry else "inductor")
    device, dtype = "cpu" if is_dry else "cuda", getattr(torch, given.dtype)
    rows = Rows(path, device, dtype, is_dry, typed)
    suite = Suite(rows, inner, Budget(given.budget, given.row_budget, given.compile_budget))
    gc.freeze()  # collections between modes need not look at what was imported
    try:
        suite.run(given.models, given.sizes, given.modes)
    except KeyboardInterrupt:
        rows.interrupt()
    finally:
        gc.unfreeze()
    rows.save()
    text = f"{_title(rows.record())}\n\n{markdown(rows.found.values(), is_dry)}\n"
    path.with_suffix(".md").write_text(text)
    print(text)
    rest = f", {rows.undone} not run; the same command goes on with those." if rows.undone else "; none is left."
    failed = [row for row in rows.found.values() if row["status"].startswith("failed")]
    print(f"{len(rows.found) - rows.undone} rows in {path}, {len(failed)} of them failed{rest}")
    if is_dry:
        print("A dry run on the CPU: its times say nothing about a GPU.")
        return 1 if failed else 0
    return 0 if any(row["status"] == "ok" for row in rows.found.values()) else 1


def _other_run(path: Path, dtype: str, is_dry: bool) -> str:
    """What the rows in the file are of, where it is not what this call would measure."""
    record = results.load(path)
    if record is None:
        return ""
    here = (dtype, results.machine("cpu" if is_dry else "cuda"), is_dry, str(torch.__version__))
    data = record["data"]
    there = (data["dtype"], record["machine"], data["tiny"], record["versions"]["torch"])
    return "" if here == there else f"{there[0]} on {there[1]} with torch {there[3]}{', a dry run' if there[2] else ''}"


def _title(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    tiny = ", TINY SIZES: a dry run" if record["data"]["tiny"] else ""
    return f"`{record['command']}`: {record['machine']}, {versions}, {record['data']['dtype']}{tiny}"
