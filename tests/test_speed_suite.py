"""The GPU speed suite, dry: every mode runs, rows are kept and continued, failures and budgets are said."""

import json
import time

import pytest
import torch

from fxamp.counting.speed import judge, measure, modes, suite, table
from fxamp.counting.speed.workloads import FAMILIES, SIZES, workload

CPU = torch.device("cpu")


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


def test_every_mode_runs_and_says_where_it_is_eager(call):
    rows, printed = call()
    assert list(rows) == [*modes.SETS[0], *modes.SETS[1][1:]] and set(rows) == set(modes.MODES)
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


def test_what_was_interrupted_is_done_again(call):
    call("--modes", "autocast", "fp32")
    record = json.loads(call.path.read_text())
    record["data"]["rows"]["ncf/small/fp32"] |= {"status": "built: not timed yet", "ms": None}
    call.path.write_text(json.dumps(record))
    rows, _ = call("--modes", "autocast", "fp32")
    assert rows["fp32"]["status"] == "ok" and rows["fp32"]["ms"] > 0


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


def test_out_of_memory_beside_others_is_tried_again_alone(call, monkeypatch):
    tried = []

    def tight(setting):
        tried.append(setting)
        if len(tried) == 1:
            raise torch.OutOfMemoryError
        return modes.half(setting)

    monkeypatch.setitem(modes.MODES, "half", tight)
    rows, _ = call("--modes", "autocast", "fp32", "half")
    assert len(tried) == 2 and rows["half"]["status"] == "ok" and rows["half"]["run"] > rows["fp32"]["run"]
    monkeypatch.setitem(modes.MODES, "O1", lambda setting: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    assert call("--modes", "autocast", "O1")[0]["O1"]["status"] == "out of memory"


def test_a_device_that_failed_ends_the_call_and_the_next_goes_on(call, monkeypatch):
    def broken(setting):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setitem(modes.MODES, "fp32", broken)
        rows, _ = call("--modes", "autocast", "fp32", "half")
    assert rows["fp32"]["status"].startswith("failed: RuntimeError: CUDA error")
    assert rows["half"]["status"] == "not run: the device failed in fp32 of ncf; call again"
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
        ("aten::addmm", "gemm"),
        ("aten::convolution_backward", "gemm"),
    ],
)
def test_kernels_are_told_apart_by_name(kernel, kind):
    found = "gemm" if measure.GEMM.search(kernel) else "copy" if measure.COPY.search(kernel) else ""
    assert found == kind


def row(mode, ms, *, model="m", size="small", baseline=2.0, peak=1.0, run=1, **facts):
    return {
        "model": model, "size": size, "mode": mode, "status": "ok", "ms": ms, "baseline_ms": baseline, "peak_gb": peak,
        "run": run, "busy_ms": ms, "gemm_ms": 0.0, "copy_ms": 0.0, **facts,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"busy_ms": 0.5}, "launches (device busy 50%)"),
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
