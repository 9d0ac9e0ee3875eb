"""FXAMP_DISABLE and O0: a script that asks about its models runs on, and is told."""

import json
import logging

import pytest
import torch
from torch import nn

import fxamp
from fxamp.errors import OptionError
from fxamp.model import unconverted

X = torch.ones(2, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).relu()


@pytest.fixture(params=["FXAMP_DISABLE=1", "opt_level='O0'"])
def left(request, monkeypatch):
    """A model that convert() left as it is, and why."""
    monkeypatch.setattr(unconverted, "_said", set())
    if request.param.startswith("FXAMP"):
        monkeypatch.setenv("FXAMP_DISABLE", "1")
        return fxamp.convert(Net()), request.param
    return fxamp.convert(Net(), opt_level="O0"), request.param


def test_the_report_says_so(left):
    model, reason = left
    report = fxamp.report(model)
    assert report.summary() == f"Not converted: {reason}, so Net runs as it is written" == str(report)
    assert (report.casts, report.total_nodes, report.launches, report.coverage) == (0, 0, 0, None)
    assert not report.is_preview and report.suggest() == []
    assert json.loads(report.to_json())["left"] == reason


def test_every_question_has_an_answer(left, tmp_path, caplog):
    model, reason = left
    assert reason in fxamp.explain(model, "fc")
    assert fxamp.what_if(model, deny=["linear"]).left == reason
    assert reason in json.loads((fxamp.dump(model, tmp_path / "dump") / "report.json").read_text())["summary"]
    assert fxamp.find_nan(model, (X,)) is None
    with fxamp.watch_nan(model) as watch:
        model(X)
    assert watch.found is None
    assert fxamp.find_deny(model, model, (X,), 1e-3).is_met
    assert caplog.text.count(reason) == len(caplog.records) == 4  # find_nan, watch_nan, find_deny, compare
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    fxamp.find_nan(model, (X,))
    assert len(caplog.records) == 4


def test_compare_compares_what_the_models_give(left):
    model, _ = left
    same = fxamp.compare(model, model, (X,), loss_fn=lambda output: output.sum())
    assert (same.rows, same.output) == ((), 0.0) and same.loss[0] == same.loss[1] == float(model(X).detach().sum())
    other = Net()
    unconverted.leave(other, "opt_level='O0'")
    exact, found = model(X), other(X)
    expected = float((exact - found).norm() / exact.norm())
    assert fxamp.compare(model, other, (X,)).output == pytest.approx(expected, rel=1e-6)
    assert "nan" not in str(same)


def test_a_plan_is_not_written_over_a_reviewed_one(left, tmp_path, caplog):
    path = tmp_path / "plan.json"
    path.write_text("reviewed")
    assert fxamp.report(left[0]).save_plan(path) == path
    assert path.read_text() == "reviewed" and "there is no plan to save" in caplog.text


def test_measuring_does_not_depend_on_it(left):
    model, _ = left
    assert fxamp.audit(model, (X,)).model == "Net"
    assert fxamp.profile(model, [X], progress=False).batches == 1


def test_a_missing_plan_is_no_matter_while_disabled(monkeypatch):
    monkeypatch.setenv("FXAMP_DISABLE", "yes")
    model = Net()
    assert fxamp.convert(model, plan="no_such_plan.json") is model


@pytest.mark.parametrize(
    "ask",
    [
        fxamp.report,
        lambda model: fxamp.explain(model, "fc"),
        fxamp.what_if,
        lambda model: fxamp.dump(model, "nowhere"),
        lambda model: fxamp.find_nan(model, (X,)),
        lambda model: fxamp.compare(model, model, (X,)),
        lambda model: fxamp.find_deny(model, model, (X,), 1e-3),
        lambda model: fxamp.watch_nan(model).__enter__(),
    ],
)
def test_a_model_that_was_never_converted_is_an_error_still(ask):
    with pytest.raises(OptionError, match=r"this Net was not converted: fxamp.convert\(model\) returns the converted"):
        ask(Net())
