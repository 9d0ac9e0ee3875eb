"""tools/gpu_models on the CPU: what it measures, what it does with what fails, and its tables."""

import inspect
import math

import pytest
import torch
from torch import nn

from fxamp.counting import gpu_models, gpu_models_table, results
from fxamp.counting.zoo import Step
from fxamp.dtypes import dtype_name

FP16, BF16 = torch.float16, torch.bfloat16


def test_distances_are_of_the_same_numbers():
    found = gpu_models.distances("ncf", 0, "cpu", True)
    assert set(found) == {f"{way} {dtype}" for way in ("autocast", "O1", "O2") for dtype in ("float16", "bfloat16")}
    assert all(0 < outputs < 0.05 and 0 < gradients < 0.05 for outputs, gradients in found.values())
    assert found == gpu_models.distances("ncf", 0, "cpu", True)


@pytest.fixture
def conversions(monkeypatch) -> list:
    """(dtype, opt_level, level) of each conversion; everything is converted all the same."""
    found, convert = [], gpu_models.convert

    def noted(*args, **kwargs):
        given = inspect.signature(convert).bind(*args, **kwargs)
        given.apply_defaults()
        found.append(tuple(given.arguments[name] for name in ("dtype", "opt_level", "level")))
        return convert(*args, **kwargs)

    monkeypatch.setattr(gpu_models, "convert", noted)
    return found


@pytest.mark.parametrize(
    ("way", "converted", "seen", "weights"),
    [
        ("fp32", [], (None, torch.float32), torch.float32),
        ("autocast", [], (BF16, BF16), torch.float32),
        ("O1", [(BF16, "O1", "balanced")], (None, torch.float32), torch.float32),
        ("O2", [(BF16, "O2", "balanced")], (None, torch.float32), BF16),
        ("half", [], (None, torch.float32), BF16),
    ],
)
def test_a_way_is_what_it_is_named_for(way, converted, seen, weights, conversions):
    """`seen`: the region in which the loss is computed, and the dtype of what it is given."""
    losses = []

    def loss_of(found):
        losses.append((torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None, found.dtype))
        return found.float().sum()

    model, run = gpu_models.loss_of(Step(nn.Linear(8, 8), (torch.ones(2, 8),), loss_of), way, BF16, "cpu")
    run()
    assert conversions == converted and losses == [seen]
    assert next(model.parameters()).dtype == weights
    assert way in gpu_models_table.TIMED


def test_a_row_is_measured_in_the_way_it_is_of(conversions, monkeypatch):
    ways, whole = [], gpu_models.loss_of
    monkeypatch.setattr(gpu_models, "loss_of", lambda *args: ways.append(args[1:3]) or whole(*args))
    found = gpu_models.distances("ncf", 0, "cpu", True)
    fp32, *compared = ways
    assert fp32 == ("fp32", torch.float32)
    assert [f"{way} {dtype_name(dtype)}" for way, dtype in compared] == list(found)
    assert conversions == [(dtype, way, "balanced") for dtype in (FP16, BF16) for way in ("O1", "O2")]
    ways.clear()
    found = gpu_models.times("ncf", "cpu", True)
    assert ways == [(way, FP16) for way in found] and list(found) == ["fp32", "autocast", "O1", "O2", "half"]


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop_rate, self.layer = nn.Linear(4, 4), 0.5, nn.Dropout(0.5)

    def forward(self, x):
        x = nn.functional.dropout(self.first(x), 0.5)
        return self.layer(nn.functional.alpha_dropout(x, self.drop_rate, self.training))


def test_nothing_is_dropped():
    """Masks are other ones in another dtype: a distance would be theirs."""
    model, x = Dropping().train(), torch.ones(64, 4)
    with gpu_models.without_dropout(model):
        assert torch.equal(model(x), model.first(x))
    assert not torch.equal(nn.functional.dropout(x, 0.5), x)
    others = nn.ModuleList([nn.LSTM(4, 4, 2, dropout=0.5), nn.Dropout2d(0.5)])
    with gpu_models.without_dropout(others):
        assert others[0].dropout == others[1].p == 0.0


def test_buffers_and_gradients_of_one_run_are_not_the_next_ones():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    x = torch.randn(8, 3)
    before = [buffer.clone() for buffer in model.buffers()]
    run = lambda: (out := model(x), out.square().mean())  # noqa: E731
    first, again = (gpu_models._results(model, run, 4.0) for _ in range(2))
    assert all(map(torch.equal, before, model.buffers()))
    for one, other in zip(first, again, strict=True):
        assert all(map(torch.equal, one, other))


def test_distance():
    ones = [torch.ones(3), torch.ones(2, 2)]
    assert gpu_models.distance([1.5 * each for each in ones], ones) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="1 tensors, expected 2"):
        gpu_models.distance(ones[:1], ones)


def test_every_way_is_timed_and_one_that_fails_says_why(monkeypatch):
    whole = gpu_models.loss_of

    def failing(step, way, dtype, device):
        if way == "half":
            raise RuntimeError("no such kernel")
        return whole(step, way, dtype, device)

    monkeypatch.setattr(gpu_models, "loss_of", failing)
    found = gpu_models.times("ncf", "cpu", True)
    assert found["half"] == {"failed": "RuntimeError: no such kernel"}
    assert all(found[way]["ms"] > 0 and found[way]["kernels"] > 0 for way in ("fp32", "autocast", "O1", "O2"))
    assert gpu_models_table.failures({"times": {"ncf": found}, "distances": {}}) == [
        "ncf half, times: RuntimeError: no such kernel"
    ]


def test_the_tables_tell_what_failed_and_what_is_not_finite():
    """They stand on pages of their own, each with what it lacks."""
    whole = {f"{way} {dtype}": [1e-3, 1e-3] for way in ("autocast", "O1", "O2") for dtype in ("float16", "bfloat16")}
    data = {
        "times": {"ncf": {"failed": "RuntimeError: no room"}},
        "distances": {"ncf/0": {**whole, "O1 float16": [math.nan, 1e-3]}, "unet/0": {"failed": "ValueError: no"}},
    }
    assert "ncf, times: RuntimeError: no room" in gpu_models_table.times(data)
    text = gpu_models_table.distances(data)
    assert "ncf/0 O1 float16, distances: not finite" in text and "unet/0, distances: ValueError: no" in text
    assert gpu_models_table.markdown(data).count("not finite") == 1


def test_a_call_goes_on_with_what_is_missing(tmp_path, capsys):
    path = tmp_path / "rows.json"
    assert gpu_models.main(["ncf", "--dry-run", "--parts", "times", "--save", str(path)]) == 0
    before = results.load(path)
    assert gpu_models.main(["ncf", "--dry-run", "--parts", "times", "--save", str(path)]) == 0
    assert results.load(path)["data"] == before["data"]
    assert "| ncf " in capsys.readouterr().out


def test_ratios_are_to_autocast():
    facts = {
        way: {"ms": ms, "kernels": 10, "copies": 4, "peak_gb": 1.0} for way, ms in (("autocast", 6.0), ("O1", 3.0))
    }
    data = {"times": {"ncf": facts, "gnmt": {"failed": "OutOfMemoryError"}}, "distances": {}}
    cells = [cell.strip() for cell in gpu_models_table.times(data).splitlines()[2].split("|")]
    assert cells[1:7] == ["ncf", "6", "2", "-", "-", "-"]
    rows = {
        "ncf/0": {"autocast float16": [0.1, 0.0], "O1 float16": [0.05, 0.0]},
        "ncf/1": {"autocast float16": [0.1, 0.0], "O1 float16": [0.15, 0.0]},
    }
    table = gpu_models_table.distances({"times": {}, "distances": rows})
    assert [cell.strip() for cell in table.splitlines()[2].split("|")][1:6] == ["ncf", "0.1", "1.12", "-", "0"]
    assert "over\n2 seeds" in table


def test_a_wrong_name_and_another_machine_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_models.main(["nfc", "--dry-run"])
    assert "'nfc' is none of the models" in capsys.readouterr().err
    path = tmp_path / "rows.json"
    data = {"tiny": False, "distances": {}, "times": {}}
    results.save({**results.make("tools/gpu_models", [], data, 0.0), "machine": "another GPU"}, path)
    with pytest.raises(SystemExit):
        gpu_models.main(["ncf", "--dry-run", "--save", str(path)])
    assert "has rows of another GPU with torch" in capsys.readouterr().err
