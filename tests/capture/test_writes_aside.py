"""Writes that are no op of the graph: statistics that a module moves, and attributes of tensors that forward sets."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.model.engine import engine_of

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


def sets_data_of_a_weight_that_was_read(net, x):
    h = net.first(x) @ net.w
    net.w.data = net.w.data * 0.9
    return net.last(h)


@pytest.mark.parametrize(
    "body",
    [sets_data_of_a_buffer, sets_data_of_a_weight, sets_data_of_a_value, sets_data_of_a_weight_that_was_read],
)
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


def asks_for_the_gradient_of_a_value(net, x):
    h = net.first(x).detach()
    h.requires_grad = True
    return torch.autograd.grad(net.last(h.tanh()).sum(), h, create_graph=True)[0]


def asks_for_it_behind_a_reader(net, x):
    h = net.first(x).detach()
    before = net.last(h)
    h.requires_grad = True
    return before + torch.autograd.grad(net.last(h).square().sum(), h, create_graph=True)[0][:, :4]


def hands_on_a_bias_of_zeros(net, x):
    def block(h, bias):
        if bias is None:
            bias = torch.zeros(16)
            bias.requires_grad = True
        return (h @ net.w + bias).tanh(), bias

    h, bias = checkpoint(block, net.first(x), None, use_reentrant=False)
    return net.last(checkpoint(block, h, bias, use_reentrant=False)[0])


@pytest.mark.parametrize(
    "body", [asks_for_the_gradient_of_a_value, asks_for_it_behind_a_reader, hands_on_a_bias_of_zeros]
)
def test_a_value_that_forward_makes_may_ask_for_its_gradient(body):
    converted = same_as_fp32(body, capture="symbolic")
    assert {row.precision for row in fxamp.report(converted).rows if row.op == "linear"} == {"low"}


@pytest.mark.parametrize("body", [sets_data_of_a_buffer, sets_data_of_a_weight, sets_data_of_a_value, freezes])
def test_symbolic_capture_names_the_line(body):
    with pytest.raises(fxamp.CaptureError, match=r"test_writes_aside\.py:\d+: forward sets \.(data|requires_grad)"):
        fxamp.convert(Net(body), torch.bfloat16, capture="symbolic", example_inputs=(X,))


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def a_function_writes_its_input(net, x):
    h = net.first(x).clone()
    Doubles.apply(h)
    return net.last(h)


def an_unknown_function_writes_its_input(net, x):
    h = net.first(x).clone()
    torch.nn.init.constant_(h[0].detach(), 2.0)
    return net.last(h)


def fills_a_buffer(net, x):
    torch.nn.init.constant_(net.kept, 0.5)
    return net.last(net.first(x) * net.kept)


def writes_data_of_a_value(net, x):
    h = net.first(x)
    h.data.mul_(0.5)
    return net.last(h)


def writes_data_between_two_uses(net, x):
    h = net.first(x).detach()
    y = h @ net.w
    net.w.data.mul_(0.5)
    return net.last(y + h @ net.w)


def writes_data_of_a_list(net, x):
    h = net.first(x).detach()
    y = h @ net.w
    torch._foreach_mul_([net.w.data, net.kept.data], 0.5)
    return net.last(y + h @ net.w * net.kept)


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize(
    "body",
    [
        a_function_writes_its_input,
        an_unknown_function_writes_its_input,
        fills_a_buffer,
        writes_data_of_a_value,
        writes_data_between_two_uses,
        writes_data_of_a_list,
    ],
)
def test_every_way_to_write_is_seen(body, capture):
    if (body, capture) == (a_function_writes_its_input, "dynamo") and torch.__version__ < "2.13":
        pytest.skip("Dynamo before torch 2.13 hands the Function over without saying that it writes")
    torch._dynamo.reset()
    same_as_fp32(body, capture=capture)


def forks(net, x):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        fixed = torch.rand(16)
    return net.last(net.first(x) * fixed * torch.rand(16))


def sets_the_state(net, x):
    state = torch.get_rng_state()
    first = torch.rand(16)
    torch.set_rng_state(state)
    return net.last(net.first(x) * first * torch.rand(16))


@pytest.mark.parametrize("body", [forks, sets_the_state])
def test_states_of_generators_are_left_to_dynamo(body):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net(body)
    model = fxamp.convert(net, torch.bfloat16, overrides={"**": "deny"})
    for run in (net, model):
        torch.manual_seed(9)
        kept = [run(X), run(X), torch.rand(3)]
        if run is net:
            expected = kept
    assert all(map(torch.equal, expected, kept))
    with pytest.raises(fxamp.CaptureError, match=r"forward calls torch\.(fork_rng|get_rng_state)"):
        fxamp.convert(Net(body), torch.bfloat16, capture="symbolic", example_inputs=(X,))


class Graph(nn.Module):
    """A graph convolution: its adjacency matrix is a sparse buffer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 8)
        self.register_buffer("near", (torch.rand(64, 64) > 0.9).float().to_sparse_coo())

    def forward(self, x):
        return torch.sparse.mm(self.near, self.fc(x))


def test_a_sparse_buffer():
    torch.manual_seed(0)
    net = Graph()
    for how, tolerance in (({"overrides": {"**": "deny"}}, 0), ({}, 0.05)):
        model = fxamp.convert(net, torch.bfloat16, example_inputs=(X,), **how)
        torch.testing.assert_close(model(X), net(X), rtol=tolerance, atol=tolerance)
        model(X).sum().backward()


@pytest.mark.parametrize("place", [0, 1])
def test_a_scripted_child_crashes_nothing(place):
    torch._dynamo.reset()
    torch.manual_seed(0)
    parts = [nn.Linear(6, 6), nn.Linear(6, 6)]
    parts[place] = torch.jit.script(parts[place])
    net = nn.Sequential(*parts)
    model = fxamp.convert(net, torch.bfloat16)
    torch.testing.assert_close(model(X), net(X), rtol=0.02, atol=0.02)
