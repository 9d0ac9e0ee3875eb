"""The suite's rows in a file: what is measured stays, what is undone a later call measures, a crash is told."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fxamp.counting import results
from fxamp.counting.speed.judge import Row
from fxamp.dtypes import dtype_name

STARTED = "started, and not ended"
"""In the file while a mode is built or timed; a process that crashes leaves it there."""
BUILT = "built: not timed yet"
CRASHED = "crashed: the process ended while this was measured"
CRASHED_TWICE = "failed: the process ended twice while this was measured"
TOO_LONG = "failed: over the row's"
TRY_AGAIN = ("crashed", TOO_LONG)
"""How the status of a row begins that may cost a call dearly again: after all others, and alone."""
INTERRUPTED = "not run: interrupted"
# InvalidBackend: of calls whose compiled mode needed an installed fxamp.
UNDONE = ("built", "not run", "failed: InvalidBackend")
"""How the status of a row begins that a further call has to measure."""


class Rows:
    """The rows of a file, which is written at each change.

    Args:
        path: of the file; the rows in it are kept.
        typed: arguments on the command line, for the record.
    """

    def __init__(self, path: Path, device: str, dtype: torch.dtype, tiny: bool, typed: Sequence[str] = ()) -> None:
        self.path, self.device, self.dtype, self.tiny, self.typed = path, device, dtype, tiny, typed
        self.start = time.perf_counter()
        self.before = results.load(path)
        self.found: dict[str, Row] = dict(self.before["data"]["rows"]) if self.before else {}
        self.first_run = self._next_run = max((row.get("run", 0) for row in self.found.values()), default=0) + 1
        for row in self.found.values():
            _tell_crash(row)

    def new_run(self) -> int:
        """A number for what is measured side by side, larger than all in the file."""
        self._next_run += 1
        return self._next_run - 1

    def status(self, model: str, size: str, mode: str) -> str:
        """ "" where there is no row."""
        return str(self.found.get(_key(model, size, mode), {}).get("status", ""))

    def note(self, model: str, size: str, mode: str) -> str:
        """ "" where there is none."""
        return str(self.found.get(_key(model, size, mode), {}).get("note", ""))

    def interrupt(self) -> None:
        """Let a further call measure what was being built or timed when the user stopped this one."""
        for row in self.found.values():
            if row["status"] == STARTED:
                row["status"] = INTERRUPTED

    def is_due(self, model: str, size: str, mode: str, *, again: bool = False) -> bool:
        """Whether a row has to be measured; again: whether it took too long, or the process, in a call before."""
        row = self.found.get(_key(model, size, mode))
        if row is None:
            return not again
        status = str(row["status"])
        if again:
            return status.startswith(TRY_AGAIN) and row.get("run", 0) < self.first_run
        return status.startswith(UNDONE)

    @property
    def undone(self) -> int:
        """How many rows a further call would measure."""
        return sum(row["status"].startswith((*UNDONE, *TRY_AGAIN, STARTED)) for row in self.found.values())

    def put(self, model: str, size: str, mode: str, **facts: Any) -> None:
        """Change a row, or begin it anew where `facts` say in which run, and write the file."""
        key = _key(model, size, mode)
        old = self.found.get(key, {})
        kept = {name: old[name] for name in old if "run" not in facts or name == "crashes"}
        self.found[key] = {**kept, "model": model, "size": size, "mode": mode, **facts}
        self.save()

    def save(self) -> None:
        results.save(self.record(), self.path)

    def record(self) -> dict[str, Any]:
        """What the file holds."""
        seconds = time.perf_counter() - self.start + (self.before or {}).get("seconds", 0.0)
        data = {"dtype": dtype_name(self.dtype), "tiny": self.tiny, "rows": self.found}
        return results.make("tools/gpu_speed", self.typed, data, seconds, self.device)


def _key(model: str, size: str, mode: str) -> str:
    return f"{model}/{size}/{mode}"


def _tell_crash(row: Row) -> None:
    """A row that another process began and never ended: tried once more, not for ever."""
    if row["status"] == STARTED:
        row["crashes"] = row.get("crashes", 0) + 1
        row["status"] = CRASHED if row["crashes"] == 1 else CRASHED_TWICE
