"""Writes through `p.data` between two steps, which autograd counts no version of, under masters."""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp
from fxamp.runtime import masters, unseen_writes
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.masters import exact_values, master_of
from fxamp.runtime.unseen_writes import EVERY, FIRST
from tests.runtime.simulated_graph import SimulatedGraphs

CLIP = 0.05


def clamp_(parameter):
    with torch.no_grad():
        parameter.clamp_(-CLIP, CLIP)


def renew(parameter):
    parameter.data = parameter.data.clamp(-CLIP, CLIP)


WRITES = {
    "data.clamp_": lambda parameter: parameter.data.clamp_(-CLIP, CLIP),
    "view of data": lambda parameter: parameter.data.view(-1)[:5].clamp_(-CLIP, CLIP),
    "data=": renew,
}
COUNTED = {
    "view of data": lambda parameter: parameter.detach().view(-1)[:5].clamp_(-CLIP, CLIP),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "fused_adam": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
}


def critic():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def trained(model, optimizer, write, count, is_written_at=lambda step: True):
    """The masters after so many steps, with a write into each parameter after those asked for."""
    for step in range(count):
        torch.manual_seed(step)
        dtype = next(model.parameters()).dtype
        model(torch.randn(4, 8, dtype=dtype)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_written_at(step):
            for parameter in model.parameters():
                write(parameter)
    return [exact_values(parameter).clone() for parameter in model.parameters()]


def run(write, make=OPTIMIZERS["sgd"], count=10, convert=False, **options):
    model = critic()
    model = fxamp.convert(model, torch.bfloat16, opt_level="O3") if convert else model.bfloat16()
    return trained(model, fxamp.MasterWeightOptimizer(make(model.parameters())), write, count, **options)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("convert", [False, True], ids=["half", "converted"])
def test_a_write_after_each_step_is_taken_as_a_counted_one_is(write, make, convert):
    expected = run(COUNTED.get(write, clamp_), make, convert=convert)
    found = run(WRITES[write], make, convert=convert)
    free = run(lambda parameter: None, make, convert=convert)
    for wanted, master, other in zip(expected, found, free, strict=True):
        assert torch.equal(wanted, master) and not torch.equal(master, other)


@pytest.mark.parametrize(
    "scaler", [fxamp.LossScaler(64.0), torch.amp.GradScaler("cpu", init_scale=64.0)], ids=["ours", "torch's"]
)
def test_a_clipped_critic_under_a_scaler_is_that_of_float32(scaler):
    def losses(model, optimizer, scaler):
        for step in range(12):
            torch.manual_seed(step)
            real, fake = torch.randn(16, 8) + 0.5, torch.randn(16, 8)
            loss = model(fake).float().mean() - model(real).float().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.data.clamp_(-CLIP, CLIP)
            yield loss.item()

    plain = critic()
    low = fxamp.convert(copy.deepcopy(plain), torch.float16, opt_level="O2", example_inputs=(torch.randn(4, 8),))
    expected = list(losses(plain, torch.optim.RMSprop(plain.parameters(), 5e-3), torch.amp.GradScaler(enabled=False)))
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.RMSprop(low.parameters(), 5e-3))
    found = list(losses(low, optimizer, scaler))
    assert found == pytest.approx(expected, rel=0.01, abs=1e-3)
    for value in low.state_dict().values():
        assert value.dtype == torch.float32 and value.abs().max() <= CLIP * 1.001


@pytest.mark.parametrize("step", [5, 20])
def test_new_memory_is_taken_at_any_step(step):
    at = {"is_written_at": lambda each: each == step}
    for wanted, master in zip(run(clamp_, count=30, **at), run(renew, count=30, **at), strict=True):
        assert torch.equal(wanted, master)


def test_what_is_written_before_the_first_step_is_taken_and_says_nothing(caplog):
    model = critic().bfloat16()
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.0))
    model[0].weight.data.fill_(3.0)
    with caplog.at_level(logging.INFO, "fxamp"):
        trained(model, optimizer, lambda parameter: None, 6)
    assert model[0].weight.eq(3).all() and master_of(model[0].weight).eq(3).all() and not caplog.records


def test_the_first_to_be_found_is_said_once_with_its_name(caplog):
    model = critic().bfloat16()
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.named_parameters(), 0.05))
    with caplog.at_level(logging.INFO, "fxamp"):
        trained(model, optimizer, lambda p: p.data.mul_(0.5) if p.dim() == 2 else None, 8)
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "each step compares" in record.getMessage()
    assert "0.weight, 2.weight" in record.getMessage() and "bias" not in record.getMessage()


def test_those_that_begin_late_are_warned_about_and_taken_from_then_on(caplog):
    begins = FIRST + 10
    with caplog.at_level(logging.INFO, "fxamp"):
        found = run(WRITES["data.clamp_"], count=EVERY + 5, is_written_at=lambda step: step > begins)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and f"last {EVERY} steps may be undone" in record.getMessage()
    assert all(master.abs().max() <= CLIP + 0.01 for master in found)


class Counted(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_where_nothing_is_written_so_few_steps_compare(caplog):
    model = critic().bfloat16()
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.05))
    counts = []
    with caplog.at_level(logging.INFO, "fxamp"):
        for _ in range(EVERY + 2):
            with Counted() as ops:
                trained(model, optimizer, lambda parameter: None, 1)
            counts.append(ops.count)
    usual = counts[FIRST]
    assert [step + 1 for step, count in enumerate(counts) if count != usual] == [*range(1, FIRST + 1), EVERY]
    assert not caplog.records


def test_nan_in_a_parameter_is_no_write(caplog):
    model = critic().bfloat16()
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.05))
    with torch.no_grad():
        model[0].weight[0, 0], model[0].weight[0, 1] = float("nan"), float("inf")
    with caplog.at_level(logging.INFO, "fxamp"):
        trained(model, optimizer, lambda parameter: None, 6)
    assert not caplog.records and not optimizer._unseen.is_usual


class Late:
    """Numbers on their way from a device: they arrive some questions later."""

    def __init__(self, values):
        self.values, self._left = values.tolist(), 8

    @property
    def is_ready(self):
        self._left -= 1
        return self._left < 0


def test_until_the_answer_is_here_steps_compare(monkeypatch):
    monkeypatch.setattr(unseen_writes, "HostCopy", Late)
    for wanted, master in zip(run(clamp_), run(WRITES["data.clamp_"]), strict=True):
        assert torch.equal(wanted, master)


def test_writes_that_autograd_counts_need_no_comparing():
    model = critic().bfloat16()
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.05))
    trained(model, optimizer, clamp_, 8)
    assert not optimizer._unseen.is_usual


def test_copies_and_pickles_look_for_themselves():
    model = critic().bfloat16()
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.05))
    trained(model, optimizer, WRITES["data.clamp_"], 5)
    for kept in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        expected = trained(*copy.deepcopy((model, optimizer)), clamp_, 4)
        for wanted, master in zip(expected, trained(*kept, WRITES["data.clamp_"], 4), strict=True):
            assert torch.equal(wanted, master)


@pytest.mark.parametrize("write", [clamp_, WRITES["data.clamp_"], renew], ids=["counted", "uncounted", "new memory"])
def test_a_replayed_step_takes_them(write, monkeypatch):
    """A graph does not look for writes: who replays it does, before."""

    def masters(make, write):
        model = critic().bfloat16()
        optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.05, fused=True))
        step = make(model, lambda out, target: (out.float() - target).square().sum(), optimizer)
        for number in range(12):
            torch.manual_seed(number)
            step(torch.randn(4, 8).bfloat16(), torch.randn(4, 1))
            for parameter in model.parameters():
                write(parameter)
        return [exact_values(parameter).clone() for parameter in model.parameters()], step

    expected, _ = masters(fxamp.GraphedStep, clamp_)
    simulated = SimulatedGraphs(monkeypatch)
    found, step = masters(simulated.step_for, write)
    assert step.is_graphed and simulated.captures
    for wanted, master in zip(expected, found, strict=True):
        assert torch.equal(wanted, master)


def test_new_memory_at_the_address_of_the_old_is_new():
    """An allocator gives what was freed to who asks next: two writes in a row may end where they began."""
    model = critic().bfloat16()
    trained(model, fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.05)), clamp_, FIRST + 2)
    parameter = model[0].weight
    freed = bytearray(2 * parameter.numel())
    for value in (0.25, 0.5):
        memory = torch.frombuffer(freed, dtype=torch.bfloat16).view_as(parameter)
        parameter.data = memory.fill_(value)
        assert torch.equal(master_of(parameter), torch.full_like(parameter, value, dtype=torch.float32))


def test_between_its_turns_a_step_compares_no_numbers(monkeypatch):
    """Counters say that nobody wrote: comparing each parameter with its master would cost launches in each step."""
    weights = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(4)]
    optimizer = MasterWeightOptimizer(torch.optim.SGD(weights, 0.1), bucket_bytes=16)

    def step():
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()

    for _ in range(FIRST + 2):
        step()
    compared = []
    monkeypatch.setattr(masters, "reconcile_", compared.append)
    monkeypatch.setattr(unseen_writes, "reconcile_", compared.append)
    for _ in range(3):
        step()
    assert not compared
    with torch.no_grad():
        weights[1].fill_(5.0)
    step()
    assert compared == [weights[1]]
