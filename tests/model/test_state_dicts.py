"""State dicts of models that are stored low give and take float32, and what is written into them counts."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import fxamp
from fxamp.model import state_dicts
from fxamp.runtime import master_weights, masters
from tests.model.stored_low import X, converted, exact_state, steps


@pytest.fixture(autouse=True)
def the_same_numbers():
    torch.manual_seed(0)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "averaged": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
    "parent": lambda model: copy.deepcopy(nn.ModuleDict({"q": model}))["q"],
    "copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_a_copy_loads_exact_numbers_and_leaves_the_original_alone(way, opt_level):
    model = converted(opt_level)
    before = model.state_dict()
    twin = COPIES[way](model)
    other = {name: value + 2.0**-12 for name, value in before.items()}
    assert not torch.equal(other["0.weight"].bfloat16().float(), other["0.weight"])
    assert twin.load_state_dict(other).missing_keys == []
    kept = {name: value if opt_level == "O2" else value.bfloat16().float() for name, value in other.items()}
    for name, value in twin.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, kept[name]), name
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert twin(X).dtype == torch.float32


def test_a_parent_loads_exact_numbers_into_a_copy():
    parent = nn.ModuleDict({"q": converted("O2")})
    twin = copy.deepcopy(parent)
    exact = {name: value + 2.0**-12 for name, value in parent.state_dict().items()}
    twin.load_state_dict(exact)
    assert all(torch.equal(value, exact[name]) for name, value in twin.state_dict().items())


def test_names_that_a_users_hook_maps_are_loaded_exactly():
    model = converted("O2")
    exact = {f"old.{name}": value + 2.0**-12 for name, value in model.state_dict().items()}

    def rename(module, state, prefix, *_):
        for name in list(state):
            state[name.removeprefix("old.")] = state.pop(name)

    model.register_load_state_dict_pre_hook(rename)
    model.load_state_dict(exact)
    assert all(torch.equal(value, exact[f"old.{name}"]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_the_state_of_parameters_that_a_plain_optimizer_steps_is_theirs(make, fused):
    model = converted("O2")
    optimizer = make(model.parameters(), 0.1, fused=fused)
    for _ in range(3):
        steps(model, optimizer, count=1)
        low = {name: value.detach().float() for name, value in model.named_parameters()}
        state = model.state_dict()
        assert all(torch.equal(state[name].bfloat16().float(), value) for name, value in low.items())


@pytest.mark.parametrize("write", ["no_grad", "data", "rebound"])
def test_a_clamp_after_each_step_is_in_the_state(write):
    model = converted("O2")
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 2.0**-4))
    limit = 0.125 * (1 + 2**-8)  # a master that rounds to 0.125 keeps its low bits
    for _ in range(3):
        steps(model, optimizer, count=1)
        for parameter in model.parameters():
            if write == "no_grad":
                with torch.no_grad():
                    parameter.clamp_(-0.125, 0.125)
            elif write == "data":
                parameter.data.clamp_(-0.125, 0.125)
            else:
                parameter.data = parameter.data.clamp(-0.125, 0.125)
        if write == "no_grad":
            assert all(master.abs().max() <= limit for master in optimizer.master_params())
    assert all(value.abs().max() <= limit for value in model.state_dict().values())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in model.state_dict().values())


def test_an_average_of_state_dicts_is_float32s():
    model = converted("O2")
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 2.0**-6))
    average = {name: value.clone() for name, value in model.state_dict().items()}
    exact = {name: value.double() for name, value in average.items()}
    for _ in range(20):
        steps(model, optimizer, count=1)
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 2.0**-10)
            exact[name].lerp_(value.double(), 2.0**-10)
    for name, value in average.items():
        torch.testing.assert_close(value.double(), exact[name], rtol=20 * 2**-23, atol=0)  # twenty roundings


@pytest.mark.parametrize("depth", [3, 12])
def test_a_state_dict_looks_at_each_tensor_once_and_a_forward_at_none(depth, monkeypatch):
    """A parameter is compared with its master by value: a pass over both."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))
    model, looks = fxamp.convert(layers, torch.bfloat16, (X,), "O2"), []
    reconcile = masters.reconcile_
    for module in (masters, state_dicts):
        monkeypatch.setattr(module, "reconcile_", lambda tensor: looks.append(tensor) or reconcile(tensor))
    state = [model.state_dict(), model.state_dict()]
    assert len(looks) == 2 * 2 * depth
    model(X)
    model(X)
    assert len(looks) == 2 * 2 * depth
    state[0]["0.bias"].fill_(0.5)
    model(X)
    assert len(looks) == 2 * 2 * depth + 1 and (model[0].bias == 0.5).all()
    state.clear()
    model(X)
    assert not state_dicts._handed_out


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
@pytest.mark.parametrize("held", [False, True])
def test_what_is_written_into_a_state_dict_is_in_the_model(opt_level, held):
    """An EMA that writes into the values of its copy's state_dict(), as many training scripts have it."""
    model = converted(opt_level)
    average, wanted = copy.deepcopy(model), exact_state(model)
    kept = average.state_dict() if held else None
    for _ in range(3):
        for theirs, own in zip((kept or average.state_dict()).values(), wanted.values(), strict=True):
            theirs.mul_(0.5).add_(own, alpha=0.5)
        average(X)
    expected = {name: (value - 2.0**-12) * 0.125 + value * 0.875 for name, value in wanted.items()}
    for name, value in average.state_dict().items():
        exact = expected[name] if opt_level == "O2" else expected[name].bfloat16().float()
        torch.testing.assert_close(value, exact, rtol=2**-6 if opt_level == "O3" else 1e-6, atol=1e-7)
    assert torch.equal(average[0].weight.float(), average.state_dict()["0.weight"].bfloat16().float())
    assert not torch.equal(average(X), model(X))


def test_a_restore_that_writes_into_the_state_dict_goes_on_from_there():
    model = converted("O2")
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 2.0**-6))
    best = exact_state(model)
    steps(model, optimizer, count=2)
    for name, value in model.state_dict().items():
        value.copy_(best[name])
    assert torch.equal(model.state_dict()["0.weight"], best["0.weight"])
    model(X)
    assert torch.equal(model[0].weight, best["0.weight"].bfloat16())
    optimizer.zero_grad()
    model(X).sum().backward()
    expected = {n: best[n] - 2.0**-6 * p.grad.float() for n, p in model.named_parameters() if p.dtype != torch.float32}
    optimizer.step()
    state = model.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-8)


def test_a_copy_has_what_was_written_into_the_state_dict():
    model = converted("O2")
    model(X)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for value in model.state_dict().values():
        value.mul_(2)
    twin = copy.deepcopy(model)
    for each in (twin, model):
        assert all(torch.equal(value, 2 * before[name]) for name, value in each.state_dict().items())
    assert torch.equal(twin(X), model(X))


def test_a_write_into_the_parameter_after_that_wins():
    model = converted("O2")
    state = model.state_dict()
    state["0.weight"].fill_(0.75)
    model(X)
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    assert (model.state_dict()["0.weight"] == 0.5).all()
    assert torch.equal(state["0.weight"], model.state_dict()["0.weight"])


def test_parts_speak_float32_too():
    model = converted("O2")
    wanted = {name: value for name, value in exact_state(model).items() if name.startswith("0.")}
    part = {name.removeprefix("0."): value for name, value in wanted.items()}
    assert {value.dtype for value in model[0].state_dict().values()} == {torch.float32}
    model[0].load_state_dict(part)
    for state in (
        model.state_dict(),
        copy.deepcopy(model).state_dict(),
        pickle.loads(pickle.dumps(model)).state_dict(),
    ):
        assert all(torch.equal(state[name], value) for name, value in wanted.items())
    twin = copy.deepcopy(model)
    twin[0].load_state_dict({name: value + 1 for name, value in part.items()})
    assert all(torch.equal(model.state_dict()[name], value) for name, value in wanted.items())
    assert all(torch.equal(twin.state_dict()[name], value + 1) for name, value in wanted.items())


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_a_state_dict_in_inference_mode(opt_level):
    model = converted(opt_level)
    expected = copy.deepcopy(model.state_dict())
    with torch.inference_mode():
        state = model.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in state.items())
        state["0.weight"].fill_(0.5)
        model(X)
        assert (model[0].weight == 0.5).all()
    state["0.weight"].fill_(0.25)
    model(X)
    assert (model[0].weight == 0.25).all()


class Rooted(nn.Module):
    """Has a weight of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.part = nn.Linear(4, 4)

    def forward(self, x):
        return self.part(x @ self.weight)


def test_the_model_that_was_converted_speaks_float32_too():
    torch.manual_seed(0)
    original = Rooted()
    wanted = {name: value.clone() for name, value in original.state_dict().items()}
    model = fxamp.convert(original, torch.bfloat16, opt_level="O2", example_inputs=(torch.randn(2, 4),))
    assert original.weight.dtype == torch.bfloat16
    for state in (original.state_dict(), pickle.loads(pickle.dumps(original)).state_dict()):
        assert {value.dtype for value in state.values()} == {torch.float32}
    assert all(torch.equal(value, wanted[name]) for name, value in original.state_dict().items())
    original.load_state_dict({name: value + 0.0001 for name, value in wanted.items()})
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name] + 0.0001)


def begun(action) -> threading.Thread:
    """A thread that has done it, or waits for this one."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join(0.5)
    return thread


@pytest.mark.parametrize("fused", [False, True])
def test_a_state_dict_that_another_thread_takes_during_a_step_loses_no_update(fused, monkeypatch):
    model, threads, round_into = converted("O2"), [], master_weights.round_into
    alone = copy.deepcopy(model)

    def round_late(*given):
        threads.append(begun(model.state_dict))
        round_into(*given)

    for each, rounding in ((alone, round_into), (model, round_late)):
        monkeypatch.setattr(master_weights, "round_into", rounding)
        steps(each, fxamp.MasterWeightOptimizer(torch.optim.SGD(each.parameters(), 1e-3, fused=fused)))
    for thread in threads:
        thread.join()
    expected = alone.state_dict()
    assert threads and all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_optimizers_that_wait_for_each_other_step_in_threads():
    """As ranks that are threads do, with a collective in the step; and a state dict taken meanwhile loses no update."""
    both_inside, errors = threading.Barrier(2, timeout=30), []

    class Together(torch.optim.SGD):
        def step(self, closure=None):
            both_inside.wait()
            super().step(closure)
            for model in models:
                model.state_dict()
            both_inside.wait()

    def train(model):
        try:
            steps(model, fxamp.MasterWeightOptimizer(Together(model.parameters(), 1e-3, fused=True)))
        except threading.BrokenBarrierError as error:
            errors.append(error)

    alone = converted("O2")
    models = [copy.deepcopy(alone), copy.deepcopy(alone)]
    steps(alone, fxamp.MasterWeightOptimizer(torch.optim.SGD(alone.parameters(), 1e-3, fused=True)))
    threads = [begun(lambda model=model: train(model)) for model in models]
    for thread in threads:
        thread.join()
    assert not errors
    expected = alone.state_dict()
    for model in models:
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_state_dict_that_another_thread_takes_during_a_call_is_no_error(monkeypatch):
    model, other, found = converted("O2"), converted("O2"), []

    class Slow(type(state_dicts._handed_out)):
        def __iter__(self):
            for tensor in super().__iter__():
                found.append(begun(lambda: found.append(other.state_dict())))
                yield tensor

    monkeypatch.setattr(state_dicts, "_handed_out", Slow())
    held = model.state_dict()
    with torch.no_grad():
        held["0.bias"].fill_(7)
    assert model(X).shape == (2, 8)
    for thread in [each for each in found if isinstance(each, threading.Thread)]:
        thread.join()
    assert model[0].bias.eq(7).all() and found


class Tieable(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.table = nn.Linear(16, 16), nn.Embedding(16, 16)

    def forward(self, tokens):
        return self.head(self.table(tokens))


@pytest.mark.parametrize("way", ["model", "part"])
def test_weights_that_are_tied_after_conversion_are_exact_under_both_names(way):
    tokens = torch.arange(8).reshape(2, 4)
    model = fxamp.convert(Tieable(), dtype=torch.bfloat16, opt_level="O2", example_inputs=(tokens,))
    model.table.weight = model.head.weight
    state = model.state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert torch.equal(state["head.weight"], state["table.weight"])
    plain = Tieable()
    plain.table.weight = plain.head.weight
    plain.load_state_dict(state)
    assert torch.equal(plain.head.weight, state["head.weight"])
    other = {name: value + 2.0**-12 for name, value in state.items()}
    if way == "model":
        model.load_state_dict(other)
    else:
        model.table.load_state_dict({"weight": other["table.weight"]})
    assert torch.equal(model.state_dict()["head.weight"], other["head.weight"])
    assert torch.equal(model.state_dict()["table.weight"], other["head.weight"])
