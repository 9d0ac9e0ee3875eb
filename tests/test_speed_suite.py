"""The GPU speed suite, dry: every mode runs, rows are kept and continued, failures and budgets are said."""

import gc
import json
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch

from fxamp.counting.speed import judge, measure, modes, suite, table
from fxamp.counting.speed.workloads import FAMILIES, SIZES, workload

CPU = torch.device("cpu")
TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run the command on one small model; its rows by mode, and what it printed."""
    monkeypatch.setattr(suite, "TINY_TURNS_SECONDS", 0.0)
    path = tmp_path / "speed.json"

    def run(*arguments: str) -> tuple[dict, str]:
        suite.main(["--dry-run", "--models", "ncf", "--sizes", "small", "--save", str(path), *arguments])
        rows = json.loads(path.read_text())["data"]["rows"]
        assert path.with_suffix(".md").exists() and not list(tmp_path.glob("*.part"))
        return {key.rpartition("/")[2]: row for key, row in rows.items()}, capsys.readouterr().out

    run.path = path
    return run


def edit(path, mode, **facts):
    """Change a row in the file, as another call may have left it."""
    record = json.loads(path.read_text())
    record["data"]["rows"][f"ncf/small/{mode}"] |= facts
    path.write_text(json.dumps(record))


def in_a_bare_process(code, *arguments, **environment):
    """What a Python prints that finds no installed fxamp, and stands in another folder."""
    hide = (
        "import importlib.metadata, os, pathlib, runpy, sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]\n"
        "sys.path[:] = [p for p in sys.path if p and not (pathlib.Path(p) / 'fxamp').is_dir()]\n"
        "entries = [e for each in importlib.metadata.distributions() for e in each.entry_points]\n"
        "others = importlib.metadata.EntryPoints(e for e in entries if 'fxamp' not in e.value)\n"
        "importlib.metadata.entry_points = others.select\n"  # which triton asks without a group
    )
    ran = subprocess.run(
        [sys.executable, "-c", hide + code, *map(str, arguments)], capture_output=True, text=True, cwd="/",
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TEARDOWN_CUPTI")} | environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_every_mode_runs_and_says_where_it_is_eager(call):
    rows, printed = call()
    assert list(rows) == [mode for chosen in modes.SETS for mode in chosen] and set(rows) == set(modes.MODES)
    for mode, row in rows.items():
        assert row["status"] == "ok" and row["rounds"] >= measure.MIN_ROUNDS, (mode, row)
        assert row["ms"] > 0 and row["launches"] > 50 and row["baseline_ms"] > 0, mode
        assert ("ran eagerly: CUDA is not available" in row["note"]) == mode.endswith("graphed"), mode
        assert "not finite" not in row["note"], mode
    assert rows["autocast"]["baseline_ms"] == rows["autocast"]["ms"]
    assert "TINY SIZES: a dry run" in printed and "| ncf     | 2       | O2 graphed" in printed
    assert "goal" not in printed, "a dry run claims nothing"


def test_the_modes_differ_as_they_should(call):
    """Ops of the step, counted: fp32 casts nothing, autocast casts each weight, half is the limit."""
    rows, _ = call()
    counted = {mode: row["counted_gb"] for mode, row in rows.items()}
    assert counted["half"] < counted["fp32"] and counted["fp32"] == counted["TF32"]
    assert counted["O1 graphed"] is None and counted["compile fxamp"] is None
    assert rows["fp32"]["launches"] < rows["autocast"]["launches"]


def test_a_second_call_measures_only_what_is_missing(call, monkeypatch):
    first, _ = call("--modes", "autocast", "fp32")
    second, _ = call("--modes", "autocast", "fp32", "half")
    assert second["fp32"] == first["fp32"] and second["autocast"] == first["autocast"]
    assert second["half"]["status"] == "ok" and second["half"]["run"] > first["fp32"]["run"]
    assert second["half"]["baseline_ms"] != first["autocast"]["ms"], "the baseline runs again beside it"
    monkeypatch.setattr(suite.Suite, "_measure_set", lambda *given: pytest.fail("nothing is left to measure"))
    assert call("--modes", "autocast", "fp32", "half")[0] == second


@pytest.mark.parametrize(
    "status",
    [
        "built: not timed yet",
        "failed: over the row's 60 s",
        "failed: InvalidBackend: Invalid backend: 'fxamp', see `torch._dynamo.list_backends()` for available backends.",
    ],
)
def test_what_was_interrupted_is_done_again(call, status):
    call("--modes", "autocast", "fp32")
    edit(call.path, "fp32", status=status, ms=None)
    rows, _ = call("--modes", "autocast", "fp32")
    assert rows["fp32"]["status"] == "ok" and rows["fp32"]["ms"] > 0


def test_a_crash_of_the_process_is_told_and_its_row_tried_once_more(call, monkeypatch):
    """The process ends, as by a segmentation fault, while one mode is built; then once more."""

    class Crash(BaseException):
        pass

    def crash(setting):
        tried.append(setting)
        raise Crash

    tried = []
    monkeypatch.setitem(modes.MODES, "O1", crash)
    asked = ("--modes", "autocast", "O1", "half")
    with pytest.raises(Crash):
        call(*asked)
    assert call("--budget", "0", *asked)[0]["O1"]["status"] == "crashed: the process ended while this was measured"
    with pytest.raises(Crash):
        call(*asked)
    rows, printed = call(*asked)
    assert (
        rows["O1"]["status"] == "failed: the process ended twice while this was measured" and "ended twice" in printed
    )
    assert rows["autocast"]["status"] == rows["half"]["status"] == "ok", "what a crash may take with it goes first"
    assert call(*asked)[0] == rows and len(tried) == 2


def test_a_crash_while_all_are_timed_is_found_by_trying_each_alone(call, monkeypatch):
    class Crash(BaseException):
        pass

    def crash(steps, *given):
        beside.append(set(steps))
        if "O1" in steps:
            raise Crash
        return in_turns(steps, *given)

    in_turns, beside = measure.in_turns, []
    monkeypatch.setattr(measure, "in_turns", crash)
    asked = ("--modes", "O1", "O2", "half")
    for _ in range(2):
        with pytest.raises(Crash):
            call(*asked)
    rows, _ = call(*asked)
    assert beside[0] == {"autocast", "O1", "O2", "half"} and all(len(names) == 2 for names in beside[1:])
    assert rows["O1"]["status"].startswith("failed: the process ended twice")
    assert rows["O2"]["status"] == rows["half"]["status"] == "ok"


def test_the_two_compiled_modes_are_of_one_run(call):
    """One that is still to do takes the other with it: their ratio is a goal."""
    call("--modes", "compile autocast", "compile fxamp")
    edit(call.path, "compile fxamp", status="not run: the budget of 460 s was spent")
    rows, _ = call("--modes", "compile autocast", "compile fxamp")
    assert rows["compile fxamp"]["run"] == rows["compile autocast"]["run"] > 1


def test_rows_with_a_goal_come_first_and_compilers_last(tmp_path, monkeypatch):
    log = []
    monkeypatch.setattr(
        suite.Suite, "_measure_set", lambda self, model, size, todo: log.extend((model, mode) for mode in todo)
    )
    suite.main(["--dry-run", "--save", str(tmp_path / "speed.json")])
    order = list(dict.fromkeys(mode for _, mode in log))
    assert order[:6] == ["autocast", "O1", "O2", "O1 graphed", "O2 graphed", "half"]
    assert order[-2:] == ["compile autocast", "compile fxamp"]
    assert {model for model, _ in log[: 6 * 20]} == set(FAMILIES), "one table of all models before anything else"
    compiled = list(dict.fromkeys(model for model, mode in log if mode == "compile fxamp"))
    assert compiled[: len(modes.COMPILED_FIRST)] == [n for n in FAMILIES if n in modes.COMPILED_FIRST]
    assert set(compiled) == set(FAMILIES)


def test_without_budget_rows_say_not_run_and_a_later_call_runs_them(call):
    rows, printed = call("--budget", "0", "--modes", "autocast", "fp32")
    assert rows["fp32"]["status"] == "not run: the budget of 0 s was spent" and "2 not run" in printed
    rows, _ = call("--modes", "autocast", "fp32")
    assert rows["fp32"]["status"] == "ok"


def test_a_mode_that_fails_is_a_row_that_says_so_and_the_others_go_on(call, monkeypatch):
    def broken(setting):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setitem(modes.MODES, "O1", broken)
    rows, printed = call("--modes", "autocast", "O1", "half")
    assert rows["O1"]["status"] == "failed: RuntimeError: no such kernel" and "no such kernel" in printed
    assert rows["half"]["status"] == "ok"
    assert call("--modes", "autocast", "O1", "half")[0]["O1"] == rows["O1"], "a failure is a result"


def test_what_is_measured_beside_the_time_may_fail_and_the_time_is_measured(call, monkeypatch):
    def broken(*given):
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(measure, "profiled", broken)
    monkeypatch.setattr(measure, "counted_nbytes", broken)
    rows, printed = call("--modes", "autocast", "O1")
    for row in rows.values():
        assert row["status"] == "ok" and row["ms"] > 0 and row["launches"] == 0 and row["counted_gb"] is None
        assert row["note"] == "profile: RuntimeError: no such thing; bytes: RuntimeError: no such thing"
    assert printed.count("not profiled") == 2


def test_a_profile_without_room_is_a_row_without_room(call, monkeypatch):
    def tight(*given):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(measure, "profiled", tight)
    assert call("--modes", "autocast")[0]["autocast"]["status"] == "out of memory"


def test_out_of_memory_beside_others_is_tried_again_alone(call, monkeypatch):
    tried = []

    def tight(setting):
        tried.append(setting)
        if len(tried) == 1:
            raise torch.OutOfMemoryError
        return modes.half(setting)

    monkeypatch.setitem(modes.MODES, "half", tight)
    rows, _ = call("--modes", "autocast", "O2", "half")
    assert len(tried) == 2 and rows["half"]["status"] == "ok" and rows["half"]["run"] > rows["O2"]["run"]
    monkeypatch.setitem(modes.MODES, "O1", lambda setting: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    assert call("--modes", "autocast", "O1")[0]["O1"]["status"] == "out of memory"


def test_out_of_memory_while_a_graph_is_captured_is_tried_again_alone(call, monkeypatch):
    """Captured in the step after the warm-up; the driver's own words for it are no failure of the device either."""
    for error in (torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: out of memory\nmore")):
        tried = []

        def tight(setting, error=error, tried=tried):
            tried.append(prepared := modes.graphed("O1")(setting))
            steps = iter(range(100))

            def step():
                if next(steps) == measure.WARM_UP and len(tried) == 1:
                    raise error
                return prepared.step()

            return modes.Prepared(step, None, prepared.parameters)

        monkeypatch.setitem(modes.MODES, "O1 graphed", tight)
        rows, _ = call("--fresh", "--modes", "autocast", "O1 graphed", "half")
        assert len(tried) == 2 and rows["O1 graphed"]["status"] == rows["half"]["status"] == "ok"
        assert rows["O1 graphed"]["run"] > rows["half"]["run"]


def test_a_baseline_without_room_beside_the_others_is_no_reason_for_rows_without_ratios(call, monkeypatch):
    """Graphs hold their memory while the baseline takes its own anew in each step."""

    def tight(steps, *given):
        times = in_turns(steps, *given)
        return times | {"autocast": torch.OutOfMemoryError("CUDA out of memory.")} if len(steps) > 2 else times

    in_turns = measure.in_turns
    monkeypatch.setattr(measure, "in_turns", tight)
    asked = ("--modes", "autocast", "O1", "O1 graphed")
    rows, _ = call(*asked)
    assert [row["status"] for row in rows.values()] == ["ok"] * 3
    assert all(row["baseline_ms"] for row in rows.values()) and len({row["run"] for row in rows.values()}) == 3
    assert call(*asked)[0] == rows


def test_what_had_no_room_and_no_time_to_be_tried_alone_is_done_by_the_next_call(call, monkeypatch):
    def tight(steps, *given):
        monkeypatch.setattr(suite, "RESERVE_SECONDS", 1e9)
        return in_turns(steps, *given) | {"O1": torch.OutOfMemoryError("CUDA out of memory.")}

    in_turns = measure.in_turns
    with monkeypatch.context() as patch:
        patch.setattr(measure, "in_turns", tight)
        assert call("--modes", "autocast", "O1")[0]["O1"]["status"].startswith("not run: the budget")
    monkeypatch.setattr(suite, "RESERVE_SECONDS", 1.0)
    rows, _ = call("--modes", "autocast", "O1")
    assert rows["O1"]["status"] == "ok" and rows["O1"]["run"] > rows["autocast"]["run"]


def test_what_a_mode_leaves_behind_is_gone_before_the_next_ones_memory_is_measured(call, monkeypatch):
    class Junk:
        def __init__(self):
            self.itself = self

    def leaves_junk(setting):
        junk.append(weakref.ref(Junk()))
        return modes.o1(setting)

    def after(setting):
        was_gone.append(junk[-1]() is None)
        return modes.half(setting)

    junk, was_gone, order = [], [], []
    reset, clean = torch._dynamo.reset, suite.Suite._clean
    monkeypatch.setattr(torch._dynamo, "reset", lambda: (order.append("reset"), reset()))
    monkeypatch.setattr(suite.Suite, "_clean", lambda self: (order.append("clean"), clean(self)))
    monkeypatch.setitem(modes.MODES, "O1", leaves_junk)
    monkeypatch.setitem(modes.MODES, "half", after)
    gc.disable()
    try:
        call("--modes", "autocast", "O1", "half")
    finally:
        gc.enable()
    assert was_gone == [True] and order[:2] == ["reset", "clean"], "Dynamo holds what was compiled"
    assert not gc.get_freeze_count()


def test_a_device_that_failed_ends_the_call_and_the_next_goes_on(call, monkeypatch):
    def broken(setting):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setitem(modes.MODES, "O1", broken)
        rows, _ = call("--modes", "autocast", "O1", "half")
    assert rows["O1"]["status"].startswith("failed: RuntimeError: CUDA error")
    assert rows["half"]["status"] == "not run: the device failed in O1 of ncf; call again"
    assert rows["autocast"]["status"] == "built: not timed yet"
    assert call("--modes", "autocast", "half")[0]["half"]["status"] == "ok"


def test_rows_of_another_run_are_not_mixed_in(call, capsys):
    call("--modes", "autocast", "fp32")
    with pytest.raises(SystemExit):
        call("--modes", "autocast", "fp32", "--dtype", "bfloat16")
    assert "has rows of float16 on CPU" in capsys.readouterr().err
    assert call("--modes", "fp32", "autocast", "--dtype", "bfloat16", "--fresh")[0]["fp32"]["status"] == "ok"


def test_a_mode_that_takes_too_long_is_stopped(call, monkeypatch):
    monkeypatch.setitem(modes.MODES, "O1", lambda setting: time.sleep(60))
    start = time.perf_counter()
    rows, _ = call("--modes", "autocast", "O1", "--row-budget", "3")
    assert time.perf_counter() - start < 50
    assert rows["O1"]["status"] == "failed: over the row's 3 s" and rows["autocast"]["status"] == "ok"


def test_compilers_have_a_budget_of_their_own(tmp_path, monkeypatch):
    limits = {}

    def note(self, setting, mode, *given):
        limits[mode] = self.row_budget(mode)
        return None, {"status": "failed: not built in this test"}

    monkeypatch.setattr(suite.Suite, "_build", note)
    save = str(tmp_path / "speed.json")
    budgets = ("--row-budget", "3", "--compile-budget", "5")
    suite.main(["--dry-run", "--models", "ncf", "--sizes", "small", *budgets, "--save", save])
    assert {mode: limit for mode, limit in limits.items() if limit != 3} == {
        "compile autocast": 5.0,
        "compile fxamp": 5.0,
    }


def test_nothing_is_retried_in_the_call_in_which_it_took_too_long(call, monkeypatch):
    tried = []

    def slow(setting):
        tried.append(setting)
        raise suite.OverBudgetError

    monkeypatch.setitem(modes.MODES, "half", slow)
    call("--modes", "autocast", "half")
    assert len(tried) == 1
    rows, printed = call("--modes", "autocast", "half", "O1")
    assert len(tried) == 2 and rows["half"]["run"] > rows["O1"]["run"], "after what was never tried"
    assert "1 not run" in printed


def test_a_tree_that_is_not_installed_is_enough(tmp_path):
    """Its scripts find it, and torch.compile needs no entry point of it."""
    code = """
for script in sys.argv[1:]:
    kept, sys.argv = list(sys.path), [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, script
    sys.path[:] = kept
    for name in [name for name in sys.modules if name.partition(".")[0] == "fxamp"]:
        del sys.modules[name]
sys.argv = [os.environ["SCRIPT"], *"--dry-run --models ncf --sizes small --modes".split(), "compile fxamp"]
sys.argv += ["--save", os.environ["SAVE"]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    save = tmp_path / "speed.json"
    scripts = (TOOLS / "gpu_padding", TOOLS / "accuracy")
    in_a_bare_process(code, *scripts, SAVE=str(save), SCRIPT=str(TOOLS / "gpu_speed"))
    rows = json.loads(save.read_text())["data"]["rows"]
    assert rows["ncf/small/compile fxamp"]["status"] == "ok", rows["ncf/small/compile fxamp"]


@pytest.mark.parametrize(("given", "seen"), [({}, "1"), ({"TEARDOWN_CUPTI": "0"}, "0")])
def test_the_profiler_is_told_to_let_go_before_torch_is_imported(given, seen):
    code = """
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("TEARDOWN_CUPTI"))
            raise SystemExit
sys.meta_path.insert(0, Stop())
runpy.run_path(sys.argv[1], run_name="__main__")
"""
    assert in_a_bare_process(code, TOOLS / "gpu_speed", **given) == f"{seen}\n"


def test_the_table_says_what_the_profiler_left(call):
    rows, _ = call("--modes", "autocast", "O1")
    assert rows["O1"]["launch_us"] > 0 and rows["O1"]["unprofiled_launch_us"] > 0
    said = {
        (
            1.0,
            1.02,
            1.5,
        ): "4.00 us of the host before the first profile, 4.08 us in the median (4.00 to 6.00) while steps "
        "were timed: nothing was left",
        (
            1.1,
            1.2,
            1.5,
        ): "4.80 us in the median (4.40 to 6.00) while steps were timed: what launches limit is about 20% too slow",
    }
    for costs, words in said.items():
        found = [
            row("O1", 1.0, model=model, size="small", unprofiled_launch_us=4.0, launch_us=4.0 * factor)
            for model, factor in zip(("ncf", "gpt2", "unet"), costs, strict=True)
        ]
        assert words in table.markdown(found).replace("\n", " ")
    assert "first profile" not in table.markdown([row("O1", 1.0, model="ncf")])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_workload_trains_tiny(name):
    for size in SIZES:
        work = workload(name, size, CPU, tiny=True)
        model = work.make()
        work.loss_fn(model(*work.inputs), work.targets).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_modes_take_turns_and_the_first_round_is_left_out():
    log = []
    times = measure.in_turns({name: lambda name=name: log.append(name) for name in "ab"}, 0.0, "cpu")
    assert log[:2] == ["a", "b"] and times["a"].rounds == measure.MIN_ROUNDS
    bursts = "".join(log[2:])
    assert bursts == ("a" * measure.MAX_BURST + "b" * measure.MAX_BURST) * measure.MIN_ROUNDS


def test_a_step_that_fails_while_it_is_timed_leaves_the_others():
    def fails():
        raise torch.OutOfMemoryError

    times = measure.in_turns({"a": fails, "b": lambda: None}, 0.0, "cpu")
    assert isinstance(times["a"], torch.OutOfMemoryError) and times["b"].rounds == measure.MIN_ROUNDS


def test_a_profile_without_kernels_is_made_once_more(monkeypatch):
    """The profiler may still be letting go of the step before."""
    found = [measure.Profile(0, 0.0, 0.0, 0.0, 0), measure.Profile(7, 1.0, 0.5, 0.0, 0)]
    monkeypatch.setattr(measure, "_profiled", lambda *given: found.pop(0))
    assert measure.profiled(lambda: None, "cpu").launches == 7 and not found


def test_an_error_while_timing_keeps_no_tensors():
    """Its traceback would hold what the step had allocated, while the others are timed."""
    times = measure.in_turns({"a": lambda: 1 // 0}, 0.0, "cpu")
    assert isinstance(times["a"], ZeroDivisionError) and times["a"].__traceback__ is None


def test_the_hosts_time_is_that_of_steps_that_wait_for_no_other(monkeypatch):
    """From the third step of a burst on, fxamp's scaler waits for the first: that is the device's time."""

    class Event:
        def __init__(self, **options):
            pass

        def record(self):
            self.at = clock[0]

        def elapsed_time(self, other):
            return 1e3 * (other.at - self.at)

    def step():
        steps.append(0.001 if len(steps) < 2 else 0.01)
        clock[0] += steps[-1]

    clock, steps = [0.0], []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert measure.timed(step, 5, "cuda") == pytest.approx((6.4, 1.0))
    steps.clear()
    assert measure.timed(step, 1, "cuda") == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", "gemm"),
        ("sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu_f16_256x64>(Params)", "gemm"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "gemm"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80(Params)", "gemm"),
        ("RNN_blockPersist_fp_LSTM<__half, __half, float>", "gemm"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda(at::TensorIteratorBase&)>", "copy"),
        ("void at::native::unrolled_elementwise_kernel<float16_copy_kernel_cuda>", "copy"),
        ("void multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<c10::Half, float, 2, 1, 1>>", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<c10::Half>>", ""),
        ("void at::native::vectorized_layer_norm_kernel<c10::Half, float>", ""),
        ("triton_poi_fused__to_copy_add_convolution_0", ""),
        ("triton_tem_fused_addmm_3", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, __half, __half, float, __half, true, false, false>", ""),
        ("nvjet_sm90_ssh_64x64_64x13_4x1_v_bz_splitK_TNN", "gemm"),
        ("void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64, cutlass::half_t>>", ""),
        ("void LSTM_elementWise_fp<__half, __half, float, (cudnnRNNBiasMode_t)2>", ""),
        ("aten::bmm", "gemm"),
        ("aten::_flash_attention_forward", "gemm"),
        ("aten::lstm", "gemm"),
        ("aten::copy_", "copy"),
        ("aten::addmm", "gemm"),
        ("aten::convolution_backward", "gemm"),
    ],
)
def test_kernels_are_told_apart_by_name(kernel, kind):
    assert measure.kind_of(kernel) == kind


def row(mode, ms, *, model="m", size="small", baseline=2.0, peak=1.0, run=1, **facts):
    return {
        "model": model, "size": size, "mode": mode, "status": "ok", "ms": ms, "baseline_ms": baseline, "peak_gb": peak,
        "run": run, "launches": 9, "busy_ms": ms, "gemm_ms": 0.0, "copy_ms": 0.0, **facts,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"busy_ms": 0.5}, "launches (device busy 50%)"),
        ({"launches": 0, "busy_ms": 0.0}, "not profiled"),
        ({"gemm_ms": 0.6}, "GEMM (60% of device time)"),
        ({"gemm_ms": 0.1, "counted_gb": 2.0}, "bytes (GEMM 10%, 2000 GB/s counted)"),
        ({"busy_ms": 1.2, "gemm_ms": 0.1}, "bytes (GEMM 8%)"),
    ],
)
def test_what_limits_a_row(facts, words):
    assert judge.limit_of(row("O1", 1.0, **facts)) == words


def verdicts(*rows):
    return [goal.verdict for goal in judge.goals(rows)]


def test_goals_are_met_or_missed_by_the_numbers():
    good = [
        row("autocast", 2.0), row("O1", 1.5), row("O2 graphed", 0.9, peak=3.0),
        row("compile autocast", 1.0), row("compile fxamp", 1.01),
    ]  # fmt: skip
    assert verdicts(*good) == ["met", "met", "met", "met"]
    assert verdicts() == ["not measured"] * 4
    slow_model = row("O1", 2.01, model="other")
    assert verdicts(*good, slow_model)[0] == "missed", "no model below 1.0"
    assert verdicts(row("autocast", 2.0), row("O1", 1.7, peak=1.01)) == [
        "missed",
        "not measured",
        *verdicts()[2:3],
        "missed",
    ]
    assert verdicts(row("O1 graphed", 1.01))[1] == "missed"
    assert verdicts(row("O1 graphed", 0.1, size="large"))[1] == "not measured", "small batches only"
    assert verdicts(row("compile autocast", 1.0), row("compile fxamp", 1.02))[2] == "missed"
    other_run = row("compile fxamp", 0.5, run=2)
    assert verdicts(row("compile autocast", 1.0), other_run)[2] == "not measured", "ratios are of one run"


def test_the_gap_to_pure_half_is_the_best_ways():
    rows = [row("half", 1.0), row("O1", 1.4), row("O2", 1.2), row("half", 1.0, model="n"), row("O1", 1.3, model="n")]
    assert judge.gaps_to_half(rows) == [(1.3, "n small, O1"), (1.2, "m small, O2")]


def test_the_table_has_every_row_and_its_reason():
    rows = [row("half", 1.0, model="ncf"), {"model": "ncf", "size": "large", "mode": "O1", "status": "out of memory"}]
    text = table.markdown(rows)
    assert "| out of memory" in text and "| goal" in text and "geometric mean" in text


def test_means_are_geometric_over_models_and_of_what_was_measured():
    rows = [
        row("O1", 1.0, model="ncf", size="small", baseline_ms=2.0),
        row("O1", 1.0, model="gpt2", size="small", baseline_ms=8.0),
        row("O1", 2.0, model="gpt2", size="large", baseline_ms=1.0),
        {**row("half", 1.0, model="gpt2", size="large", baseline_ms=3.0), "status": "failed: no kernel"},
        row("autocast", 1.0, model="gpt2", size="large", baseline_ms=1.0),
    ]
    assert judge.means(rows) == [("O1", {"small": pytest.approx(4.0), "large": pytest.approx(0.5)})]
    cells = [cell.strip() for cell in table.means_table(rows).splitlines()[2].split("|")]
    assert cells[1:4] == ["O1", "4.000", "0.500"]


def test_half_is_low_inside_and_gives_float32():
    seen = []
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, given, output: seen.extend((given[0].dtype, output.dtype)))
    model, (x, numbers) = modes.in_half(model, (torch.ones(2, 4), torch.arange(3)), torch.bfloat16)
    assert model(x).dtype == torch.float32 and seen == [torch.bfloat16] * 2 and numbers.dtype == torch.int64


def test_a_slow_step_is_timed_among_others_of_its_kind(monkeypatch):
    counts = []
    monkeypatch.setattr(measure, "timed", lambda step, count, device: counts.append(count) or (500.0, 1.0))
    measure.in_turns({"slow": lambda: None}, 0.0, "cpu")
    assert counts == [1] + [3] * measure.MIN_ROUNDS
