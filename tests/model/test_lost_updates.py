"""Who updates lowered parameters without masters is noticed, once, and nothing else is."""

import copy
import gc
import logging

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxamp
from fxamp.model import lost_updates
from fxamp.runtime import apex as amp
from tests.model.stored_low import X, converted, steps


@pytest.fixture(autouse=True)
def a_process_that_has_lowered_nothing(monkeypatch):
    monkeypatch.setattr(lost_updates, "_said_all_low", [])
    monkeypatch.setattr(lost_updates, "_said_often_written", [])
    monkeypatch.setattr(lost_updates, "_hooks", made := [])
    torch.manual_seed(0)
    yield
    for hook in made:
        hook.remove()


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
    assert lost_updates._hooks == []
    assert caplog.text == ""
    low = converted("O2")
    steps(low, torch.optim.SGD(low.parameters(), 0.1))
    gc.collect()
    assert not [optimizer for optimizer in lost_updates._groups_seen if type(optimizer) is torch.optim.SGD]


def test_an_optimizer_that_stepped_before_the_conversion_is_noticed_too(caplog):
    converted("O2")  # so that steps are watched
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    steps(model, optimizer, count=1)
    assert caplog.text == ""
    low = fxamp.convert(model, torch.bfloat16, (X,), "O2")
    steps(low, optimizer, count=2)
    assert caplog.text.count("SGD updates 2 parameters") == 1
    assert torch.equal(low.state_dict()["0.weight"].bfloat16(), low[0].weight)


def averaged(opt_level, updates):
    """An average of a model that is trained with masters, and has moved since."""
    model = converted(opt_level)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = fxamp.MasterWeightOptimizer(optimizer) if opt_level == "O2" else optimizer
    for _ in range(updates):
        steps(model, optimizer, count=1)
        average.update_parameters(model)
    return average


@pytest.mark.parametrize("look", [lambda average: average.state_dict(), lambda average: average.eval()(X)])
def test_an_average_of_rounded_parameters_is_warned_about_once(look, caplog):
    for _ in range(2):
        look(averaged("O2", 20))
    assert caplog.text.count("2 parameters that opt_level='O2' stores in bfloat16 were written in place 20 times") == 1
    assert "state_dict()" in caplog.text


def test_an_average_at_o1_moves_and_is_silent(caplog):
    average = averaged("O1", 20)
    average(X)
    assert average.state_dict() and caplog.text == ""


def test_the_average_that_the_warning_asks_for_is_that_of_float32(caplog):
    model = converted("O2")
    average = copy.deepcopy(model)
    expected = [value.clone() for value in model.state_dict().values()]
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(40):
        steps(model, optimizer, count=1)
        exact = list(model.state_dict().values())
        expected = [a.lerp(b, 0.001) for a, b in zip(expected, exact, strict=True)]
        torch._foreach_lerp_(list(average.state_dict().values()), exact, 0.001)
    average(X)
    found = list(average.state_dict().values())
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-8) for a, b in zip(found, expected, strict=True))
    assert caplog.text == ""


def test_initialization_and_clipping_are_silent(caplog):
    model = converted("O2")
    nn.init.trunc_normal_(model[0].weight, std=0.02)
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(40):
        steps(model, optimizer, count=1)
        with torch.no_grad():
            model[0].weight.clamp_(-0.01, 0.01)
    assert model.state_dict()["0.weight"].abs().max() <= 0.0101 and caplog.text == ""
