"""Tensors that get other sizes where they stand (`x.t_()`): no size is believed, and nothing is padded."""

import copy

import pytest
import torch
from torch import nn

import fxamp


def transposed_and_reduced(net, x):
    h = net.first(x)
    h.transpose_(0, 1)
    return h.sum(0)


def transposed(net, x):
    h = net.first(x)
    h.t_()
    return h * 2


def unsqueezed(net, x):
    h = net.first(x)
    h.unsqueeze_(0)
    return net.second(h)


def squeezed(net, x):
    h = net.first(x)[:, None]
    h.squeeze_(1)
    return net.second(h)


def under_another_name(net, x):
    h = net.first(x)
    doubled = h.mul_(2)
    doubled.t_()
    return h + 1


def read_by_a_gemm(net, x):
    h = net.first(x)
    h.swapaxes_(0, 1)
    return torch.tanh(h) @ h.t()


def there_and_back(net, x):
    h = net.first(x)
    h.t_()
    h.mul_(2)
    h.t_()
    return net.second(h)


def beside_a_view(net, x):
    h = net.first(x)
    rows = h[1:]
    h.t_()
    rows.mul_(3)
    return net.second(h.t()) + rows.sum()


def an_input(net, x):
    y = net.first(x.clone())
    x.t_()
    return x @ y


CASES = [
    *(transposed_and_reduced, transposed, unsqueezed, squeezed, under_another_name, read_by_a_gemm),
    *(there_and_back, beside_a_view, an_input),
]


class Net(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


@pytest.mark.parametrize(
    ("capture", "level"), [("symbolic", "O1"), ("symbolic", "O2"), ("dynamo", "O1"), ("auto", "O1")]
)
@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_padded_graph_gives_what_the_model_gives(run, capture, level):
    torch.manual_seed(0)
    model, inputs = Net(run), torch.randn(4, 7)
    example = None if capture == "auto" else (inputs.clone(),)
    converted = fxamp.convert(
        copy.deepcopy(model), torch.bfloat16, pad="always", capture=capture, opt_level=level, example_inputs=example
    )
    given, ours = inputs.clone(), inputs.clone()
    expected, found = model(given), converted(ours)
    assert found.shape == expected.shape and ours.shape == given.shape
    assert (found - expected).norm() <= 0.02 * expected.norm()
    expected.square().sum().backward()
    found.square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = converted.get_parameter(name).grad
            assert (gradient.float() - parameter.grad).norm() <= 0.03 * parameter.grad.norm(), name


@pytest.mark.parametrize("swap", [lambda x: x.transpose(0, -1), lambda x: x.swapaxes(0, 0), lambda x: x.t()])
def test_a_number_whose_dimensions_are_exchanged(swap):
    class Swaps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(7, 2)

        def forward(self, x):
            h = self.layer(x)
            return swap(h.mean()) * h

    model, inputs = Swaps(), torch.randn(4, 7)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, pad="always")
    torch.testing.assert_close(converted(inputs), model(inputs), rtol=0.05, atol=0.01)
