"""NaN, infinities and errors planted behind single nodes of real models: exactly that node is named."""

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

import fxamp
from fxamp import ir
from fxamp.counting.zoo import MODELS
from fxamp.numerics.compare import compare
from fxamp.numerics.flow import watch_flow
from fxamp.numerics.origin import origin_of, vanished_origin
from fxamp.numerics.run import call_of, in_float32

SAMPLE = {
    **dict.fromkeys(("bert_base", "gpt2_small", "llama_1b", "lstm_lm", "transformer_base", "ncf"), 6),
    **dict.fromkeys(("unet", "vgg16_bn", "vit_b16"), 4),
}
"""Nodes of each model that are planted; their number bounds the time, another offset takes others."""
PLAIN = fx.Interpreter.run_node


class _BadBackward(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, float("nan"))


def bad_value(kind, is_written):
    """Puts one bad element into the first floating tensor of a value; in place where in-place ops use it."""
    found = []

    def plant(value):
        if found or not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
            return value
        found.append(value)
        if is_written:
            value.data.view(-1)[0] = kind
            return value
        first = torch.zeros(value.shape, dtype=torch.bool)
        first.view(-1)[0] = True
        return torch.where(first, torch.tensor(kind, dtype=value.dtype), value)

    return lambda value: pytree.tree_map(plant, value)


def bad_gradient(value):
    def plant(part):
        return _BadBackward.apply(part) if isinstance(part, torch.Tensor) and part.requires_grad else part

    return pytree.tree_map(plant, value)


def planting(monkeypatch, name, plant):
    def run_node(self, node):
        value = PLAIN(self, node)
        return plant(value) if node.name == name else value

    monkeypatch.setattr(fx.Interpreter, "run_node", run_node)


def prepared(name):
    torch.manual_seed(0)
    step = MODELS[name](True)
    converted = fxamp.convert(step.model, torch.float16, step.inputs)
    call = call_of(converted, step.inputs)
    nodes = [node for node in call.variant.graph.nodes if node.op.startswith("call")]
    written = {given for node in nodes for given in ir.mutated(node)} | {node for node in nodes if ir.mutated(node)}
    return call, step.loss_of, nodes, written


@pytest.mark.parametrize("name", SAMPLE)
def test_a_bad_value_or_gradient_behind_any_node_is_named(name, monkeypatch):
    call, loss_of, nodes, written = prepared(name)
    clean = watch_flow(call, loss_of)
    exact = watch_flow(call, loss_of, in_float32(call), as_float32=True)
    assert clean.is_finite and origin_of(clean) is None
    floats = [node for node in nodes if node.name in clean.parts[0].values]
    step = max(1, len(floats) // SAMPLE[name])
    tried = 0
    for number, node in enumerate(floats[sum(map(ord, name)) % step :: step][: SAMPLE[name]]):
        planting(monkeypatch, node.name, bad_value((float("nan"), float("inf"))[number % 2], node in written))
        flow = watch_flow(call, loss_of)
        found = origin_of(flow) or vanished_origin(flow, exact)
        assert found is not None and (found.node, found.phase) == (node.name, "forward"), f"{node.name}: {found}"
        if node in written:
            continue
        planting(monkeypatch, node.name, bad_gradient)
        flow = watch_flow(call, loss_of)
        if flow.parts[0].has_finite_gradients:
            continue  # no gradient goes through it
        tried += 1
        found = origin_of(flow)
        assert found is not None and (found.node, found.phase) == (node.name, "backward"), f"{node.name}: {found}"
    assert tried


def noisy(names):
    """Nodes whose values are half wrong wherever they run low."""

    def run_node(self, node):
        value = PLAIN(self, node)
        is_sensitive = node.name in names and ir.mark(node).precision == "low"
        return value * 1.5 if is_sensitive else value

    return run_node


@pytest.mark.parametrize("places", [(0,), (0.5,), (1,), (0.25, 0.75), (0, 0.4, 1)])
@pytest.mark.parametrize("name", ["gpt2_small", "lstm_lm"])
def test_bisection_finds_exactly_the_planted_nodes(name, places, monkeypatch):
    call, _, nodes, _ = prepared(name)
    gemms = [node.name for node in nodes if ir.mark(node).op == "linear"]
    planted = {gemms[round(place * (len(gemms) - 1))] for place in places}
    clean = compare(call.model, call.model, (call.args, call.kwargs)).output
    monkeypatch.setattr(fx.Interpreter, "run_node", noisy(planted))
    found = fxamp.find_deny(call.model, call.model, (call.args, call.kwargs), 2 * clean, progress=False)
    assert found.is_met and found.is_minimal and set(found.nodes) == planted


def test_a_swallowed_infinity_that_float32_has_too_is_no_finding():
    """An op of the model makes -inf in float32 as well, and takes care of it: a healthy model is healthy."""

    class Bucket(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y * (x * 0.0).log().clamp(min=-1.0).exp()

    x = torch.linspace(-1, 1, 32).reshape(4, 8).abs()
    converted = fxamp.convert(Bucket(8, 8), torch.float16, (x,))
    assert fxamp.find_nan(converted, (x,), lambda output: output.sum()) is None
    with fxamp.watch_nan(converted):
        converted(x)


def test_a_swallowed_infinity_of_low_precision_alone_is_named():
    class Saturated(torch.nn.Linear):
        def forward(self, x):
            return torch.tanh(super().forward(x))

    layer = Saturated(8, 8)
    with torch.no_grad():
        layer.weight.fill_(6e4)
    x = torch.ones(4, 8)
    found = fxamp.find_nan(fxamp.convert(layer, torch.float16, (x,)), (x,))
    assert (found.op, found.phase) == ("linear", "forward") and found.overrides
