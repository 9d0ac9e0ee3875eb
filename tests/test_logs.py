"""FXAMP_LOG_LEVEL is followed by whatever has lines to say, with a conversion or without."""

import logging

import pytest
import torch

import fxamp
from fxamp import logs
from fxamp.logs import configure_logging


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    log = logging.getLogger("fxamp")
    was = log.level, list(log.handlers)
    log.setLevel(logging.NOTSET)
    monkeypatch.setattr(logs, "_configured", None)
    yield
    log.setLevel(was[0])
    log.handlers[:] = was[1]


@pytest.mark.parametrize("level, number", [("debug", 10), ("INFO", 20), ("WARNING", 30)])
def test_the_level_comes_from_the_environment(level, number, monkeypatch):
    monkeypatch.setenv("FXAMP_LOG_LEVEL", level)
    configure_logging()
    assert logging.getLogger("fxamp").level == number


def test_a_misspelt_level_is_warned_about_once(monkeypatch):
    monkeypatch.setenv("FXAMP_LOG_LEVEL", "DEBG")
    with pytest.warns(UserWarning, match="FXAMP_LOG_LEVEL=DEBG is no level. Did you mean 'DEBUG'"):
        configure_logging()
    configure_logging()


@pytest.mark.parametrize(
    "make",
    [
        fxamp.LossScaler,
        fxamp.NoOpLossScaler,
        lambda: fxamp.MasterWeightOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2).half())], lr=0.1)),
        lambda: fxamp.set_tf32(fxamp.tf32_state()),
        lambda: fxamp.convert(torch.nn.Linear(2, 2)),
    ],
    ids=["scaler", "scaler that does nothing", "masters", "set_tf32", "convert"],
)
def test_what_has_lines_to_say_follows_it(make, monkeypatch):
    monkeypatch.setenv("FXAMP_LOG_LEVEL", "INFO")
    make()
    assert logging.getLogger("fxamp").level == logging.INFO
