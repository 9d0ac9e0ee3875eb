"""Lowered parameters: what becomes of their numbers, gradients and masters in copies, moves, conversions and steps."""

import copy
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn

import fxamp
from fxamp.runtime.masters import master_of, set_master
from tests.model.stored_low import X, converted, exact_state, steps


@pytest.fixture(autouse=True)
def the_same_numbers():
    torch.manual_seed(0)


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
