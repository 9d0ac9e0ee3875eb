"""Looks in float32 at models that run as they are written because Dynamo's graphs would hold too little of them."""

import copy

import pytest
import torch
from torch import nn

import fxamp
from fxamp.model.engine import engine_of
from tests.choosing import Experts, batch

ROWS = 64
LAYERS = {"inside", "norm", "router", "head"}


def layers(model):
    return LAYERS | {f"experts.{number}.{part}" for number in range(len(model.experts)) for part in range(3)}


def squared(output):
    return output.float().square().mean()


def called_inside(model, x):
    """The output of each layer, the same run's gradients, and of which module they are."""
    values, gradients = {}, {}
    for path, module in model.named_modules():
        if path in layers(model):
            module.register_forward_hook(lambda _, __, out, path=path: values.setdefault(path, out))
    loss = squared(model(x))
    for path, value, gradient in zip(
        values, values.values(), torch.autograd.grad(loss, [*values.values()]), strict=True
    ):
        gradients[path] = (value.abs().max().item(), gradient.abs().max().item())
    return gradients


@pytest.fixture(params=[4, 2], ids=["mostly experts", "first for Dynamo"])
def routed(request, fresh_dynamo):
    return Experts(number=request.param)


def converted_as(how, model, x):
    if how == "not converted":
        return model
    converted = fxamp.convert(model, torch.float16, opt_level="O2" if how == "O2" else "O1")
    for _ in range(3 if how == "trained" else 0):
        converted(x).sum().backward()
    return converted


@pytest.mark.parametrize("how", ["not converted", "converted", "trained", "O2"])
def test_profile_measures_each_layer_of_a_routed_model(how, routed):
    x = batch(0, ROWS)
    expected = called_inside(copy.deepcopy(routed), x)
    assert set(expected) == layers(routed)  # every expert has rows
    ranges = fxamp.profile(converted_as(how, routed, x), [x], squared, progress=False)
    found = {node.module: node for node in ranges.nodes.values()}
    assert set(found) == layers(routed)
    assert all(path in str(ranges) for path in found)
    for path, (value, gradient) in expected.items():
        assert found[path].values.largest == pytest.approx(value, rel=1e-3), path
        assert found[path].gradients.largest == pytest.approx(gradient, rel=1e-3), path


def test_a_look_decides_nothing_for_the_calls_that_train(fresh_dynamo):
    converted = fxamp.convert(Experts(number=2), torch.float16)
    fxamp.profile(converted, [batch(0, ROWS)], squared, progress=False)
    way = engine_of(converted).otherwise
    assert way.chosen is None and not way.by_dynamo.calls


def test_audit_finds_what_overflows_in_an_expert(routed):
    with torch.no_grad():
        routed.experts[1][0].weight.mul_(1e6)
    audit = fxamp.audit(routed, batch(0, ROWS))
    errors = [finding.module for finding in audit.findings if finding.severity == "error"]
    assert errors == [
        "experts.1.0",
        "head",
    ]  # whose graph is that of experts.0, too; the head is given what is inf then


def test_what_dynamo_holds_is_still_measured_op_by_op(fresh_dynamo):
    class Deciding(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 3)

        def forward(self, x):
            h = self.a(x).exp()
            return self.b(h if h.sum().item() > 0 else -h)

    ranges = fxamp.profile(Deciding(), [batch(0)], squared, progress=False)
    assert {"exp", "linear"} <= {node.op for node in ranges.nodes.values()}
