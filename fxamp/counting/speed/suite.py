"""The speed suite: sets of modes measured in turns, row by row into a file, within a budget; a second call goes on.

tools/gpu_speed                         # what 460 s allow; call it again for the rest
tools/gpu_speed --dry-run               # everything, tiny, on the CPU: that it runs; its times mean nothing
"""

import argparse
import contextlib
import gc
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fxamp.counting import results
from fxamp.counting.speed import judge, measure
from fxamp.counting.speed.modes import BASELINE, MODES, SETS, Prepared, Setting
from fxamp.counting.speed.table import markdown
from fxamp.counting.speed.workloads import FAMILIES, SIZES, workload
from fxamp.runtime.tf32 import set_tf32

Row = judge.Row
RESERVE_SECONDS = 8.0
"""Kept of the budget for timing what is built, and for writing."""
TURNS_SECONDS, TINY_TURNS_SECONDS = 5.0, 0.2
UNDONE = ("built", "not run")
"""How the status of a row begins that a further call has to measure."""


class OverBudgetError(BaseException):
    """A row took longer than it may; not an Exception, so that nobody who retries on errors catches it."""


class Suite:
    """One call of the suite.

    Args:
        path: file of the rows; those in it are kept, and not measured again.
        budget: seconds from now on for everything, and `row_budget` for building one mode.
        typed: arguments on the command line, for the record.
    """

    def __init__(
        self, path: Path, device: str, dtype: torch.dtype, inner: str, budget: float, row_budget: float, tiny: bool,
        typed: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.path, self.device, self.dtype, self.inner = path, device, dtype, inner
        self.start, self.budget, self.row_budget, self.tiny, self.typed = (
            time.perf_counter(), budget, row_budget, tiny, typed,
        )  # fmt: skip
        if device == "cuda":  # the libraries' own memory belongs to no mode
            torch.ones(64, 64, device=device).matmul(torch.ones(64, 64, device=device))
        self.before = results.load(path)
        self.rows: dict[str, Row] = dict(self.before["data"]["rows"]) if self.before else {}
        self.broken = ""
        self.call = max((row.get("run", 0) for row in self.rows.values()), default=0) + 1

    @property
    def left(self) -> float:
        """Seconds; none once the device has failed, which only a new process mends."""
        return 0.0 if self.broken else self.budget - (time.perf_counter() - self.start)

    @property
    def why_not(self) -> str:
        """Status of a row that this call cannot measure any more."""
        return f"not run: {self.broken or f'the budget of {self.budget:.0f} s was spent'}"

    def run(self, models: Sequence[str], sizes: Sequence[str], modes: Sequence[str]) -> None:
        """Measure what is not in the file yet: every model without a compiler first, then with one."""
        for chosen in SETS:
            for model in models:
                for size in sizes:
                    self._run_set(model, size, [mode for mode in chosen if mode in modes])

    def _run_set(self, model: str, size: str, modes: Sequence[str]) -> None:
        todo = [mode for mode in modes if self._is_undone(model, size, mode)]
        if not todo or todo == [BASELINE]:
            return
        if self.left < RESERVE_SECONDS:
            for mode in todo:
                self._put(model, size, mode, status=self.why_not)
            return
        self._measure_set(model, size, todo)
        for mode in todo:  # beside the others there was no room: once more with the baseline alone
            row = self.rows[_key(model, size, mode)]
            if row["status"] == "out of memory" and mode != BASELINE and len(todo) > 1 and self.left > RESERVE_SECONDS:
                self._measure_set(model, size, [mode])

    def _is_undone(self, model: str, size: str, mode: str) -> bool:
        row = self.rows.get(_key(model, size, mode))
        return row is None or row["status"].startswith(UNDONE)

    def _measure_set(self, model: str, size: str, todo: Sequence[str]) -> None:
        """Build each mode beside the baseline, then time all of them in turns."""
        run, self.call = self.call, self.call + 1
        torch._dynamo.reset()
        torch._dynamo.config.allow_rnn = True  # else LSTMs are left out of the graphs, and stay in float32
        built: dict[str, Prepared] = {}
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
                self._put(model, size, mode, status=_failure(error))
            return
        work = setting.work
        for mode in dict.fromkeys((BASELINE, *todo)):
            prepared, facts = self._build(setting, mode, shared_bytes)
            facts |= {"run": run, "batch": work.batch_size, "unit": work.unit}
            if mode in todo:
                self._put(model, size, mode, **facts)
            if prepared is not None:
                built[mode] = prepared
        if self.broken:  # what was built stays undone
            return
        seconds = min(TINY_TURNS_SECONDS if self.tiny else TURNS_SECONDS, max(1.0, self.left - RESERVE_SECONDS / 2))
        steps = {mode: prepared.step for mode, prepared in built.items()}
        times = measure.in_turns(steps, seconds, self.device, self._switch)
        baseline = times.get(BASELINE)
        for mode in todo:
            facts = _timed(times[mode], baseline, work.units) if mode in times else {}
            if _is_of_device(facts.get("status", "")):
                self.broken = f"the device failed while {setting.name} was timed; call again"
            elif facts:
                self._put(model, size, mode, **facts)
        built.clear()
        del setting, work, steps
        self._clean()

    def _build(self, setting: Setting, mode: str, shared_bytes: int) -> tuple[Prepared | None, dict[str, Any]]:
        """A mode, warmed up, and what is measured of it alone."""
        if self.left < RESERVE_SECONDS:
            return None, {"status": self.why_not}
        limit = min(self.row_budget, self.left - RESERVE_SECONDS / 2)
        try:
            with _alarm(limit):
                return self._warm(setting, mode, shared_bytes)
        except OverBudgetError:
            status = self.why_not if limit < self.row_budget else f"failed: over the row's {limit:.0f} s"
        except Exception as error:
            status = _failure(error)
            if _is_of_device(status):
                self.broken = f"the device failed in {mode} of {setting.name}; call again"
        self._clean()
        return None, {"status": status}

    def _warm(self, setting: Setting, mode: str, shared_bytes: int) -> tuple[Prepared, dict[str, Any]]:
        self._switch(mode)
        before = measure.allocated(self.device)
        prepared = MODES[mode](setting)
        for _ in range(measure.WARM_UP):
            loss = prepared.step()
        is_finite = bool(loss.isfinite())
        _clear_gradients(prepared)
        own = shared_bytes if prepared.is_sharing else measure.allocated(self.device) - before
        peak = own + measure.peak_of(prepared.step, self.device)
        seen = measure.profiled(prepared.step, self.device)
        nbytes = measure.counted_nbytes(prepared)
        _clear_gradients(prepared)
        notes = [prepared.note(), "" if is_finite else "the loss is not finite"]
        return prepared, {
            "status": "built: not timed yet",
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

    def _put(self, model: str, size: str, mode: str, **facts: Any) -> None:
        """Change a row and write the file."""
        key = _key(model, size, mode)
        old = {} if "peak_gb" in facts or "run" in facts else self.rows.get(key, {})
        self.rows[key] = {**old, "model": model, "size": size, "mode": mode, **facts}
        results.save(self.record(), self.path)

    def record(self) -> dict[str, Any]:
        """What the file holds."""
        seconds = time.perf_counter() - self.start + (self.before or {}).get("seconds", 0.0)
        data = {"dtype": str(self.dtype).removeprefix("torch."), "tiny": self.tiny, "rows": self.rows}
        return results.make("tools/gpu_speed", self.typed, data, seconds, self.device)

    def _clean(self) -> None:
        gc.collect()
        if self.device == "cuda" and not self.broken:
            torch.cuda.empty_cache()


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


def _key(model: str, size: str, mode: str) -> str:
    return f"{model}/{size}/{mode}"


def _clear_gradients(prepared: Prepared) -> None:
    for parameter in prepared.parameters:
        parameter.grad = None


def _is_of_device(status: str) -> bool:
    """Whether a failure is one after which nothing runs in this process."""
    return "CUDA error" in status


def _failure(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    text = str(error).strip().splitlines()
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
    """The command line; returns 1 where no row was measured."""
    parser = argparse.ArgumentParser(
        prog="gpu_speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--budget", type=float, default=460.0, help="seconds of this call; default 460")
    parser.add_argument("--row-budget", type=float, default=60.0, help="seconds to build one mode; default 60")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU: no claim about time")
    parser.add_argument("--inner", help="compiler of the compiled modes; default inductor, in a dry run aot_eager")
    parser.add_argument("--save", type=Path, help="rows as JSON, beside it the table as .md; they are continued")
    parser.add_argument("--fresh", action="store_true", help="forget the rows that the file has")
    typed = list(sys.argv[1:] if arguments is None else arguments)
    given = parser.parse_args(typed)
    is_dry = given.dry_run or not torch.cuda.is_available()
    path = given.save or (Path("runs/gpu_speed_dry.json") if is_dry else results.FOLDER / "gpu_speed.json")
    if given.fresh:
        path.unlink(missing_ok=True)
    if other := _other_run(path, given.dtype, is_dry):
        parser.error(f"{path} has rows of {other}. Give another file with --save, or forget them with --fresh.")
    inner = given.inner or ("aot_eager" if is_dry else "inductor")
    device, dtype = "cpu" if is_dry else "cuda", getattr(torch, given.dtype)
    suite = Suite(path, device, dtype, inner, given.budget, given.row_budget, is_dry, typed)
    suite.run(given.models, given.sizes, given.modes)
    text = f"{_title(suite.record())}\n\n{markdown(suite.rows.values(), is_dry)}\n"
    path.with_suffix(".md").write_text(text)
    print(text)
    undone = sum(row["status"].startswith(UNDONE) for row in suite.rows.values())
    print(f"{len(suite.rows) - undone} rows in {path}, {undone} not run; the same command goes on with those.")
    if is_dry:
        print("A dry run on the CPU: every mode was run; its times say nothing about a GPU.")
    return 0 if any(row["status"] == "ok" for row in suite.rows.values()) else 1


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
