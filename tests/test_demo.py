"""The main job, a few steps long: every row, every number in it, and that a claim can fail."""

import dataclasses
import importlib
import json

import pytest
import torch
from torch import nn

import fxamp
from fxamp import demo
from fxamp.counting.counts import Counter
from fxamp.demo.jobs import Job, Runner, task_of
from fxamp.demo.loop import FP32, MIXED, Mode, Result, Run, rate
from fxamp.demo.table import COLUMNS, Claim, claims, median_of, table
from fxamp.demo.tasks import CHARACTERS, OTHER, TASKS, Task, encode, in_nine_places, load, windows

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

CPU = torch.device("cpu")
BF16, FP16 = torch.bfloat16, torch.float16
STEPS = 3


@pytest.fixture(scope="module", params=TASKS)
def task(request) -> Task:
    """A task of three steps, tested on eight inputs."""
    built = TASKS[request.param](CPU, STEPS)
    inputs, targets = built.held_out
    return dataclasses.replace(built, held_out=(inputs[:8], targets[:8]))


# ---------------------------------------------------------------------------------------------------- one run


@pytest.mark.parametrize("mode", [FP32, *MIXED], ids=lambda mode: mode.name)
def test_every_mode_fills_its_row(task, mode):
    called = []
    result = Run(task, mode, seed=1)(lambda: called.append(1))
    assert len(called) == STEPS
    assert result.mode is mode
    assert 0 < result.loss < 10 and 0 < result.held_out_loss < 10 and 0 <= result.accuracy <= 1
    assert (result.casts > 0) == (mode is not FP32)
    assert result.tensors_cast >= result.casts
    assert (result.nodes is not None and 0 < result.low <= result.nodes) == (mode.engine == "fxamp")
    assert 0 < result.milliseconds < 1e3 * result.seconds
    assert result.skipped == 0 or mode.dtype == FP16


def test_fxamp_makes_fewer_casts_than_autocast(task):
    autocast, ours = (Run(task, mode, seed=1)() for mode in MIXED[:2])
    assert ours.casts < autocast.casts


def test_precisions_start_from_the_same_weights_and_batches(task):
    fp32, *mixed = (Run(task, mode, seed=5) for mode in (FP32, *MIXED))
    first, _ = next(task.batches(5))
    for run in mixed:
        assert list(run.model.state_dict()) == list(fp32.model.state_dict())
        assert all(map(torch.equal, run.model.state_dict().values(), fp32.model.state_dict().values()))
    assert torch.equal(first, next(task.batches(5))[0])
    assert not torch.equal(first, next(task.batches(6))[0])


def test_fp32_twice_is_the_same_to_the_bit(task):
    first, second = (Run(task, FP32, seed=2)() for _ in range(2))
    assert (first.loss, first.held_out_loss, first.accuracy) == (second.loss, second.held_out_loss, second.accuracy)


def test_only_fp16_is_scaled(task):
    scalers = {mode.name: Run(task, mode, seed=1).scaler for mode in (FP32, *MIXED)}
    assert {name for name, scaler in scalers.items() if scaler.is_enabled()} == {"autocast fp16", "fxamp fp16"}
    assert type(scalers["autocast fp16"]) is torch.amp.GradScaler
    assert type(scalers["fxamp fp16"]) is fxamp.LossScaler


def test_an_overflow_is_counted_as_a_skipped_step(task):
    run = Run(task, next(mode for mode in MIXED if mode.name == "fxamp fp16"), seed=1)
    run.scaler = fxamp.LossScaler(init_scale=2.0**24, device="cpu")
    before = {name: value.clone() for name, value in run.model.named_parameters()}
    run.set_rate(1)
    run.step(*next(task.batches(1)))
    assert run.skipped == 1
    assert all(torch.equal(value, before[name]) for name, value in run.model.named_parameters())


def test_learning_rate():
    assert [round(rate(progress), 3) for progress in (0, 0.05, 0.1, 0.55, 1)] == [0, 0.5, 1, 0.5, 0]


# ------------------------------------------------------------------------------------------ what is a cast


@pytest.mark.parametrize(
    ("text", "calls", "tensors"),
    [
        ("x + x", 0, 0),
        ("x.to(BF16)", 1, 1),
        ("x.to(BF16).float()", 2, 2),
        ("x.clone()", 0, 0),  # the dtype stays
        ("i.float()", 0, 0),  # not from a floating dtype
        ("x.long()", 0, 0),
        ("x.bfloat16() + x", 1, 1),  # the sum promotes inside its kernel
        ("torch.empty(2, dtype=FP16).copy_(x)", 1, 1),
        ("torch._foreach_copy_([torch.empty(2, dtype=FP16), torch.empty(2)], [x, x])", 1, 1),
        ("torch._foreach_copy_([torch.empty(2, dtype=FP16) for _ in '123'], [x, x, x])", 1, 3),
        ("x.requires_grad_().to(BF16).sum().backward()", 2, 2),  # and the gradient back
    ],
)
def test_what_the_loop_counts_as_a_cast(text, calls, tensors):
    names = {"torch": torch, "BF16": BF16, "FP16": FP16, "x": torch.ones(2), "i": torch.ones(2, dtype=torch.long)}
    with Counter() as counter:
        eval(text, names)
    assert (counter.counts.casts, counter.counts.tensors_cast) == (calls, tensors)


def test_casts_of_a_hand_made_step_under_autocast():
    """Two layers, no bias: two weights and the input go down, relu passes the low value on; backward, two up."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    with Counter() as counter:
        with torch.autocast("cpu", BF16):
            out = model(torch.ones(2, 4))
        out.sum().backward()
    assert counter.counts.casts == counter.counts.tensors_cast == 3 + 2


# ----------------------------------------------------------------------------------------------------- the data


def test_held_out_scans_are_not_learnt():
    digits = TASKS["digits"](CPU, steps=200)
    middle = len(digits.held_out[0]) // 9
    held_out = {bytes(scan.numpy().tobytes()) for scan in digits.held_out[0][4 * middle : 5 * middle]}
    learnt = {bytes(scan.numpy().tobytes()) for inputs, _ in digits.batches(1) for scan in inputs}
    assert middle == 599 and len(held_out) == 599
    assert not held_out & learnt


def test_nine_places():
    scan = torch.zeros(1, 1, 8, 8)
    scan[0, 0, 3, 4] = 1
    placed, labels = in_nine_places(scan, torch.tensor([7]))
    assert sorted(map(tuple, placed.nonzero()[:, 2:].tolist())) == [(r, c) for r in (2, 3, 4) for c in (3, 4, 5)]
    assert labels.tolist() == [7] * 9


def test_text_becomes_symbols_and_windows(tmp_path):
    (tmp_path / "a.py").write_text("ab\n")
    (tmp_path / "b.py").write_text("é~")
    text = encode([tmp_path / "a.py", tmp_path / "b.py"])
    assert text.tolist() == [CHARACTERS.index("a"), CHARACTERS.index("b"), 0, OTHER, CHARACTERS.index("~")]
    inputs, targets = windows(text, torch.tensor([0, 2]), context=2)
    assert torch.equal(inputs, torch.stack([text[0:2], text[2:4]]).long())
    assert torch.equal(targets, torch.stack([text[1:3], text[3:5]]).long())


def test_a_missing_package_is_named(monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(fxamp.FxampError, match=r"needs 'sklearn'.*pip install 'fxamp\[demo\]'"):
        load("sklearn.datasets")


# ------------------------------------------------------------------------------------------ table and claims


def row(mode=FP32, seed=1, **numbers) -> Result:
    found = {"loss": 1.0, "accuracy": 0.97, "casts": 5.0, **numbers}
    return Result(
        mode=mode, seed=seed, held_out_loss=1.1, low=None, nodes=None, tensors_cast=9, skipped=0, milliseconds=1,
        seconds=2, **found,
    )  # fmt: skip


SEEDS = [row(seed=1, accuracy=0.96), row(seed=2, accuracy=0.98, loss=2.0), row(seed=3, accuracy=0.97, loss=3.0)]
AUTOCAST, OURS = MIXED[:2]


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ({"loss": 3.029, "accuracy": 0.96, "casts": 4}, "PASS PASS PASS"),
        ({"loss": 2.971, "accuracy": 0.98, "casts": 4}, "PASS PASS PASS"),
        ({"loss": 3.031, "accuracy": 0.97, "casts": 4}, "FAIL PASS PASS"),
        ({"loss": 2.969, "accuracy": 0.97, "casts": 4}, "FAIL PASS PASS"),
        ({"loss": float("nan"), "accuracy": 0.97, "casts": 4}, "FAIL PASS PASS"),
        ({"loss": 3, "accuracy": 0.951, "casts": 4}, "PASS PASS PASS"),
        ({"loss": 3, "accuracy": 0.989, "casts": 4}, "PASS PASS PASS"),
        ({"loss": 3, "accuracy": 0.949, "casts": 4}, "PASS FAIL PASS"),
        ({"loss": 3, "accuracy": 0.991, "casts": 4}, "PASS FAIL PASS"),
        ({"loss": 3, "accuracy": float("nan"), "casts": 4}, "PASS FAIL PASS"),
        ({"loss": 3, "accuracy": 0.97, "casts": 5}, "PASS PASS FAIL"),
    ],
)
def test_claims(ours, verdict):
    found = claims(SEEDS, [row(AUTOCAST, 3, loss=9), row(OURS, 3, **ours)])
    assert " ".join(str(claim).split()[0] for claim in found) == verdict


def test_an_accuracy_beside_that_of_two_seeds_that_end_alike_holds():
    seeds = [row(seed=1, accuracy=0.96), row(seed=2, accuracy=0.97), row(seed=3, accuracy=0.97)]
    found = claims(seeds, [row(AUTOCAST, 3), row(OURS, 3, casts=4, accuracy=0.9701)])
    assert all(claim.holds for claim in found)
    assert "(1.00%): 97.01% for 97.00%" in found[1].text


def test_claims_compare_with_autocast_of_the_same_dtype():
    mixed = [row(mode, 3, loss=3, casts=casts) for mode, casts in zip(MIXED, (9, 8, 7, 7), strict=True)]
    assert [claim.holds for claim in claims(SEEDS, mixed)] == [True, True, True, True, True, False]


def test_the_seed_in_the_middle_is_repeated():
    assert median_of(SEEDS).seed == 3


def test_table_has_a_row_a_run():
    lines = table([*SEEDS, row(OURS)]).splitlines()
    assert len(lines) == 2 + 4
    assert all(name in lines[0] for name in COLUMNS)
    assert lines[-1].split()[:2] == ["fxamp", "bf16"]


# ------------------------------------------------------------------------------------------------ the whole job


@pytest.fixture
def threads():
    """As many as there were."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def short(monkeypatch, threads):
    """Two steps and a small test set."""
    whole = TASKS["digits"]

    def digits(device, steps=2):
        built = whole(device, steps)
        return dataclasses.replace(built, held_out=tuple(part[:64] for part in built.held_out))

    monkeypatch.setitem(TASKS, "digits", digits)
    task_of.cache_clear()
    yield
    task_of.cache_clear()


@pytest.mark.parametrize("holds", [True, False])
def test_the_job(short, tmp_path, capsys, monkeypatch, holds):
    monkeypatch.setattr(demo, "claims", lambda fp32, mixed: [Claim(f"{len(fp32)} and {len(mixed)} runs", holds)])
    status = demo.main(["--tasks", "digits", "--device", "cpu", "--workers", "1", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert status == (0 if holds else 1)
    assert f"{'PASS' if holds else 'FAIL'}  3 and 4 runs" in printed
    assert all(mode.name in printed for mode in MIXED)
    assert str(tmp_path) in printed.splitlines()[-1]
    for mode in ("fxamp-bf16", "fxamp-fp16"):
        assert (tmp_path / "digits" / mode / "graph.diff").read_text()


def test_the_job_as_json(short, tmp_path, capsys):
    status = demo.main(["--tasks", "digits", "--device", "cpu", "--workers", "1", "--out", str(tmp_path), "--json"])
    printed = capsys.readouterr()
    read = json.loads(printed.out)
    (results,) = read["tasks"].values()
    assert [result["mode"] for result in results] == ["fp32"] * 3 + [mode.name for mode in MIXED]
    assert len(read["claims"]) == 6 and {"text", "holds"} == read["claims"][0].keys()
    assert status == (0 if all(claim["holds"] for claim in read["claims"]) else 1)
    assert read["graphs"] == str(tmp_path) and "claims hold" in printed.err


def test_two_at_a_time_give_what_one_gives(tmp_path, threads):
    torch.set_num_threads(1)
    jobs = [Job("digits", 2, "cpu", mode, 1, tmp_path) for mode in (FP32, MIXED[1])]
    found = []
    for workers in (1, 2):
        with Runner(workers, steps=4) as runner:
            found.append(runner.run("digits", jobs))
            assert runner.bar.n == 4
    alone, together = ([(one.mode, one.loss, one.held_out_loss, one.casts) for one in results] for results in found)
    assert alone == together


def test_a_job_that_fails_says_so(tmp_path):
    with Runner(2, steps=2) as runner, pytest.raises(KeyError, match="digitz"):
        runner.run("digits", [Job("digitz", 2, "cpu", FP32, 1, tmp_path)])


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(fxamp.FxampError, match="--device cuda:99"):
        demo.main(["--device", "cuda:99"])


def test_a_run_too_short_to_count_casts_is_refused():
    with pytest.raises(fxamp.OptionError, match=r"--steps 1: .* at least"):
        demo.main(["--steps", "1", "--device", "cpu"])


def test_casts_are_counted_when_masters_are_compared_with_their_parameters_no_more():
    def casts(steps):
        return Run(task_of("digits", steps, "cpu"), Mode("fxamp", torch.bfloat16, opt_level="O2"), 1)().casts

    assert casts(8) < casts(3)
