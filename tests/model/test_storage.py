"""Lowered parameters: an optimizer without masters is noticed, once, and nothing else is."""

import copy
import gc
import logging
import pickle
import threading
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn

import fxamp
from fxamp.model import storage
from fxamp.runtime import apex as amp
from fxamp.runtime import master_weights, masters
from fxamp.runtime.masters import master_of, set_master

X = torch.ones(2, 8)


@pytest.fixture(autouse=True)
def a_process_that_has_lowered_nothing(monkeypatch):
    monkeypatch.setattr(storage, "_said_all_low", [])
    monkeypatch.setattr(storage, "_hooks", made := [])
    torch.manual_seed(0)
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


# ----------------------------------------------------------------------------------------------------- checkpoints

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


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
@pytest.mark.parametrize("place", ["alone", "a part"])
def test_another_process_gets_the_exact_numbers(place, opt_level, caplog):
    model = converted(opt_level)
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    sent = model if place == "alone" else nn.ModuleDict({"q": model})
    got = pickle.loads(ForkingPickler.dumps(sent))  # as torch.multiprocessing hands it over: without attributes
    twin = got if place == "alone" else got["q"]
    state = twin.state_dict()
    assert {name: value.dtype for name, value in state.items()} == dict.fromkeys(exact, torch.float32)
    assert all(torch.equal(state[name], value) for name, value in exact.items())
    assert torch.equal(twin(X), model(X))
    assert fxamp.report(twin).low_precision_nodes == fxamp.report(model).low_precision_nodes
    assert caplog.text == ""


def test_another_process_trains_on_with_the_masters_of_its_optimizer():
    model = converted("O2")
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 2.0**-12))
    steps(model, optimizer)
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    twin, theirs = pickle.loads(ForkingPickler.dumps((model, optimizer)))
    for parameter in twin.parameters():
        parameter.grad = torch.ones_like(parameter)
    theirs.step()
    state = twin.state_dict()
    assert all(torch.equal(state[name], value - 2.0**-12) for name, value in exact.items())


@pytest.mark.parametrize("sent", [copy.deepcopy, lambda model: pickle.loads(ForkingPickler.dumps(model))])
def test_a_write_into_the_data_of_a_copy_is_seen_before_its_first_step(sent):
    twin = sent(converted("O2"))
    low = next(name for name, parameter in twin.named_parameters() if master_of(parameter) is not None)
    twin.get_parameter(low).data.fill_(0.5)  # counted by no version
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(twin.parameters(), lr=1.0))
    twin.get_parameter(low).grad = torch.zeros_like(twin.get_parameter(low))
    optimizer.step()
    assert bool((twin.get_parameter(low) == 0.5).all())


def test_another_process_shares_masters_as_it_shares_parameters():
    model = converted("O2")
    twin = pickle.loads(ForkingPickler.dumps(model))
    low = next(name for name, parameter in model.named_parameters() if master_of(parameter) is not None)
    ours, theirs = (master_of(each.get_parameter(low)) for each in (model, twin))
    ours.add_(1.0)
    assert torch.equal(ours, theirs)


def test_names_that_a_users_hook_maps_are_loaded_exactly():
    model = converted("O2")
    exact = {f"old.{name}": value + 2.0**-12 for name, value in model.state_dict().items()}

    def rename(module, state, prefix, *_):
        for name in list(state):
            state[name.removeprefix("old.")] = state.pop(name)

    model.register_load_state_dict_pre_hook(rename)
    model.load_state_dict(exact)
    assert all(torch.equal(value, exact[f"old.{name}"]) for name, value in model.state_dict().items())


# ------------------------------------------------------------------------------------- writes past the masters


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


class Around(torch.optim.Optimizer):
    """An optimizer that holds the parameters and lets another one step them."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step()


def test_an_optimizer_around_one_with_masters_keeps_their_low_bits():
    model, alone = converted("O2"), converted("O2")
    alone.load_state_dict(model.state_dict())
    inner = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 2.0**-10))
    other = fxamp.MasterWeightOptimizer(torch.optim.SGD(alone.parameters(), 2.0**-10))
    for _ in range(3):
        steps(model, Around(inner), count=1)
        steps(alone, other, count=1)
    assert torch.equal(model.state_dict()["0.weight"], alone.state_dict()["0.weight"])


@pytest.mark.parametrize("is_held", [False, True])
def test_a_write_past_the_version_counter_before_the_first_step_is_kept(is_held):
    model = converted("O2")
    if is_held:
        optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 2.0**-10))
    model[0].weight.data.fill_(0.5)  # as functions that initialise a model do
    assert (model.state_dict()["0.weight"] == 0.5).all()
    model[0].bias.data.fill_(3.0)
    if not is_held:
        optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 2.0**-10))
    steps(model, optimizer, count=1)
    assert (model[0].bias - 3.0).abs().max() < 2.0**-6


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


def exact_state(model, offset=2.0**-12):
    """The model's numbers with digits that bfloat16 does not have."""
    return {name: value.clone() + offset for name, value in model.state_dict().items()}


@pytest.mark.parametrize("depth", [3, 12])
def test_a_state_dict_looks_at_each_tensor_once_and_a_forward_at_none(depth, monkeypatch):
    """A parameter is compared with its master by value: a pass over both."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))
    model, looks = fxamp.convert(layers, torch.bfloat16, (X,), "O2"), []
    reconcile = masters.reconcile_
    for module in (masters, storage):
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
    assert not storage._handed_out


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_conversion_of_the_model_starts_from_the_exact_numbers(dtype):
    model = converted("O2")
    wanted = exact_state(model)
    model.load_state_dict(wanted)
    model.float() if dtype == torch.float32 else model.double()
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert all(torch.equal(value, wanted[name].to(dtype)) for name, value in model.state_dict().items())
    result = model(X.to(dtype))
    plain = torch.nn.Sequential(*(copy.deepcopy(part) for part in model))
    torch.testing.assert_close(result.double(), plain(X.to(dtype)).double(), rtol=2**-5, atol=2**-5)


def test_masters_move_with_the_model():
    model = converted("O2")
    model.to("meta")
    assert {value.device.type for value in model.state_dict().values()} == {"meta"}


@pytest.fixture
def new_parameters():
    """`.to()` puts new Parameters in the place of the old ones, as torch does for other devices' layouts."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_parameters_that_are_replaced_in_a_conversion_keep_their_exact_numbers(opt_level, new_parameters):
    model = converted(opt_level)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    old = model[0].weight
    model.to("cpu", non_blocking=True)
    assert model[0].weight is not old and model[0].weight.dtype == torch.bfloat16
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    model.double()
    assert all(torch.equal(value, wanted[name].double()) for name, value in model.state_dict().items())


def test_a_model_without_memory_gets_it_and_takes_a_checkpoint_exactly():
    model = converted("O2")
    wanted = exact_state(model)
    model.to("meta").to_empty(device="cpu")
    model.load_state_dict(wanted)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def test_after_a_step_masters_keep_their_low_bits_though_a_few_elements_are_written():
    model = converted("O2")
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 2.0**-10))
    steps(model, optimizer, count=1)
    exact = torch.full((8,), 1.0 + 2.0**-12)
    set_master(model[0].bias, exact)
    with torch.no_grad():
        model[0].bias[3] = 7.0
    exact[3] = 7.0
    assert torch.equal(master_of(model[0].bias), exact)


# ------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_gradients_are_lowered_with_their_parameters(opt_level):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    loss = model(X).square().sum()
    loss.backward(retain_graph=True)  # its graph lives on, with float32 ends
    was = {name: p.grad.clone() for name, p in model.named_parameters()}
    low = fxamp.convert(model, torch.bfloat16, (X,), opt_level)
    for name, parameter in low.named_parameters():
        assert parameter.grad.dtype == torch.bfloat16
        assert torch.equal(parameter.grad, was[name].bfloat16())
    low(X).square().sum().backward()  # accumulates into them
    assert all(p.grad.norm() > 1.5 * was[name].norm() for name, p in low.named_parameters())


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_a_conversion_that_fails_leaves_the_model_as_it_was(opt_level, monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model(X).square().sum().backward()
    before = copy.deepcopy(model)
    gradients = [parameter.grad for parameter in model.parameters()]
    hooks = {name: dict(value) for name, value in model.__dict__.items() if "hooks" in name and value is not None}
    capture, calls = fxamp.model.engine.Engine.capture, []

    def fails_the_second_time(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("no memory")
        return capture(*args, **kwargs)

    monkeypatch.setattr(fxamp.model.engine.Engine, "capture", fails_the_second_time)
    with pytest.raises(MemoryError):
        fxamp.convert(model, torch.bfloat16, (X,), opt_level)
    for name, value in before.state_dict(keep_vars=True).items():
        now = model.state_dict(keep_vars=True)[name]
        assert now.dtype == value.dtype
        assert torch.equal(now, value)
        assert not [mark for mark in vars(now) if "fxamp" in mark]
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert hooks == {name: dict(value) for name, value in model.__dict__.items() if name in hooks}
    assert torch.equal(model(X), before(X))
    monkeypatch.undo()
    assert fxamp.convert(model, torch.bfloat16, (X,), opt_level)[0].weight.dtype == torch.bfloat16


# -------------------------------------------------------------------------------------------------- inference mode


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_a_model_converted_in_inference_mode_trains(opt_level):
    net = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 6))
    with torch.inference_mode():
        model = fxamp.convert(net, torch.bfloat16, (X,), opt_level, pad="always")
        model(X)
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    before = copy.deepcopy(model.state_dict())
    steps(model, optimizer)
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items() if "0." in name)


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


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_parameters_made_in_inference_mode_are_refused_and_a_copy_is_not(opt_level):
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    before = copy.deepcopy(model)
    with pytest.raises(
        fxamp.OptionError, match=r"0\.weight and 1 more were made under torch\.inference_mode\(\).*copy\.deepcopy"
    ):
        fxamp.convert(model, torch.bfloat16, (X,), opt_level)
    assert torch.equal(model(X), before(X)) and model[0].weight.dtype == torch.float32
    low = fxamp.convert(copy.deepcopy(model), torch.bfloat16, (X,), opt_level)
    assert low[0].weight.dtype == torch.bfloat16 and torch.allclose(low(X), before(X), rtol=0.02, atol=0.01)


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


# --------------------------------------------------------------------------------------------------------- threads


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

    class Slow(type(storage._handed_out)):
        def __iter__(self):
            for tensor in super().__iter__():
                found.append(begun(lambda: found.append(other.state_dict())))
                yield tensor

    monkeypatch.setattr(storage, "_handed_out", Slow())
    held = model.state_dict()
    with torch.no_grad():
        held["0.bias"].fill_(7)
    assert model(X).shape == (2, 8)
    for thread in [each for each in found if isinstance(each, threading.Thread)]:
        thread.join()
    assert model[0].bias.eq(7).all() and found
