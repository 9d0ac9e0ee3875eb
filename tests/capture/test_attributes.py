"""An attribute of a tensor is read where forward reads it: before a write, inside or outside of a gradient region."""

import pytest
import torch
from torch import nn

import fxamp

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def code_of_the_nearest(m, x):
    h = m.layer(x).mT
    with torch.no_grad():
        nearest = h.argmax(-1)
    return h * 2 + nearest[..., None]


def norm_of_a_transposed_weight(m, x):
    w = m.layer.weight.T
    with torch.no_grad():
        norm = w.norm()
    return x @ w / norm


def transposed_without_gradients(m, x):
    with torch.no_grad():
        w = m.layer.weight.T
    return m.layer(x) + x @ w


def transposed_twice(m, x):
    h = m.layer(x)
    with torch.no_grad():
        t = h.mT
    return t * h.mT


def real_part(m, x):
    real = torch.view_as_complex(m.layer(x).view(-1, 4, 2)).real
    with torch.set_grad_enabled(False):
        largest = real.amax()
    return real / largest


def shape_before_a_write(m, x):
    h = m.layer(x)
    shape = h.shape
    h.unsqueeze_(0)
    return h.view(shape)


def view_before_a_write(m, x):
    h = m.layer(x).detach()
    a = h.T
    h.t_()
    return a + m.layer(x).sum()


def data_before_a_write(m, x):
    h = m.layer(x)
    data = h.data
    h.add_(1)
    return h * data


def switched_off(m, x):
    h = m.layer(x).T
    with torch.autocast("cpu", enabled=False):
        g = h.float()
    return h + g


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(self, x)


FUNCTIONS = (
    *(code_of_the_nearest, norm_of_a_transposed_weight, transposed_without_gradients, transposed_twice, real_part),
    *(shape_before_a_write, view_before_a_write, data_before_a_write, switched_off),
)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_outputs_and_gradients_are_those_of_the_model(function):
    torch.manual_seed(0)
    model, found = Net(function), []
    for run in (model, fxamp.convert(model, torch.bfloat16, (X,), capture="symbolic", overrides={"*": "deny"})):
        x = X.clone().requires_grad_()
        model.zero_grad()
        output = run(x)
        output.sum().backward()
        found.append((output, x.grad, *(parameter.grad for parameter in model.parameters())))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def test_what_is_read_and_never_used_leaves_no_node():
    def forward(m, x):
        _ = x.shape, x.T, hasattr(x, "mT"), x.requires_grad
        return m.layer(x)

    model = fxamp.convert(Net(forward), torch.bfloat16, (X,), capture="symbolic")
    assert {row.op for row in fxamp.report(model).rows} == {
        "input",
        "parameter",
        "packed_cast",
        "to",
        "linear",
        "output",
    }
