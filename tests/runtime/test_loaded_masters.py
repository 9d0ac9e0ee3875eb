"""What an optimizer's state brings for 16-bit parameters: it refines the weights that the model has, and keeps them."""

import copy
import itertools
import logging

import pytest
import torch

import fxamp
from fxamp.errors import OptionError
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.masters import master_of

KINDS = ("fp32", "kahan", "stochastic")


def low_model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)).bfloat16()


def converted(seed=0):
    torch.manual_seed(seed)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    return fxamp.convert(plain, dtype=torch.bfloat16, opt_level="O2", example_inputs=(torch.randn(4, 8),))


MODELS = {"low": low_model, "converted": converted}


def wrapped(model, masters="fp32"):
    return MasterWeightOptimizer(torch.optim.AdamW(model.parameters(), 0.01), masters=masters)


def train(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def trained(make, masters="fp32", seed=0):
    torch.manual_seed(seed)
    model = make(seed)
    optimizer = wrapped(model, masters)
    train(model, optimizer, range(3))
    return model, optimizer


def exact_values(model, optimizer):
    """Each parameter as float32, with what its mode keeps beside it."""
    kept = optimizer.state_dict().get("masters", {})
    values = []
    for index, parameter in enumerate(model.parameters()):
        saved = kept.get(index, torch.zeros_like(parameter))
        values.append(saved if saved.dtype == torch.float32 else parameter.detach().float() + saved)
    return values


@pytest.mark.parametrize("masters", ["fp32", "kahan"])
def test_a_state_that_two_optimizers_have_loaded_stays_each_ones_own(masters):
    model, optimizer = trained(low_model, masters)
    saved, twin = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
    resumed = wrapped(twin, masters)
    resumed.load_state_dict(saved)
    kept = {index: value.clone() for index, value in saved["masters"].items()}
    train(twin, resumed, [3])
    torch.testing.assert_close(saved["masters"], kept, rtol=0, atol=0)


def load(model, optimizer, saved, order):
    for part in order:
        {"model": model, "optimizer": optimizer}[part].load_state_dict(saved[part])


@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
@pytest.mark.parametrize("made", MODELS)
@pytest.mark.parametrize(("saved_as", "loaded_as"), list(itertools.product(KINDS, KINDS)))
def test_every_kind_of_masters_loads_into_every_other(saved_as, loaded_as, made, order):
    source, source_optimizer = trained(MODELS[made], saved_as)
    saved = copy.deepcopy({"model": source.state_dict(), "optimizer": source_optimizer.state_dict()})
    model = MODELS[made](seed=7)
    optimizer = wrapped(model, loaded_as)
    train(model, optimizer, [11])
    load(model, optimizer, saved, order)
    expected = exact_values(source, source_optimizer)
    for mine, theirs, parameter in zip(exact_values(model, optimizer), expected, source.parameters(), strict=True):
        if saved_as == "stochastic" and loaded_as == "fp32" and made == "low":
            mine = mine.bfloat16().float()  # neither file has low bits; what the masters had where they round alike
        elif loaded_as == "stochastic":
            theirs = parameter.detach().float()
        elif loaded_as == "kahan" and saved_as == "fp32":
            rounded = theirs.bfloat16().float()
            theirs = rounded + (theirs - rounded).bfloat16().float()
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(model.parameters(), source.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
@pytest.mark.parametrize("made", MODELS)
@pytest.mark.parametrize("masters", ["fp32", "kahan"])
def test_resumed_in_either_order_the_run_ends_bit_equal(masters, made, order):
    whole, whole_optimizer = trained(MODELS[made], masters)
    saved = copy.deepcopy({"model": whole.state_dict(), "optimizer": whole_optimizer.state_dict()})
    train(whole, whole_optimizer, range(3, 6))
    model = MODELS[made](seed=7)
    optimizer = wrapped(model, masters)
    train(model, optimizer, [11])
    load(model, optimizer, saved, order)
    train(model, optimizer, range(3, 6))
    for mine, theirs in zip(exact_values(model, optimizer), exact_values(whole, whole_optimizer), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
@pytest.mark.parametrize("made", MODELS)
def test_what_was_trained_and_is_frozen_when_it_is_loaded_keeps_its_low_bits(made, order):
    source, source_optimizer = trained(MODELS[made])
    saved = copy.deepcopy({"model": source.state_dict(), "optimizer": source_optimizer.state_dict()})
    model = MODELS[made](seed=7).requires_grad_(False)
    optimizer = wrapped(model)
    load(model, optimizer, saved, order)
    optimizer.step()
    for mine, theirs in zip(exact_values(model, optimizer), exact_values(source, source_optimizer), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("made", MODELS)
@pytest.mark.parametrize("masters", ["fp32", "kahan"])
def test_going_back_a_few_steps_in_the_same_process_is_bit_exact(masters, made):
    model, optimizer = trained(MODELS[made], masters)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = exact_values(model, optimizer)
    optimizer.param_groups[0]["lr"] = 1e-5  # few of the 16-bit numbers change
    train(model, optimizer, [3])
    load(model, optimizer, saved, ("model", "optimizer"))
    for mine, theirs in zip(exact_values(model, optimizer), expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
@pytest.mark.parametrize("masters", KINDS)
@pytest.mark.parametrize("distance", [0.3, 2**-12, 2**-20])
def test_other_weights_than_the_optimizers_stay_as_the_model_loaded_them(distance, masters, order):
    model, optimizer = trained(converted)
    average = {name: value * (1 + distance) for name, value in model.state_dict().items()}
    other = converted(seed=7)
    loading = wrapped(other, masters)
    load(other, loading, {"model": average, "optimizer": optimizer.state_dict()}, order)
    for name, value in other.state_dict().items():
        low = master_of(other.get_parameter(name)) is None and other.get_parameter(name).dtype == torch.bfloat16
        assert torch.equal(value, average[name].bfloat16().float() if low else average[name])


@pytest.mark.parametrize("masters", KINDS)
def test_an_optimizers_state_alone_leaves_the_weights_alone(masters):
    optimizer = trained(low_model)[1]
    model = low_model(seed=7)
    loading = wrapped(model, masters)
    before = copy.deepcopy(model.state_dict())
    loading.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(
        torch.equal(p.float(), value) for p, value in zip(model.parameters(), exact_values(model, loading), strict=True)
    )
    loading.param_groups[0].update(lr=0.0, weight_decay=0.0)
    train(model, loading, [3])
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_compensation_of_other_weights_is_dropped():
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer(torch.optim.SGD([weight], 0.0), masters="kahan")
    optimizer.load_state_dict({**optimizer.state_dict(), "masters": {0: torch.full((2,), 2.0**-9).bfloat16()}})
    with torch.no_grad():
        weight[1] = 2.0**-9
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert weight.tolist() == [1.0, 2.0**-9]
    assert optimizer.state_dict()["masters"][0].tolist() == [2.0**-9, 0.0]


def test_a_compensation_keeps_its_memory():
    """A CUDA graph of a step reads and writes the same addresses at every replay."""
    model, optimizer = trained(low_model, "kahan")
    before = {index: value.data_ptr() for index, value in optimizer.state_dict()["masters"].items()}
    train(model, optimizer, [3])
    assert len(before) == 6
    assert {index: value.data_ptr() for index, value in optimizer.state_dict()["masters"].items()} == before


@pytest.mark.parametrize("saved_as", ["fp32", "kahan"])
def test_a_state_of_16_bit_parameters_makes_float32_ones_exact(saved_as):
    source, optimizer = trained(low_model, saved_as)
    model = low_model(seed=7).float()
    loading = wrapped(model)
    load(model, loading, {"model": source.state_dict(), "optimizer": optimizer.state_dict()}, ("model", "optimizer"))
    for parameter, expected in zip(model.parameters(), exact_values(source, optimizer), strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.parametrize("masters", KINDS)
def test_masters_that_cannot_be_are_refused_before_anything_changes(masters):
    model, optimizer = trained(low_model, masters)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, [3])
    now = copy.deepcopy(optimizer.state_dict())
    for value, text in ((torch.zeros(3), r"\(3,\).*\(8, 6\)"), (torch.zeros(8, 6).double(), "float64")):
        with pytest.raises(OptionError, match=text):
            optimizer.load_state_dict({**state, "masters": {0: value}})
    with pytest.raises(OptionError, match="parameter 99"):
        optimizer.load_state_dict({**state, "masters": {99: torch.zeros(3)}})
    torch.testing.assert_close(optimizer.state_dict(), now, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------- state from before wrapping


def test_state_loaded_before_wrapping_is_warned_about_once(caplog):
    source = low_model().half()
    optimizer = wrapped(source)
    for parameter in source.parameters():
        parameter.grad = torch.full_like(parameter, 1e-4)
    optimizer.step()
    late = low_model().half()
    inner = torch.optim.AdamW(late.parameters(), 0.01)
    inner.load_state_dict(optimizer.state_dict())
    with caplog.at_level(logging.WARNING, logger="fxamp"):
        MasterWeightOptimizer(inner)
    (record,) = caplog.records
    assert "AdamW" in record.getMessage() and "float16" in record.getMessage()
    assert "wrap AdamW first" in record.getMessage()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="fxamp"):
        wrapped(low_model()).load_state_dict(optimizer.state_dict())
    assert not caplog.records


@pytest.mark.parametrize("fused", [False, True])
def test_adagrads_first_sum_is_not_rounded(fused, caplog):
    model = low_model()
    inner = torch.optim.Adagrad(model.parameters(), 0.01, initial_accumulator_value=0.1, fused=fused)
    with caplog.at_level(logging.WARNING, logger="fxamp"):
        optimizer = MasterWeightOptimizer(inner)
    assert not caplog.records
    for state in optimizer.state.values():
        assert torch.equal(state["sum"], torch.full_like(state["sum"], 0.1, dtype=torch.float32))


def test_adagrads_sum_that_was_loaded_is_kept(caplog):
    model = low_model()
    inner = torch.optim.Adagrad(model.parameters(), 0.01, initial_accumulator_value=0.1)
    other = torch.optim.Adagrad(low_model().parameters(), 0.01, initial_accumulator_value=0.5)
    inner.load_state_dict(other.state_dict())
    with caplog.at_level(logging.WARNING, logger="fxamp"):
        MasterWeightOptimizer(inner)
    assert all(torch.equal(state["sum"], torch.full_like(state["sum"], 0.5)) for state in inner.state.values())
    assert len(caplog.records) == 1


def test_state_of_zeros_made_with_the_optimizer_is_no_reason_to_warn(caplog):
    class Eager(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr, momentum=0.9)
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    inner = Eager(low_model().parameters(), 0.1)
    with caplog.at_level(logging.WARNING, logger="fxamp"):
        MasterWeightOptimizer(inner)
    assert {state["momentum_buffer"].dtype for state in inner.state.values()} == {torch.float32}
    assert not caplog.records
