"""What a model keeps from call to call is float32 on its way from old to new numbers, as under autocast."""

import copy

import pytest
import torch
from torch import nn

import fxamp
from fxamp import ir
from fxamp.lists import OpLists
from tests.language import FP16, assert_precision, decided, policy

LOWS = [torch.float16, torch.bfloat16]


class Keeping(nn.Module):
    """Averages the products of its features over its calls, in one way or another."""

    def __init__(self, renew):
        super().__init__()
        self.layer, self.renew = nn.Linear(12, 8), renew
        self.register_buffer("kept", torch.randn(8, 8))

    def forward(self, x):
        features = self.layer(x)
        self.renew(self, (features.t() @ features / 32).detach())
        return (features @ self.kept).square().mean()


def assigned(model, new):
    model.kept = model.kept * 0.998 + 0.002 * new


def copied(model, new):
    model.kept.copy_(model.kept * 0.998 + 0.002 * new)


def normed(model, new):
    mixed = model.kept * 0.998 + 0.002 * new
    model.kept = mixed / mixed.norm(dim=1, keepdim=True)


def by_difference(model, new):
    model.kept = model.kept - 0.002 * (model.kept - new)


def by_row(model, new):
    model.kept[3] = model.kept[3] * 0.998 + 0.002 * new[3]


def through_a_deny_op(model, new):
    model.kept = 3 * nn.functional.normalize(model.kept * 0.998 + 0.002 * new, dim=1)


def stacked(model, new):
    model.kept = torch.stack([model.kept[row] * 0.998 + 0.002 * new[row] for row in range(8)])


@pytest.mark.parametrize("low", LOWS)
@pytest.mark.parametrize("level", ["strict", "balanced", "aggressive"])
@pytest.mark.parametrize("renew", [assigned, copied, normed, by_difference, by_row, through_a_deny_op, stacked])
def test_a_state_is_as_near_to_float32_as_under_autocast(renew, level, low):
    torch.manual_seed(0)
    model = Keeping(renew)
    casting, converted = copy.deepcopy(model), fxamp.convert(copy.deepcopy(model), low, level=level)
    for step in range(100):
        x = torch.randn(32, 12, generator=torch.Generator().manual_seed(step))
        model(x)
        converted(x)
        with torch.autocast("cpu", low):
            casting(x)
    ours, theirs = ((each.kept - model.kept).norm() for each in (converted, casting))
    assert ours <= 1.2 * theirs
    assert converted.kept.dtype == torch.float32


def test_a_state_of_dynamos_graphs_is_too():
    torch.manual_seed(0)
    model = Keeping(assigned)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, capture="dynamo")
    for step in range(60):
        x = torch.randn(32, 12, generator=torch.Generator().manual_seed(step))
        model(x)
        converted(x)
    assert (converted.kept - model.kept).norm() < 1e-3 * model.kept.norm()


class Codebook(nn.Module):
    """Vectors that are parameters and made anew in each call of training: graphs of Dynamo's on both sides."""

    def __init__(self, is_trained):
        super().__init__()
        self.layer, self.is_trained = nn.Linear(12, 8), is_trained
        self.sums = nn.Parameter(torch.randn(8, 8), requires_grad=is_trained)

    def forward(self, x):
        features = self.layer(x)
        new = self.sums * 0.99 + 0.01 * (features.t() @ features).detach()
        self.sums = nn.Parameter(new, requires_grad=self.is_trained)
        return (features @ self.sums).square().mean()


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_state_that_is_a_parameter_is_too(is_trained):
    torch.manual_seed(0)
    model = Codebook(is_trained)
    casting, converted = copy.deepcopy(model), fxamp.convert(copy.deepcopy(model), torch.bfloat16)
    for step in range(60):
        x = torch.randn(32, 12, generator=torch.Generator().manual_seed(step))
        model(x)
        converted(x)
        with torch.autocast("cpu", torch.bfloat16):
            casting(x)
    ours, theirs = ((each.sums - model.sums).norm() for each in (converted, casting))
    assert ours <= 1.2 * theirs


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.rand(8, 8))
        self.register_buffer("row", torch.rand(8))
        self.layer = nn.Linear(8, 8)


def renewed(m, x):
    low = m.layer(x)
    m.kept.copy_(m.kept * 0.9 + low)
    return m.layer(low + m.row)


@pytest.mark.parametrize("chosen", [policy(), policy(FP16), policy(level="aggressive")])
def test_what_is_kept_is_high_and_what_is_only_read_is_free(chosen):
    setting = decided(renewed, torch.rand(8, 8), module=Held(), chosen=chosen)
    assert_precision(setting, {"mul": "high state", "add": "high state", "add 1": "low", "linear": "low"})


def stream(m, x):
    h = m.row.expand(*x.shape) + m.layer(x)
    for _ in range(2):
        h = h + m.layer(nn.functional.layer_norm(h, (8,)))
    return h


def test_a_stream_that_a_learned_query_begins_and_that_is_returned_is_no_state():
    setting = decided(stream, torch.rand(1, 8), module=Held(), chosen=policy(FP16))
    assert_precision(setting, {"add": "low", "add 1": "low"})


def test_what_is_returned_alone_may_be_a_state():
    def renewed(m, x):
        new = m.layer.weight * 0.9 + m.layer(x)
        return new.tanh()

    setting = decided(renewed, torch.rand(8, 8), module=Held(), chosen=policy(FP16))
    assert_precision(setting, {"mul": "high state", "add": "high state", "tanh": "high state"})


def test_what_a_parameter_of_another_size_scales_is_no_state():
    setting = decided(lambda m, x: (m.layer(x) * m.row).tanh(), torch.rand(4, 8), module=Held())
    assert not [node for node in setting.graph.nodes if ir.mark(node).reason.kind == "state"]


def test_what_the_user_says_of_it_comes_first():
    own = policy(lists=OpLists.default().override(infer=["add"]))
    assert_precision(decided(renewed, torch.rand(8, 8), module=Held(), chosen=own), {"add": "low"})
