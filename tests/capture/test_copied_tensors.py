"""`copy.deepcopy` and `copy.copy` of tensors in forward: what they give is what Python gives, in a graph."""

import copy

import pytest
import torch
from torch import nn

import fxamp
from fxamp.model.engine import engine_of


def tripled(x):
    return x.mul_(3)


# What forward computes beside its layer.
COPIES = {
    "an input": lambda m, x: tripled(copy.deepcopy(x)) + x,
    "a list of one": lambda m, x: tripled(copy.deepcopy([x, {"x": x}])[1]["x"]) + x,
    "one twice": lambda m, x: sum(map(tripled, copy.deepcopy([x, x]))),  # which is one copy
    "a buffer": lambda m, x: tripled(copy.deepcopy(m.mean)) + m.mean,
    "a parameter": lambda m, x: x * copy.deepcopy(m.scale),  # of which no gradient comes back
    "a frozen one": lambda m, x: x * copy.deepcopy(m.frozen),
    "a detached activation": lambda m, x: tripled(copy.deepcopy(m.layer(x).detach())),
    "constants": lambda m, x: x * sum(copy.deepcopy(torch.tensor(1.0)) for _ in range(4)),
    "one that is written": lambda m, x: x + tripled(copy.deepcopy(torch.ones(8))),
    "a size": lambda m, x: x * copy.deepcopy(x.shape)[0],
    "a layer": lambda m, x: copy.deepcopy(m.layer)(x),
    "copy.copy": lambda m, x: copy.copy(x) + x,
    "copy.copy of an activation": lambda m, x: x + copy.copy(m.layer(x)),
}


class Copies(nn.Module):
    def __init__(self, copied):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.full((8,), 2.0))
        self.frozen = nn.Parameter(torch.full((8,), 3.0), requires_grad=False)
        self.register_buffer("mean", torch.ones(8))
        self.copied = copied

    def forward(self, x):
        return self.layer(x) * self.scale + self.copied(self, x)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", COPIES)
def test_results_and_gradients(name, level):
    plain, converted = Copies(COPIES[name]), fxamp.convert(Copies(COPIES[name]), opt_level=level)
    for rows in (2, 3):
        x = torch.linspace(-1, 1, 8 * rows).reshape(rows, 8)
        results = plain(x.clone()), converted(x.clone())
        torch.testing.assert_close(*results, atol=0.05, rtol=0.02)
        for result in results:
            result.sum().backward()
    for (key, one), other in zip(plain.named_parameters(), converted.parameters(), strict=True):
        assert (one.grad is None) is (other.grad is None), key
        if one.grad is not None:
            torch.testing.assert_close(other.grad.float(), one.grad, atol=0.05, rtol=0.02)
    assert torch.equal(plain.mean, converted.mean.float())


@pytest.mark.parametrize("name", ["an input", "a list of one", "constants", "a detached activation"])
def test_they_are_part_of_a_graph(name):
    converted = fxamp.convert(Copies(COPIES[name]), capture="symbolic")
    converted(torch.ones(2, 8))
    assert len(engine_of(converted).own_variants()) == 1


def test_no_gradient_comes_back_through_a_copy_of_an_input():
    plain, converted = (make(Copies(lambda m, x: copy.deepcopy(x))) for make in (lambda m: m, fxamp.convert))
    grads = []
    for model in (plain, converted):
        model(torch.ones(2, 8))
        x = torch.ones(2, 8, requires_grad=True)
        model(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, atol=0.05, rtol=0.02)


def test_what_torch_refuses_is_refused():
    converted = fxamp.convert(Copies(lambda m, x: copy.deepcopy(m.layer(x))))
    with pytest.raises(RuntimeError, match="deepcopy protocol"):
        converted(torch.ones(2, 8))
