"""A converted model that is trained without a call of its forward: it is said once, with what to do."""

import copy
import types

import pytest
import torch
from torch import nn

import fxamp
from fxamp.model import uncalled

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 4)
        self.act = nn.ReLU()
        self.decoder = nn.Linear(4, 8)

    def encode(self, x):
        return self.act(self.encoder(x))

    def decode(self, z):
        return self.decoder(z)

    def forward(self, x):
        return self.decode(self.encode(x))


@pytest.fixture(autouse=True)
def no_models_of_other_tests():
    uncalled._waiting.clear()


def by_methods(model):
    return model.decode(model.encode(X))


def step(output, *models):
    """A step of an optimizer over all parameters."""
    output.square().mean().backward()
    parameters = {id(p): p for model in models for p in model.parameters()}
    torch.optim.SGD(parameters.values(), lr=0.1).step()


def said(caplog):
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "was converted and is trained, but what convert() returned" in message]


@pytest.mark.parametrize("capture", ["auto", "symbolic", "dynamo"])
def test_training_through_methods_alone_is_warned_about_once(capture, caplog):
    converted = fxamp.convert(Coder(), dtype=torch.bfloat16, capture=capture)
    for _ in range(3):
        step(by_methods(converted), converted)
    assert len(said(caplog)) == 1
    assert said(caplog)[0].startswith(
        "Coder was converted and is trained, but what convert() returned has not been called"
    )
    assert "(encoder, decoder)" in said(caplog)[0]


def test_what_the_warning_says_helps(caplog):
    converted = fxamp.convert(Coder(), dtype=torch.bfloat16, boundaries=["encoder", "decoder"])
    low = converted.encode(X)
    assert low.equal(low.bfloat16().float())
    step(converted.decode(low), converted)
    assert not said(caplog)


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_calls_without_gradients_do_not_train(capture, caplog):
    """A sampler calls the model, and a loss its parts."""
    converted = fxamp.convert(Coder(), dtype=torch.bfloat16, capture=capture, example_inputs=(X,))
    for _ in range(2):
        with torch.no_grad():
            converted(X)
        step(by_methods(converted), converted)
    assert len(said(caplog)) == 1
    assert "has not been called while gradients were on" in said(caplog)[0]


def replaced(model, forward):
    """What trainers do: a forward of their own on the instance, which takes the parts, or the forward it had."""
    before = model.forward
    model.forward = types.MethodType(lambda self, x: forward(self, before, x), model)
    return model


@pytest.mark.parametrize("is_sampled", [False, True])
def test_a_forward_that_was_replaced_is_named(is_sampled, caplog):
    converted = fxamp.convert(Coder(), dtype=torch.bfloat16)
    if is_sampled:
        with torch.no_grad():
            converted(X)
    replaced(converted, lambda self, before, x: self.decoder(self.encode(x)))
    step(converted(X), converted)
    assert len(said(caplog)) == 1
    assert "has another forward now (model.forward = ...)" in said(caplog)[0]
    assert "boundaries=" in said(caplog)[0]


def test_nothing_is_said_of_one_that_leads_to_the_converted_forward(caplog):
    converted = replaced(fxamp.convert(Coder(), dtype=torch.bfloat16), lambda self, before, x: before(x) * 2)
    step(converted(X), converted)
    assert not said(caplog)


def test_nor_of_a_model_that_has_changed_since_it_was_called(caplog):
    converted = fxamp.convert(Coder(), dtype=torch.bfloat16)
    loss = converted(X).square().mean()
    converted.act = nn.Tanh()
    fxamp.report(converted)
    loss.backward()
    torch.optim.SGD(converted.parameters(), lr=0.1).step()
    assert not said(caplog)


CALLS = {
    "forward": lambda model: model(X),
    "both": lambda model: model(X) + by_methods(model),
    "compiled": lambda model: torch.compile(model, backend="eager")(X),
    "functional": lambda model: torch.func.functional_call(model, dict(model.named_parameters()), (X,)),
    "exported": lambda model: torch.export.export(model, (X,), strict=False).module()(X),
    "a copy": lambda model: copy.deepcopy(model)(X) + model(X),
}


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_is_said_of_a_model_that_is_called(call, capture, caplog):
    converted = fxamp.convert(Coder(), dtype=torch.bfloat16, capture=capture)
    step(call(converted), converted)
    assert not said(caplog)


def test_nor_of_one_inside_another_or_converted_twice_or_not_trained(caplog):
    inner = fxamp.convert(Coder(), dtype=torch.bfloat16)
    outer = fxamp.convert(nn.Sequential(nn.Linear(8, 8), inner), dtype=torch.bfloat16)
    model = Coder()
    first, second = (fxamp.convert(model, dtype=dtype) for dtype in (torch.bfloat16, torch.float16))
    unused = fxamp.convert(Coder(), dtype=torch.bfloat16)
    step(outer(X) + second(X), outer, first, unused)
    step(outer(X) + second(X), outer, first, unused)
    assert not said(caplog)


def test_a_model_that_waits_is_looked_at_at_later_steps(caplog):
    generator, critic = (fxamp.convert(Coder(), dtype=torch.bfloat16) for _ in range(2))
    step(generator(X), generator, critic)
    assert not said(caplog)
    step(by_methods(critic), critic)
    assert len(said(caplog)) == 1


def test_a_parameter_that_a_called_model_shares_says_nothing_of_the_others(caplog):
    called, other = (fxamp.convert(Coder(), dtype=torch.bfloat16) for _ in range(2))
    other.encoder.weight = called.encoder.weight
    step(called(X), called, other)
    assert not said(caplog)
    other_again = fxamp.convert(Coder(), dtype=torch.bfloat16)
    other_again.encoder.weight = called.encoder.weight
    step(called(X) + by_methods(other_again), called, other_again)
    assert len(said(caplog)) == 1


def test_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(uncalled, "_LOOKS", 2)
    used, unused = nn.Linear(8, 8), fxamp.convert(Coder(), dtype=torch.bfloat16)
    for number in range(2):
        assert len(uncalled._waiting) == 1, number
        step(used(X), used)
    assert not uncalled._waiting and unused is not None
