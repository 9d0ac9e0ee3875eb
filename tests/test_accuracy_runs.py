"""A record of the accuracy suite is of what its name says: the mode, the seed, the losses, the held-out examples."""

import dataclasses
import inspect
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxamp.demo import loop
from fxamp.demo.suite import records
from fxamp.demo.suite.modes import MODES
from fxamp.demo.suite.plot import plot
from fxamp.demo.suite.records import Record, Store, SuiteJob, TaskFacts
from fxamp.demo.suite.table import overview, same_as_autocast, task_table
from fxamp.demo.suite.task import SuiteTask
from fxamp.demo.suite.tasks import TASKS
from fxamp.runtime.master_weights import MasterWeightOptimizer

for package in ("sklearn", "tqdm", "matplotlib"):
    pytest.importorskip(package)

CPU = torch.device("cpu")
FP16, BF16 = torch.float16, torch.bfloat16
CONVERTED = {
    "O1 strict fp16": (FP16, "strict", "O1"),
    "O1 balanced fp16": (FP16, "balanced", "O1"),
    "O1 aggressive fp16": (FP16, "aggressive", "O1"),
    "O1 strict bf16": (BF16, "strict", "O1"),
    "O1 balanced bf16": (BF16, "balanced", "O1"),
    "O1 aggressive bf16": (BF16, "aggressive", "O1"),
    "O2 fp16": (FP16, "balanced", "O2"),
    "O2 bf16": (BF16, "balanced", "O2"),
}
"""Mode -> what `fxamp.convert` is given: dtype, level, opt_level."""
REGIONS = {"autocast fp16": FP16, "autocast bf16": BF16}
EXAMPLES = 2 * loop.TEST_BATCH - 100
"""Held out: the second batch of the test is smaller than the first."""


class Noted:
    """A linear layer to train, and what happened: `runs`, `seeds`, what the loss and the metric were called with."""

    def __init__(self, steps: int = 2, blow_up: float = 1.0) -> None:
        self.runs, self.seeds, self.losses, self.metrics = [], [], [], []
        self.steps, self.blow_up = steps, blow_up
        self.task = SuiteTask(
            name="tiny",
            title="a linear layer",
            model=self.model,
            batches=self.batches,
            held_out=(torch.linspace(-1, 1, EXAMPLES * 8).view(-1, 8), torch.arange(EXAMPLES * 2.0).view(-1, 2)),
            steps=steps,
            learning_rate=1e-3,
            loss=self.loss,
            metric=self.metric,
            run=lambda *arguments: self.runs.append(loop.Run(*arguments)) or self.runs[-1],
        )

    def model(self):
        self.seeds.append(torch.initial_seed())
        return nn.Linear(8, 2)

    def batches(self, seed):
        self.seeds.append(seed)
        for _ in range(self.steps):
            yield torch.ones(4, 8), torch.ones(4, 2)

    def loss(self, outputs, targets):
        region = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        self.losses.append((region, outputs.dtype, tf32, torch._C._get_mkldnn_enabled()))
        return F.mse_loss(outputs.float(), targets) * self.blow_up

    def metric(self, outputs, targets):
        self.metrics.append((outputs, targets))
        return 0.25


@pytest.fixture
def conversions(monkeypatch) -> list:
    """(dtype, level, opt_level) of each conversion; everything is converted all the same."""
    found, convert = [], loop.convert

    def noted(*args, **kwargs):
        given = inspect.signature(convert).bind(*args, **kwargs)
        given.apply_defaults()
        found.append(tuple(given.arguments[name] for name in ("dtype", "level", "opt_level")))
        return convert(*args, **kwargs)

    monkeypatch.setattr(loop, "convert", noted)
    return found


@pytest.fixture
def record_of(monkeypatch):
    """The record that a mode's job makes of a task."""

    def trained(task: SuiteTask, mode: str, seed: int = 1) -> Record:
        monkeypatch.setattr(records, "task_of", lambda *_: task)
        found = SuiteJob("flow", mode, seed, "cpu").run(lambda: None)
        assert found.error is None and (found.mode, found.seed) == (mode, seed)
        return found

    return trained


# -------------------------------------------------------------------------------------------------- modes and seeds


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_trains_and_tests_in_what_it_is_named_for(mode, conversions, record_of):
    noted = Noted()
    record_of(noted.task, mode)
    assert conversions == ([CONVERTED[mode]] if mode in CONVERTED else [])
    region = REGIONS.get(mode)
    is_tf32 = mode == "tf32"
    seen = (region, region or torch.float32, (is_tf32, is_tf32), True)
    assert noted.losses == [seen] * 4, "two steps, and two batches held out"
    (run,) = noted.runs
    assert isinstance(run.optimizer, MasterWeightOptimizer) == mode.startswith("O2")


def test_a_task_of_lstms_runs_without_onednn(record_of):
    noted = Noted()
    record_of(dataclasses.replace(noted.task, onednn=False), "fp32")
    assert {onednn for *_, onednn in noted.losses} == {False}


@pytest.mark.parametrize("mode", ["fp32", "autocast bf16", "O1 strict bf16", "O2 bf16"])
def test_both_models_of_a_gan_are_of_the_mode(mode, conversions, record_of):
    whole = TASKS["adversarial"](CPU, steps=2)
    held_out = tuple(part[:8] for part in whole.held_out)
    seen = []

    def metric(made, scans):
        seen.append((made.dtype, scans))
        return 0.25

    record_of(dataclasses.replace(whole, held_out=held_out, metric=metric), mode)
    assert conversions == ([CONVERTED[mode]] * 2 if mode in CONVERTED else [])
    ((dtype, scans),) = seen
    assert dtype == REGIONS.get(mode, torch.float32) and scans is held_out[1]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_seed_is_that_of_weights_and_batches(seed, record_of):
    noted = Noted()
    record_of(noted.task, "fp32", seed)
    assert noted.seeds == [seed] * 3, "of the first batch as an example, of the weights, of the training"


# ---------------------------------------------------------------------------------------------- what a record holds


@pytest.mark.parametrize(
    ("bad", "loss"),
    [
        ({}, 18.5),
        ({0: math.nan, 17: math.inf}, 18.5),
        ({18: math.nan}, math.nan),
        ({19: math.inf}, math.inf),
    ],
)
def test_the_final_loss_is_the_mean_of_the_last_tenth(bad, loss, record_of, monkeypatch):
    numbers = [bad.get(number, float(number)) for number in range(20)]
    rest = iter(numbers)
    monkeypatch.setattr(loop.Run, "step", lambda *_: next(rest))
    found = record_of(Noted(steps=20).task, "fp32")
    assert repr(found.loss) == repr(loss)
    assert repr(found.curve) == repr(tuple(numbers))


def test_the_held_out_examples_are_tested_all_of_them(record_of):
    noted = Noted()
    found = record_of(noted.task, "fp32")
    inputs, answers = noted.task.held_out
    ((outputs, targets),) = noted.metrics
    wanted = noted.runs[0].model(inputs)
    assert targets is answers
    torch.testing.assert_close(outputs, wanted.detach())
    assert found.metric == 0.25
    assert found.held_out_loss == pytest.approx(F.mse_loss(wanted, answers).item(), rel=1e-5)  # float32, two batches


def test_a_held_out_loss_that_is_none_is_kept(record_of):
    assert math.isnan(record_of(Noted(blow_up=math.nan).task, "fp32").held_out_loss)


@pytest.mark.parametrize("mode", MODES)
def test_the_steps_that_the_scaler_left_out_are_counted(mode, record_of):
    """A gradient of 1e6 times 65536 is infinite in float16, and so is that of the next step."""
    assert record_of(Noted(blow_up=1e6).task, mode).skipped == (2 if mode.endswith("fp16") else 0)


# ------------------------------------------------------------------------------------------------- tables and plot


@pytest.fixture
def store(tmp_path) -> Store:
    """Two seeds in some modes; O2 bf16 is outside of fp32's spread, and a loss of O2 fp16 is none."""
    kept = Store(tmp_path / "accuracy.json", {})
    kept.tasks["detection"] = TaskFacts("SSD", "mAP", True, 1234, 10)
    metrics = {
        "fp32": (0.5, 0.6),
        "autocast fp16": (0.52, 0.56),
        "autocast bf16": (0.52, 0.56),
        "O1 balanced fp16": (0.52, 0.56),
        "O2 fp16": (0.56, 0.52),
        "O2 bf16": (0.2, 0.4),
    }
    for mode, of in metrics.items():
        for seed, metric in enumerate(of, 1):
            loss = math.nan if (mode, seed) == ("O2 fp16", 2) else 2.0 * seed
            curve = (3.0 * seed, 2.0 * seed)
            kept.add(Record("detection", mode, seed, 10, loss, seed / 2, metric, 5, 9, 1.0 * seed, seed, 1.0, curve))
    return kept


def cells(table: str) -> dict[str, list[str]]:
    """First cell of a row -> the others."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    return {first: others for first, *others in rows}


def test_the_tables_show_means_over_the_seeds(store):
    short, whole = cells(overview(store)), cells(task_table(store, "detection"))
    assert dict(zip(short["task"], short["detection"], strict=True)) == {
        "metric (better)": "mAP (up)",
        "fp32's spread": "0.5..0.6",
        "fp32": "0.55",
        "autocast fp16": "0.54",
        "autocast bf16": "0.54",
        "O1 balanced fp16": "0.54",
        "O2 fp16": "0.54",
        "O2 bf16": r"0.3\*",
    }
    assert dict(zip(whole["mode"], whole["O2 bf16"], strict=True)) == {
        "mAP": "0.3",
        "spread": "2..4",  # the last of two: of the losses
        "test loss": "0.75",
        "final loss": "3",
        "low / nodes": "5 / 9",
        "casts": "1.5",
        "skipped": "3",
        "within fp32's spread": "NO: worse by 0.2",
    }
    assert whole["O2 bf16"][1] == "0.2..0.4"
    assert dict(zip(whole["mode"], whole["O2 fp16"], strict=True))["final loss"] == "nan"


def test_a_row_is_autocasts_where_every_seed_is(store):
    """O2 fp16 has the same metrics, of other seeds; O2 bf16 has others."""
    assert same_as_autocast(store).startswith("1 of 3 rows of fxamp have exactly the metrics of autocast")


def test_the_plot_draws_every_curve_at_its_steps(store, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn, whole = [], Axes.plot

    def noted(axis, *args, **kwargs):
        drawn.append((list(args[0]), tuple(args[1]), args[2], kwargs["label"]))
        return whole(axis, *args, **kwargs)

    monkeypatch.setattr(Axes, "plot", noted)
    plot(store, tmp_path / "accuracy.png")
    assert sorted(curve for _, curve, *_ in drawn) == sorted(one.curve for one in store.records)
    assert all(places == [2.5, 7.5] for places, *_ in drawn)
    assert {style: [label for *_, each, label in drawn if each == style and label] for _, _, style, _ in drawn} == {
        "k:": ["fp32"],
        "C1-": ["autocast"],
        "C0-": ["fxamp"],
    }
    assert [style for _, _, style, _ in drawn].count("C0-") == 6
