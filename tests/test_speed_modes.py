"""A column of the speed suite is what its name says: which ops run low, who scales, who steps, what is compiled."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.counting.speed import measure, modes, suite, table
from fxamp.counting.speed.workloads import FAMILIES, workload
from fxamp.dynamo.backend import backend
from fxamp.runtime import apex
from fxamp.runtime.fixed_scalers import StaticLossScaler
from fxamp.runtime.graphed_step import GraphedStep
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.scaler import LossScaler

CPU = torch.device("cpu")
LOW, FULL = torch.float16, torch.float32
PRODUCTS = {torch.ops.aten.addmm.default, torch.ops.aten.mm.default}


@dataclasses.dataclass
class Seen:
    """What one step does."""

    products: set[torch.dtype] = dataclasses.field(default_factory=set)
    regions: set[bool] = dataclasses.field(default_factory=set)
    scaled_by: set[tuple[type, bool]] = dataclasses.field(default_factory=set)
    called: set[str] = dataclasses.field(default_factory=set)
    conversions: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    compilers: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class Products(TorchDispatchMode):
    """Which dtypes are multiplied."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS:
            self.seen.products.add(args[-1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def step_of(monkeypatch):
    """Build a mode on NCF and run a step of it: what was seen, and the dtypes of its parameters."""

    def run(mode: str) -> tuple[Seen, set[torch.dtype]]:
        seen = Seen()
        work = workload("ncf", "small", CPU, tiny=True)

        def loss_fn(outputs, targets):
            seen.regions.add(torch.is_autocast_enabled("cpu"))
            return type(work).loss_fn(outputs, targets)

        object.__setattr__(work, "loss_fn", loss_fn)
        noted = [(torch.amp.GradScaler, "scale"), (MasterWeightOptimizer, "step"), (GraphedStep, "__call__")]
        for owner, name in noted:
            spy(monkeypatch, owner, name, seen)
        real = LossScaler.scale
        monkeypatch.setattr(LossScaler, "scale", lambda self, *given: note_scale(seen, self) or real(self, *given))
        real_apex = apex.scale_loss
        monkeypatch.setattr(apex, "scale_loss", lambda *given: seen.called.add("apex") or real_apex(*given))
        real_convert = modes.convert
        monkeypatch.setattr(
            modes, "convert", lambda model, dtype, **given: seen.conversions.append({"dtype": dtype, **given})
            or real_convert(model, dtype, **given),
        )  # fmt: skip
        monkeypatch.setattr(torch, "compile", lambda model, **given: seen.compilers.append(given) or model)
        prepared = modes.MODES[mode](modes.Setting("ncf", work, LOW, "the inner compiler"))
        seen.scaled_by.clear()  # building the shared optimizer's state is no step of the mode
        seen.regions.clear()
        with Products(seen):
            prepared.step()
        return seen, {parameter.dtype for parameter in prepared.parameters}

    return run


def spy(monkeypatch, owner, name, seen):
    real = getattr(owner, name)

    def noted(self, *args, **kwargs):
        note_scale(seen, self) if name == "scale" else seen.called.add(owner.__name__)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, noted)


def note_scale(seen, scaler):
    seen.scaled_by.add((type(scaler), scaler.is_enabled()))


PLAIN, THEIRS, OURS = {(torch.amp.GradScaler, False)}, {(torch.amp.GradScaler, True)}, {(LossScaler, True)}
MASTERS = {"MasterWeightOptimizer"}

# mode -> dtypes of products, of parameters, whether the loss is in autocast's region, who scales it, what is called
EXPECTED = {
    "fp32": ({FULL}, {FULL}, False, PLAIN, set()),
    "TF32": ({FULL}, {FULL}, False, PLAIN, set()),
    "autocast": ({LOW}, {FULL}, True, THEIRS, set()),
    "O1": ({LOW}, {FULL}, False, OURS, set()),
    "O2": ({LOW}, {LOW, FULL}, False, OURS, MASTERS),
    "apex O2": ({LOW}, {LOW, FULL}, False, {(StaticLossScaler, True)}, MASTERS | {"apex"}),
    "O1 graphed": ({LOW}, {FULL}, False, OURS, {"GraphedStep"}),
    "O2 graphed": ({LOW}, {LOW, FULL}, False, OURS, MASTERS | {"GraphedStep"}),
    "half": ({LOW}, {LOW}, False, PLAIN, set()),
    "compile autocast": ({LOW}, {FULL}, True, THEIRS, set()),
    "compile fxamp": ({FULL}, {FULL}, False, OURS, set()),  # torch.compile compiles nothing here
}


@pytest.mark.parametrize("mode", modes.MODES)
def test_a_mode_is_what_its_name_says(mode, step_of):
    seen, parameters = step_of(mode)
    products, stored, in_region, scaled_by, called = EXPECTED[mode]
    assert seen.products == products and parameters == stored
    assert seen.regions == {in_region} and seen.scaled_by == scaled_by and seen.called == called


@pytest.mark.parametrize("mode", modes.MODES)
def test_conversions_are_at_the_default_level(mode, step_of):
    seen, _ = step_of(mode)
    converts = mode.startswith("O")
    assert [(given["dtype"], given["opt_level"]) for given in seen.conversions] == [(LOW, mode[:2])] * converts
    assert all(set(given) == {"dtype", "opt_level", "example_inputs"} for given in seen.conversions)


@pytest.mark.parametrize("mode", modes.MODES)
def test_compiled_modes_differ_in_the_compiler_alone(mode, step_of):
    found = {
        "compile autocast": [{"backend": "the inner compiler"}],
        "compile fxamp": [{"backend": backend, "options": {"dtype": LOW, "inner": "the inner compiler"}}],
    }
    assert step_of(mode)[0].compilers == found.get(mode, [])


def one_call(tmp_path, monkeypatch, chosen, *arguments):
    monkeypatch.setattr(suite, "TINY_TURNS_SECONDS", 0.0)
    path = tmp_path / "speed.json"
    given = ["--dry-run", "--models", "ncf", "--sizes", "small", "--save", str(path), "--modes", *chosen, *arguments]
    code = suite.main(given)
    return code, {key.rpartition("/")[2]: row for key, row in suite.results.load(path)["data"]["rows"].items()}


def test_tf32_is_on_in_its_own_steps_alone(tmp_path, monkeypatch):
    seen = {}

    def noting(mode):
        build = modes.MODES[mode]

        def builder(setting):
            prepared = build(setting)

            def step():
                seen.setdefault(mode, set()).add(torch.backends.cuda.matmul.fp32_precision)
                return prepared.step()

            return dataclasses.replace(prepared, step=step)

        return builder

    for mode in ("autocast", "fp32", "TF32"):
        monkeypatch.setitem(modes.MODES, mode, noting(mode))
    one_call(tmp_path, monkeypatch, ["autocast", "fp32", "TF32"])
    assert seen.pop("TF32") == {"tf32"} and all("tf32" not in found for found in seen.values()) and len(seen) == 2


def test_memory_is_what_a_mode_holds_and_what_a_step_adds(tmp_path, monkeypatch):
    """A mode with a model of its own has its parameters and optimizer counted; one that shares, what it shares."""
    held = [0]
    make = modes.Setting.shared.func
    monkeypatch.setattr(measure, "allocated", lambda device: held[0])
    monkeypatch.setattr(measure, "peak_of", lambda step, device: 7)

    def adding(count, build):
        def builder(setting):
            found = build(setting)
            held[0] += count
            return found

        return builder

    monkeypatch.setattr(modes.Setting.shared, "func", adding(100, make))
    for mode in ("O1", "half"):
        monkeypatch.setitem(modes.MODES, mode, adding(1000, modes.MODES[mode]))
    found = {}
    real = suite.Suite._warm

    def warm(self, setting, mode, shared_bytes, is_asked):
        monkeypatch.setattr(self, "device", "cuda")
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(measure, "profiled", lambda step, device: measure.UNSEEN)
        try:
            prepared, facts = real(self, setting, mode, shared_bytes, is_asked)
        finally:
            self.device = "cpu"
        found[mode] = facts.get("peak_gb")
        return prepared, facts

    monkeypatch.setattr(suite.Suite, "_warm", warm)
    one_call(tmp_path, monkeypatch, ["autocast", "O1", "half"])
    assert found == {"autocast": 107e-9, "O1": 107e-9, "half": 1007e-9}


def test_a_loss_that_is_not_finite_is_noted(tmp_path, monkeypatch):
    build = modes.MODES["O1"]

    def broken(setting):
        prepared = build(setting)
        return dataclasses.replace(prepared, step=lambda: prepared.step() * float("inf"))

    monkeypatch.setitem(modes.MODES, "O1", broken)
    _, rows = one_call(tmp_path, monkeypatch, ["autocast", "O1"])
    assert rows["O1"]["note"] == "the loss is not finite" and rows["autocast"]["note"] == ""
    assert "the loss is not finite" in table.markdown(rows.values())


def test_times_are_medians(monkeypatch):
    samples = iter([(9.0, 9.0), (1.0, 4.0), (2.0, 5.0), (6.0, 7.0)])
    monkeypatch.setattr(measure, "timed", lambda *given: next(samples))
    assert measure.in_turns({"a": lambda: None}, 0.0, "cpu")["a"] == measure.Times(2.0, 5.0, 3)


def test_counted_bytes_are_those_of_forward_and_backward():
    weight = torch.nn.Parameter(torch.ones(8, 4))
    x = torch.ones(2, 4)
    prepared = modes.Prepared(lambda: None, lambda: (x @ weight.t()).sum(), [weight])
    forward = 4 * (x.numel() + weight.numel() + 16) + 4 * (16 + 1)
    assert measure.counted_nbytes(prepared) >= forward + 4 * (16 + x.numel() + weight.numel())


def test_each_cell_is_of_its_own_column():
    row = {
        "model": "gpt2", "size": "small", "batch": 3, "mode": "O1", "status": "ok", "ms": 4.0, "baseline_ms": 6.0,
        "host_ms": 5.0, "throughput": 1234.0, "unit": "tokens", "peak_gb": 7.0, "launches": 11, "busy_ms": 8.0,
        "copy_ms": 1.0, "gemm_ms": 2.0, "counted_gb": 9.0, "note": "a note",
    }  # fmt: skip
    cells = {name: cell(row) for name, cell in table.COLUMNS.items()}
    limit = cells.pop("limited by")
    assert limit.startswith("bytes") and cells == {
        "model": "gpt2", "batch": "3", "mode": "O1", "ms": "4.00", "x autocast": "1.500", "host ms": "5.00",
        "a second": "1,234 tokens", "peak GB": "7.00", "kernels": "11", "casts": "12%", "GEMM": "25%",
        "counted GB": "9.0", "note": "a note",
    }  # fmt: skip


def test_throughput_is_of_units_in_a_second():
    times = measure.Times(20.0, 1.0, 3)
    assert suite._timed(times, times, 512)["throughput"] == pytest.approx(512 / 0.020)


@pytest.mark.parametrize("name", FAMILIES)
def test_inputs_are_those_that_are_reported(name):
    """At the published sizes: as many units as throughput counts."""
    family = FAMILIES[name]
    with torch._subclasses.FakeTensorMode():
        work = workload(name, "small", CPU)
    counted = {"images": work.inputs[0].shape[0], "samples": work.inputs[0].shape[0]}
    counted["tokens"] = work.inputs[0].numel()
    assert work.units == counted[work.unit] and work.batch_size == family.sizes[0] == work.inputs[0].shape[0]


def test_channels_last_is_channels_last():
    for name, wanted in (("resnet50", False), ("resnet50_channels_last", True)):
        work = workload(name, "small", CPU, tiny=True)
        weights = [p for p in work.make().parameters() if p.dim() == 4 and p.shape[2] > 1 and p.shape[1] > 1]
        for tensor in (work.inputs[0], *weights):
            assert tensor.is_contiguous(memory_format=torch.channels_last) == wanted


def test_skipped_steps_are_noted(tmp_path, monkeypatch):
    """They are shorter than others."""

    def overflows(setting):
        model, optimizer = setting.shared
        scaler = modes.loss_scaler(setting)

        def step():
            optimizer.zero_grad()
            loss = setting.work.loss_fn(model(*setting.work.inputs), setting.work.targets)
            (scaler.scale(loss) * 1e38).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        parameters = list(model.parameters())
        return modes.Prepared(step, None, parameters, True, note=lambda: "a note", scale=scaler.get_scale)

    monkeypatch.setitem(modes.MODES, "O1", overflows)
    _, rows = one_call(tmp_path, monkeypatch, ["autocast", "O1", "O2", "O1 graphed"])
    assert rows["O1"]["note"] == f"a note; {suite.SKIPPED}"
    assert all(suite.SKIPPED not in rows[mode]["note"] for mode in rows if mode != "O1")


@pytest.mark.parametrize("mode", ["autocast", "O1", "O2", "O1 graphed", "O2 graphed", "compile fxamp"])
def test_each_mode_tells_its_scale(mode, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **given: model)
    prepared = modes.MODES[mode](modes.Setting("ncf", workload("ncf", "small", CPU, tiny=True), LOW, "eager"))
    prepared.step()
    assert prepared.scale() == modes.SCALE and prepared.scale.__name__ == "get_scale"


def test_an_interrupted_row_is_measured_by_the_next_call(tmp_path, monkeypatch):
    """As often as it was interrupted; a process that ends by itself is another thing."""

    def stop(setting):
        raise KeyboardInterrupt

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setitem(modes.MODES, "O1", stop)
            _, rows = one_call(tmp_path, monkeypatch, ["autocast", "O1"])
        assert rows["O1"]["status"] == "not run: interrupted" and (tmp_path / "speed.md").exists()
    code, rows = one_call(tmp_path, monkeypatch, ["autocast", "O1"])
    assert code == 0 and rows["O1"]["status"] == rows["autocast"]["status"] == "ok"


def test_a_dry_run_in_which_a_row_has_failed_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(modes.MODES, "O1", lambda setting: 1 // 0)
    code, _ = one_call(tmp_path, monkeypatch, ["autocast", "O1"])
    assert code == 1 and "1 of them failed" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite.Suite, "run", lambda *given: pytest.fail("it ran"))
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as end:
        suite.main(["--dry-run", "--save", str(tmp_path / "file" / "speed.json")])
    assert end.value.code == 2 and "cannot be written: " in capsys.readouterr().err


def test_an_lstm_runs_low_on_any_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "TINY_TURNS_SECONDS", 0.0)
    path = str(tmp_path / "speed.json")
    given = ["--dry-run", "--models", "gnmt", "--sizes", "small", "--save", path, "--modes", "autocast"]
    assert suite.main(given) == 0
