"""Lowered parameters: an optimizer without masters is noticed, once, and nothing else is."""

import gc
import logging

import pytest
import torch
from torch import nn

import fxamp
from fxamp import storage
from fxamp.runtime import apex as amp

X = torch.ones(2, 8)


@pytest.fixture(autouse=True)
def a_process_that_has_lowered_nothing(monkeypatch):
    monkeypatch.setattr(storage, "_said_all_low", [])
    monkeypatch.setattr(storage, "_hooks", made := [])
    yield
    for hook in made:
        hook.remove()


def converted(opt_level: str) -> nn.Module:
    return fxamp.convert(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.bfloat16, (X,), opt_level)


def steps(model: nn.Module, *optimizers: torch.optim.Optimizer, count: int = 3) -> None:
    for _ in range(count):
        model(X).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_a_plain_optimizer_of_an_o2_model_is_warned_about_once(caplog):
    model = converted("O2")
    first, second = torch.optim.SGD(model.parameters(), 0.1), torch.optim.AdamW(model.parameters())
    steps(model, first, second)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split()[0] for text in said] == ["SGD", "AdamW"]
    assert "2 parameters that opt_level='O2' stores in bfloat16" in said[0]
    assert "fxamp.MasterWeightOptimizer(optimizer)" in said[0]


def test_a_group_added_later_is_looked_at_too(caplog):
    model, other = converted("O2"), nn.Linear(8, 8)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    steps(other, optimizer)
    assert caplog.text == ""
    optimizer.add_param_group({"params": list(model.parameters())})
    steps(model, optimizer)
    assert caplog.text.count("SGD updates 2 parameters") == 1


@pytest.mark.parametrize("masters", ["fp32", "kahan", "stochastic"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_master_weights_of_any_kind_are_silent(masters, make, caplog):
    model = converted("O2")
    inner = make(model.parameters(), 0.1)
    optimizer = fxamp.MasterWeightOptimizer(inner, masters=masters)
    if make is torch.optim.LBFGS:
        optimizer.step(lambda: model(X).sum())
    else:
        steps(model, optimizer)
    assert caplog.text == ""


def test_o3_is_warned_about_once_in_all(caplog):
    for _ in range(2):
        model = converted("O3")
        steps(model, torch.optim.SGD(model.parameters(), 0.1))
    assert caplog.text.count("opt_level='O3'") == 1


def test_apex_at_o2_is_silent(caplog):
    model = nn.Linear(8, 8)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O2", verbosity=0)
    for _ in range(2):
        with amp.scale_loss(model(X).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert caplog.text == ""


def test_o1_registers_nothing_and_keeps_no_optimizer_alive(caplog):
    model = fxamp.convert(nn.Linear(8, 8), torch.bfloat16, (X,))
    steps(model, torch.optim.SGD(model.parameters(), 0.1))
    assert storage._hooks == []
    assert caplog.text == ""
    low = converted("O2")
    steps(low, torch.optim.SGD(low.parameters(), 0.1))
    gc.collect()
    assert not [optimizer for optimizer in storage._groups_seen if type(optimizer) is torch.optim.SGD]
