"""What looks at a call runs it several times: each run has its own arguments, and the caller's stay as they were."""

import threading

import pytest
import torch
from torch import nn

import fxamp
from fxamp.numerics.given import copied

BF16 = torch.bfloat16


class Store:
    def __init__(self):
        self.kept = []


class Net(nn.Module):
    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 8)
        self.write = write

    def forward(self, x, aside):
        return self.fc(self.write(x, aside))


def into_an_object(x, aside):
    aside.kept.append(x * 2.0)
    return torch.cat(aside.kept)


def into_a_list(x, aside):
    aside.append(x)
    return x * len(aside)


def in_place(x, aside):
    return x.add_(1.0)


def loss(output):
    return output.float().sum()


WRITES = {"object": (into_an_object, Store), "list": (into_a_list, list), "in place": (in_place, list)}
TOOLS = {
    "find_nan": lambda model, converted, inputs: fxamp.find_nan(converted, inputs, loss),
    "compare": lambda model, converted, inputs: fxamp.compare(model, converted, inputs, loss),
    "find_deny": lambda model, converted, inputs: fxamp.find_deny(model, converted, inputs, 1e-9, progress=False),
    "profile": lambda model, converted, inputs: fxamp.profile(model, [inputs], loss, progress=False),
    "audit": lambda model, converted, inputs: fxamp.audit(model, inputs),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_looking_at_a_call_leaves_its_arguments_as_they_are(tool, write, capture):
    torch._dynamo.reset()
    function, make = WRITES[write]
    model, x, aside = Net(function), torch.randn(2, 8), make()
    before = x.clone()
    TOOLS[tool](model, fxamp.convert(model, BF16, capture=capture), (x, aside))
    assert torch.equal(x, before)
    assert not (aside.kept if isinstance(aside, Store) else aside)


@pytest.mark.parametrize("write", WRITES)
def test_both_runs_of_a_comparison_see_the_same_arguments(write):
    """A second run on what the first has written compares other numbers: an error of the order of 1."""
    torch._dynamo.reset()
    function, make = WRITES[write]
    model = Net(function)
    inputs = torch.randn(2, 8), make()
    assert fxamp.compare(model, fxamp.convert(model, BF16), inputs).output < 0.01


def test_copies_share_what_the_originals_share_and_hand_gradients_back():
    base = torch.arange(6.0)
    leaf = torch.ones(2, requires_grad=True)
    given = leaf * 2.0
    halves, twice, made, own = copied(([base[:3], base[2:]], (base, base), given, leaf))
    halves[0][2] = 7.0
    assert float(halves[1][0]) == 7.0 and torch.equal(base, torch.arange(6.0))
    assert twice[0] is twice[1]
    (made.mul_(3.0).sum() + own.mul_(5.0).sum()).backward()
    assert leaf.grad.tolist() == [11.0, 11.0]
    assert given.tolist() == [2.0, 2.0] and leaf.tolist() == [1.0, 1.0]


def test_an_argument_that_cannot_be_copied_is_the_callers():
    lock = threading.Lock()
    assert copied((lock,))[0] is lock


def test_a_parameter_among_the_arguments_is_the_models_own():
    parameter = nn.Parameter(torch.ones(2))
    assert copied({"weight": parameter})["weight"] is parameter
