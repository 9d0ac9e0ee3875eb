"""Transforms and autograd.grad inside forward: no cast crosses a level, or stands between a value and its gradient."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import fxamp
from fxamp import ir
from fxamp.model.engine import engine_of

LOW = torch.bfloat16
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.f, self.h, self.function = nn.Linear(8, 8), nn.Linear(8, 1), function

    def forward(self, x):
        return self.function(self, x)


def per_sample(net, x):
    return torch.vmap(lambda row: torch.tanh(net.f(row)))(x)


def gradient(net, x):
    return net.f(x) + torch.func.grad(lambda v: net.h(torch.tanh(v)).sum())(x)


def jacobian(net, x):
    return net.f(x) + torch.vmap(torch.func.jacrev(lambda row: torch.tanh(net.f(row))))(x).sum(1)


def force(net, x):
    x = x.detach().requires_grad_(True)
    energy = net.h(torch.tanh(net.f(x))).sum()
    return energy, torch.autograd.grad(energy, x, create_graph=True)[0]


def force_by_statement(net, x):
    x = x.detach() * 1.0
    x.requires_grad_()
    energy = net.h(torch.tanh(net.f(x))).sum()
    return energy, torch.autograd.grad(energy, [x], create_graph=True)[0]


def gradient_of_an_inner_value(net, x):
    y = net.f(x)
    z = y.detach()
    z.requires_grad_()
    return y * torch.autograd.grad(net.h(torch.tanh(z)).sum(), z)[0]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)


def joined(net, x):
    x = x.softmax(1)  # read low by the sum, were the other half of it low
    return net.h(x + torch.vmap(net.f)(x))


def handed_on(net, x):
    y = net.f(x)
    y.mul_(2.0)
    y = y + torch.func.grad(lambda v: net.h(torch.tanh(v)).sum())(y)
    return net.h(torch.func.grad(lambda v: net.h(torch.tanh(v)).sum())(torch.vmap(net.f)(y)) + y)


def closed_over(net, x):
    y = net.f(x)
    z = torch.vmap(lambda row: net.f(row) * y[0] + y[1])(x)
    return net.h(z + torch.func.grad(lambda v: net.h(v * y).sum())(x))


def read_low(net, x):
    return net.h(torch.func.grad(lambda v: net.h(torch.tanh(v)).sum())(x)) + net.h(torch.vmap(net.f)(x))


FUNCTIONS = (
    per_sample,
    joined,
    gradient,
    jacobian,
    handed_on,
    closed_over,
    read_low,
    force,
    force_by_statement,
    gradient_of_an_inner_value,
)
LEFT_TO_DYNAMO = FUNCTIONS[2:7]


@pytest.mark.parametrize("capture", ["auto", "symbolic"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_and_parameter_gradients_are_those_of_fp32(function, capture):
    if function in LEFT_TO_DYNAMO and capture == "symbolic":
        with pytest.raises(fxamp.CaptureError, match=r"test_transforms\.py:\d+"):
            fxamp.convert(Net(function), LOW, capture=capture, example_inputs=(X,))
        return
    model = Net(function)
    converted = fxamp.convert(model, LOW, capture=capture)
    found = []
    for net in (model, converted):
        model.zero_grad()
        outputs = pytree.tree_leaves(net(X.clone()))
        sum((value * value).sum() for value in outputs).backward()
        found.append([*outputs, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1])
    for theirs, mine in zip(*found, strict=True):
        assert (mine - theirs).abs().max() <= 0.02 * max(1.0, float(theirs.detach().abs().max()))


def test_a_low_input_is_widened_before_a_transform_that_reads_what_is_made_of_it():
    model = Net(handed_on)
    found = fxamp.convert(model, LOW)(X.bfloat16())
    torch.testing.assert_close(found, model(X), rtol=0.05, atol=0.05)


def test_what_stands_inside_a_transform_is_named():
    converted = fxamp.convert(Net(gradient), LOW)
    converted(X)
    rows = {row.name: row for row in fxamp.report(converted).rows}
    assert "inside a torch.func transform" in rows["linear"].reason or "inside a torch.func" in rows["linear_1"].reason
    assert {row.precision for row in rows.values() if row.op == "linear"} == {"low", "high"}


# ------------------------------------------------------------------------------------- around a converted model


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.norm(self.a(x))))


def ensemble(model):
    states = torch.func.stack_module_state([model, copy.deepcopy(model)])
    return torch.vmap(lambda *state: torch.func.functional_call(model, state, (X,)))(*states)


def dual(model):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, torch.ones_like(X)))).tangent


AROUND = {
    "ensemble": ensemble,
    "linearize": lambda model: torch.func.linearize(model, X)[1](torch.ones_like(X)),
    "jvp": lambda model: torch.func.jvp(model, (X,), (torch.ones_like(X),))[1],
    "jacfwd": lambda model: torch.func.jacfwd(model)(X),
    "forward_ad": dual,
    "per sample": lambda model: torch.vmap(torch.func.grad(lambda row: model(row[None]).sum()))(X),
    "jacrev": lambda model: torch.func.jacrev(model)(X),
}


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("around", AROUND)
def test_a_batch_norm_that_is_taken_apart_runs_in_float32(around, is_called):
    torch.manual_seed(0)
    model = Normed()
    model(X)
    model.eval()
    converted = fxamp.convert(model, LOW, capture="symbolic")
    before = converted(X) if is_called else None
    expected = AROUND[around](model)
    for _ in range(2):
        assert (AROUND[around](converted) - expected).norm() <= 0.02 * expected.norm()
    assert torch.equal(converted(X), before if is_called else fxamp.convert(model, LOW)(X))
    rows = [row.precision for row in fxamp.report(converted).rows if row.op == "batch_norm"]
    assert sorted(rows) == ["high", "low"]


def test_a_model_without_a_batch_norm_has_one_graph():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    converted = fxamp.convert(model, LOW, capture="symbolic")
    for _ in range(2):
        AROUND["jvp"](converted), AROUND["ensemble"](converted), converted(X)
    assert len(engine_of(converted).all_variants()) == 1


def test_weights_that_are_looked_at_are_no_part_of_a_trace():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))
    converted = fxamp.convert(model, LOW, capture="symbolic")
    expected = AROUND["linearize"](model)
    assert (AROUND["linearize"](converted) - expected).norm() <= 0.02 * expected.norm()


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x, places):
        return self.a(x)[places.clamp_(max=3)]


def test_a_first_call_may_draw_and_write_as_its_transform_allows():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5, inplace=True), nn.Linear(8, 8))
    converted = fxamp.convert(model, LOW, capture="symbolic")
    rows = torch.vmap(converted, randomness="different")(torch.stack([X, X]))
    assert rows.shape == (2, 4, 8)
    assert not torch.equal(*rows)
    gradients = []
    model = Clamped()
    for net in (model, fxamp.convert(model, LOW, capture="symbolic")):
        gradients.append(torch.func.grad(lambda x, net=net: net(x, torch.tensor([1, 7])).sum())(X))
    assert (gradients[1] - gradients[0]).norm() <= 0.02 * gradients[0].norm()


@pytest.mark.parametrize("around", ["jacrev", "per sample", "jvp"])
def test_a_converted_model_that_is_compiled_is_transformed_as_the_model(around):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    compiled = torch.compile(fxamp.convert(model, LOW), backend="eager")
    expected = AROUND[around](model)
    assert (AROUND[around](compiled) - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("function", LEFT_TO_DYNAMO)
def test_a_cast_stands_outside_of_a_transform(function):
    converted = fxamp.convert(Net(function), LOW)
    converted(X)
    (graph,) = [variant.graph for variant in engine_of(converted).all_variants()]
    numbers = [node.meta.get(ir.TRANSFORMED) for node in graph.nodes if node.op.startswith("call")]
    assert max(filter(None, numbers)) == sum(1 for a, b in zip([None, *numbers], numbers, strict=False) if b and a != b)


@pytest.mark.parametrize(
    "around",
    [
        lambda model: torch.func.grad(lambda x: model(x).sum()),
        torch.vmap,
        lambda model: lambda x: torch.func.jvp(model, (x,), (x,))[0],
    ],
    ids=["grad", "vmap", "jvp"],
)
def test_a_call_under_a_transform_does_not_keep_dynamo_from_others(around, caplog):
    net = Net(lambda net, x: torch.tanh(net.f(x)))
    model = fxamp.convert(net, LOW, capture="dynamo")
    for _ in range(2):
        assert torch.equal(around(model)(X), around(net)(X))
        assert not torch.equal(model(X), net(X))
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert told[0].startswith("Net: Dynamo captures nothing under torch.func's transforms")
