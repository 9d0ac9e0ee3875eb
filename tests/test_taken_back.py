"""A call that fails half way in one of the ways to run it, and runs in another: what forward did is done once."""

import copy
import random

import pytest
import torch
from torch import nn

from fxamp.dynamo.backend import DynamoForward
from fxamp.model.written import Written
from tests.choosing import batch
from tests.test_otherwise import Casts, Looping, OnlyFloat32, chosen, for_ever, o1


class Remembering(Looping):
    """Keeps what it was given, and draws, before it computes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("total", torch.zeros(70_000))
        self.count, self.seen, self.last = 0, [], {}

    def forward(self, x, log):
        self.count += 1
        self.seen.append(x.detach().mean())
        self.seen = self.seen[-2:]
        self.last["mean"] = self.mean + len(self.seen)
        self.mean = self.mean * 0.5 + x.detach().mean(0)
        self.total += 1
        log.append(self.count)
        LAST.append(random.random())
        x = x + torch.rand(())
        return self.compute(x) + self.seen[0]


LAST = []


class RememberingRefused(Remembering):
    def compute(self, x):
        h = Looping.forward(self, x)
        if h.dtype != torch.float32:
            raise RuntimeError("only float32 here")
        return h


def kept(model):
    """What such a model keeps, in numbers."""
    return [model.count, *model.seen, *model.last.values(), model.mean, model.total.sum()]


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_what_raises_under_autocast_half_way_has_not_run(with_gradients, is_frozen, fresh_dynamo):
    torch.manual_seed(0)
    model, found = RememberingRefused(), {}
    models = {"plain": copy.deepcopy(model), "converted": o1(model)}
    for name, each in models.items():
        each.head.weight.requires_grad_(not is_frozen)
        LAST.clear()
        random.seed(0)
        torch.manual_seed(1)
        log = []
        with torch.set_grad_enabled(with_gradients):
            results = [each(batch(step), log) for step in range(5)]
        found[name] = [*results, *kept(each), *log, *LAST, torch.rand(()), random.random()]
    assert chosen(models["converted"]) is DynamoForward or not with_gradients
    torch.testing.assert_close(found["converted"], found["plain"], rtol=0, atol=0)


class Writing(OnlyFloat32, Looping):
    """Writes into a parameter of which nobody keeps a copy."""

    def __init__(self):
        super().__init__()
        self.large = nn.Parameter(torch.zeros(70_000))

    def forward(self, x):
        with torch.no_grad():
            self.large += 1
        return super().forward(x)


def test_what_cannot_be_taken_back_is_not_run_twice(fresh_dynamo):
    converted = o1(Writing())
    converted(batch(0))
    with pytest.raises(RuntimeError, match="only float32 here"):
        converted(batch(0))
    assert torch.equal(converted.large, torch.full((70_000,), 2.0))


class RememberingCasts(Casts):
    def __init__(self):
        super().__init__()
        self.count, self.seen = 0, []

    def forward(self, x):
        self.count += 1
        self.seen.append(float(x.mean()))
        torch._dynamo.graph_break()
        return super().forward(x + torch.rand(()))


def test_what_dynamo_has_run_when_it_fails_has_not_run(fresh_dynamo, monkeypatch):
    monkeypatch.setattr(torch._dynamo.utils, "to_subclass", for_ever)
    torch.manual_seed(0)
    model, x = RememberingCasts(), torch.randn(4, 16)
    plain, converted = copy.deepcopy(model), o1(model)
    found = []
    for each in (plain, converted):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=each is plain):
            found.append([each(x).float() for _ in range(3)])
    assert chosen(converted) is Written
    assert (converted.count, converted.seen) == (plain.count, plain.seen) and plain.count == 3
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class Watched(nn.Module):
    """Gives a tensor a hook, between two attributes that it sets."""

    def __init__(self):
        super().__init__()
        self.fc, self.first, self.second = nn.Linear(16, 16), None, None

    def forward(self, x):
        h = self.fc(x)
        self.first = h.detach()
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 0.5)
        if self.first is None or self.second is None:
            self.second = h.detach().mean(0)
        return h


def test_attributes_that_are_set_around_a_hook_are_set(fresh_dynamo):
    torch.manual_seed(0)
    model = Watched()
    plain, converted = copy.deepcopy(model), o1(model, overrides={"*": "deny"})
    for step in range(3):
        for each in (found := [plain, converted]):
            each.zero_grad()
            each(batch(step)).sum().backward()
        assert torch.equal(*[each.first for each in found]) and torch.equal(*[each.second for each in found])
        assert torch.equal(*[each.fc.weight.grad for each in found])
