"""Writes that are no op of the graph: statistics that a module moves, and attributes of tensors that forward sets."""

import copy

import pytest
import torch
from torch import nn

import fxamp
from fxamp.engine import engine_of

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)) * 2 + 1


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16, momentum=0.5)
        self.w = nn.Parameter(torch.randn(16, 16) * 0.1)
        self.register_buffer("kept", torch.ones(16))
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def same_as_fp32(body, **options):
    """Three training steps; bit for bit where nothing runs low, and near where it does. Returns the low model."""
    for how in ({"overrides": {"**": "deny"}}, {}):
        torch.manual_seed(0)
        model = Net(body)
        twin = copy.deepcopy(model)
        converted = fxamp.convert(twin, torch.bfloat16, **{**options, **how})
        for _ in range(3):
            expected, result = model(X), converted(X)
            for net, out in ((model, expected), (twin, result)):
                net.zero_grad()
                out.square().mean().backward()
            error = (result - expected).norm() / expected.norm()
            assert error == 0 if how else error < 0.02
        for (name, exact), found in zip(model.named_buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(found, exact, rtol=0 if how else 0.02, atol=0 if how else 0.02, msg=name)
        for exact, found in zip(model.parameters(), twin.parameters(), strict=True):
            assert (exact.grad is None) == (found.grad is None)
    return converted


def reads_what_the_norm_has_moved(net, x):
    y = net.norm(net.first(x))
    return net.last(y * net.norm.running_var + net.norm.running_mean)


def reads_before_and_behind(net, x):
    before = net.last(net.norm.running_mean * 2)
    y = net.norm(net.first(x))
    return net.last(y + net.norm.running_mean) + before


def reads_a_view_of_it(net, x):
    mean = net.norm.running_mean.view(1, -1)
    y = net.norm(net.first(x))
    return net.last(y + mean)


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("body", [reads_what_the_norm_has_moved, reads_before_and_behind, reads_a_view_of_it])
def test_statistics_are_read_as_the_norm_has_left_them(body, capture):
    same_as_fp32(body, capture=capture)


def sets_data_of_a_buffer(net, x):
    h = net.first(x)
    net.kept.data = net.kept.data * 0.9 + h.detach().mean(0) * 0.1
    return net.last(h * net.kept)


def sets_data_of_a_weight(net, x):
    net.w.data = net.w.data / net.w.data.norm(dim=1, keepdim=True)
    return net.last(net.first(x) @ net.w)


def sets_data_of_a_value(net, x):
    h = net.first(x)
    h.data = torch.tanh(h.data)
    return net.last(h)


@pytest.mark.parametrize("body", [sets_data_of_a_buffer, sets_data_of_a_weight, sets_data_of_a_value])
def test_data_that_forward_sets_is_set(body):
    converted = same_as_fp32(body)
    assert {variant.captured.method for variant in engine_of(converted).graphs()} == {"dynamo"}


def freezes(net, x):
    net.last.bias.requires_grad = False
    return net.last(net.first(x))


def test_a_weight_that_forward_freezes_gets_no_gradient():
    torch.manual_seed(0)
    net = Net(freezes)
    fxamp.convert(net, torch.bfloat16)(X).sum().backward()
    assert net.last.bias.grad is None
    assert net.last.weight.grad is not None


@pytest.mark.parametrize("body", [sets_data_of_a_buffer, sets_data_of_a_weight, sets_data_of_a_value, freezes])
def test_symbolic_capture_names_the_line(body):
    with pytest.raises(fxamp.CaptureError, match=r"test_writes_aside\.py:\d+: forward sets \.(data|requires_grad)"):
        fxamp.convert(Net(body), torch.bfloat16, capture="symbolic", example_inputs=(X,))
