"""Parameters that are given other memory (`p.data = ...`) keep what they were given, whatever came before it."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fxamp
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.masters import master_of
from fxamp.runtime.unseen_writes import FIRST

GIVEN = 2.0**-10  # compensations of larger numbers would show in it


def low_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8)).bfloat16()


def converted():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8))
    return fxamp.convert(plain, torch.bfloat16, opt_level="O2", example_inputs=(torch.randn(2, 8),))


def train(model, optimizer, steps):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()


def loaded(model, optimizer, *, optimizer_first=False):
    parts = (optimizer, model) if optimizer_first else (model, optimizer)
    for part, state in [(part, copy.deepcopy(part.state_dict())) for part in parts]:
        part.load_state_dict(state)
    return model, optimizer


def brought_by(masters, model, optimizer):
    """What another kind of masters has saved of the same weights."""
    other = copy.deepcopy(model)
    source = MasterWeightOptimizer(torch.optim.SGD(other.parameters(), 0.25), masters=masters)
    train(other, source, 2)
    model.load_state_dict(copy.deepcopy(other.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    return model, optimizer


def with_more(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]})
    return model, optimizer


def with_a_closure(model, optimizer):
    optimizer.step(lambda: sum(parameter.float().sum() for parameter in model.parameters()))
    return model, optimizer


def with_written_masters(model, optimizer):
    with torch.no_grad():
        for master in optimizer.master_params():
            master.add_(1.0)
    return model, optimizer


def having(ask):
    """After something that leaves model and optimizer what they are."""

    def apply(model, optimizer):
        ask(model, optimizer)
        return model, optimizer

    return apply


EVENTS = {
    "nothing": lambda *pair: pair,
    "loaded": loaded,
    "loaded the optimizer first": lambda *pair: loaded(*pair, optimizer_first=True),
    "loaded twice": lambda *pair: loaded(*loaded(*pair)),
    "loaded what fp32 has saved": lambda *pair: brought_by("fp32", *pair),
    "loaded what kahan has saved": lambda *pair: brought_by("kahan", *pair),
    "saved": having(lambda model, optimizer: (model.state_dict(), optimizer.state_dict())),
    "resynced": having(lambda model, optimizer: optimizer.resync_masters()),
    "asked for what is trained": having(lambda model, optimizer: list(optimizer.master_params())),
    "masters written": with_written_masters,
    "a group added": with_more,
    "a closure": with_a_closure,
    "copied": lambda *pair: copy.deepcopy(pair),
    "pickled": lambda *pair: pickle.loads(pickle.dumps(pair)),
    "loaded and copied": lambda *pair: copy.deepcopy(loaded(*pair)),
}


def renew(model):
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, GIVEN).detach()


def from_a_vector(model):
    low = {dtype: [p for p in model.parameters() if p.dtype == dtype] for dtype in (torch.bfloat16, torch.float32)}
    for parameters in filter(None, low.values()):
        vector = nn.utils.parameters_to_vector(parameters)
        nn.utils.vector_to_parameters(torch.full_like(vector, GIVEN), parameters)


@pytest.mark.parametrize(("write", "steps"), [(renew, 0), (from_a_vector, 1), (renew, FIRST + 2)])
@pytest.mark.parametrize("masters", ["fp32", "kahan", "stochastic"])
@pytest.mark.parametrize("make", [low_model, converted])
def test_new_memory_is_kept_by_the_next_step(make, masters, write, steps):
    lost = []
    for name, event in EVENTS.items():
        model = make()
        optimizer = MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.25), masters=masters)
        train(model, optimizer, steps)
        model, optimizer = event(model, optimizer)
        write(model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for parameter in model.parameters():
            master = master_of(parameter)
            if not parameter.eq(GIVEN).all() or not (master is None or master.eq(GIVEN).all()):
                lost.append(name)
                break
    assert not lost


def test_a_write_into_a_master_of_before_a_move_is_kept():
    model = low_model()
    optimizer = MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.25))
    weight = nn.Parameter(torch.ones(2, 3, 4, 4, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [weight]})
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    with torch.no_grad():
        master_of(weight).fill_(3 + 2.0**-12)  # which is no rounding of the weight
    weight.data = weight.data.to(memory_format=torch.channels_last)
    optimizer.step()
    assert master_of(weight).eq(3 + 2.0**-12).all() and weight.eq(3).all()


@pytest.mark.parametrize("make", [low_model, converted])
def test_a_write_past_the_count_after_a_load_is_kept(make):
    model = make()
    optimizer = MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.25))
    train(model, optimizer, 1)
    loaded(model, optimizer)
    for parameter in model.parameters():
        parameter.data.copy_(torch.full_like(parameter, GIVEN))
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(parameter.eq(GIVEN).all() for parameter in model.parameters())
