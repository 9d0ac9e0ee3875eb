"""Casts: one per value and dtype, in the right place, with the provenance of what they serve."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxamp import ir
from tests.language import (
    BF16,
    FP16,
    FP32,
    PIPELINE,
    assert_rewrites,
    assert_untouched,
    captured,
    count_casts,
    node_of,
    policy,
    run_graph,
    run_steps,
)

X, W = torch.rand(8, 8), torch.rand(8, 8)


@pytest.mark.parametrize("low", [FP16, BF16])
def test_a_value_read_by_several_nodes_is_cast_once(low):
    def before(x, w):
        return F.linear(x, w), x @ w, x.exp()

    def after(x, w):
        small, weight = x.to(low), w.to(low)
        return F.linear(small, weight).to(FP32), (small @ weight).to(FP32), x.exp()

    assert_rewrites(PIPELINE, before, after, X, W, chosen=policy(low))


def test_a_low_value_read_high_by_several_nodes_is_cast_once():
    def before(x, w):
        y = F.linear(x, w)
        return y.exp() + y.square()

    def after(x, w):
        y = F.linear(x.to(BF16), w.to(BF16)).to(FP32)
        return y.exp() + y.square()

    assert_rewrites(PIPELINE, before, after, X, W)


@pytest.mark.parametrize(
    "function",
    [torch.exp, lambda x: x + 1.0, lambda x: x.view(64), lambda x: (x, [x, {"a": x.relu()}]), lambda x: x.argmax()],
)
def test_graphs_without_an_allow_node_are_untouched(function):
    assert_untouched(PIPELINE, function, X)


def test_a_graph_that_is_low_already_is_untouched():
    assert_untouched(PIPELINE, lambda x, w: F.linear(x, w).relu(), X.to(BF16), W.to(BF16))


def test_the_same_value_at_two_places_of_one_node():
    assert_rewrites(PIPELINE, lambda x: torch.cat([x @ x, x @ x]), lambda x: low_products(x.to(BF16)), X)


def low_products(small):
    return torch.cat([small @ small, small @ small]).to(FP32)


def test_an_activation_is_cast_behind_its_producer_and_a_weight_before_its_reader():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x):
            y = self.first(x)
            z = y.exp()
            return self.second(z.clone().cumsum(0))

    setting = captured(lambda m, x: m(x), X, module=Net())
    run_steps(PIPELINE, setting)
    nodes = list(setting.graph.nodes)
    up = next(n for n in nodes if ir.mark(n).role == "cast" and ir.mark(n).serves == "linear")
    weight = next(n for n in nodes if ir.mark(n).serves == "module_second_weight")
    assert up.prev is node_of(setting, "linear")
    assert weight.next is node_of(setting, "linear", 1)
    assert ir.mark(weight).role == "weight cast"
    assert ir.source_line(up) == ir.source_line(node_of(setting, "linear"))
    assert up.meta["nn_module_stack"] == node_of(setting, "linear").meta["nn_module_stack"]


def test_gradients_flow_through_every_cast():
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    setting = captured(lambda m, x: m(x).log_softmax(-1), X, module=module)
    run_steps(PIPELINE, setting)
    run_graph(setting, X)[0].square().sum().backward()
    found = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    module(X).log_softmax(-1).square().sum().backward()
    for low, parameter in zip(found, module.parameters(), strict=True):
        error = (low - parameter.grad).norm() / parameter.grad.norm()
        assert low.dtype == FP32 and error < 0.05  # bfloat16: 4e-3 a rounding, about a dozen on the way


def test_tuples_are_cast_item_by_item():
    def model(x, w):
        parts = F.linear(x, w).chunk(4, 1)
        return torch.cat(parts).exp(), parts[0].cumsum(0), parts

    setting = captured(model, X, W)
    run_steps(PIPELINE, setting)
    found, _, _ = run_graph(setting, X, W)
    assert [part.dtype for part in found[2]] == [FP32] * 4
    assert count_casts(setting) <= 6  # the two inputs, and the four parts
