"""tools/gpu_runtime: time on a GPU is short, and a check that fails must not take the others with it."""

import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu_runtime"


def test_a_check_that_fails_is_told_and_the_others_go_on(capsys, monkeypatch):
    main = runpy.run_path(str(SCRIPT))["main"]
    kinds = dict.fromkeys(("fused AdamW", "masters, fused AdamW"))
    kinds = {kind: main.__globals__["KINDS"][kind] for kind in kinds}

    def fails(kind, *_):
        if kind == "fused AdamW":
            raise ValueError("no such kernel\nand more")
        return "1.00"

    def graphed(count):
        yield "eager loop", 1.0
        raise RuntimeError("CUDA error: out of memory")

    for name, value in {"KINDS": kinds, "step_times": fails, "graphed_times": graphed}.items():
        monkeypatch.setitem(main.__globals__, name, value)
    monkeypatch.setattr(sys, "argv", ["gpu_runtime", "--quick"])
    assert main() == 1
    printed = capsys.readouterr().out
    assert "FAILED: ValueError: no such kernel\n" in printed and "masters, fused AdamW    " in printed
    assert "FAILED: RuntimeError: CUDA error: out of memory\n" in printed and "eager loop" in printed
