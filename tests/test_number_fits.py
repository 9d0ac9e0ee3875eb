"""A graph that reads a number at each call runs while the number fits the low dtype as it did."""

import copy
import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.model.engine import Engine, engine_of

X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A number that forward reads of the model."""

    def __init__(self, tail, knob):
        super().__init__()
        self.fc, self.out, self.tail, self.knob = nn.Linear(8, 8), nn.Linear(8, 8), tail, knob

    def forward(self, x):
        return self.tail(self, self.fc(x), x, self.knob)


class Given(nn.Module):
    """A number that forward is given."""

    def __init__(self, tail):
        super().__init__()
        self.fc, self.out, self.tail = nn.Linear(8, 8), nn.Linear(8, 8), tail

    def forward(self, x, knob):
        return self.tail(self, self.fc(x), x, knob)


def pair(make, *args, dtype=torch.float16, **options):
    torch.manual_seed(0)
    plain = make(*args)
    return plain, fxamp.convert(plain, dtype, **options)


def error(found, expected):
    return float((found - expected).detach().norm() / expected.detach().norm())


@pytest.fixture
def captures(monkeypatch):
    """How often a model is captured from here on."""
    counted, capture = [], Engine._capture

    def counting(engine, *args):
        counted.append(engine)
        return capture(engine, *args)

    monkeypatch.setattr(Engine, "_capture", counting)
    return counted


# What is done with a number, the numbers that it is in turn: the first two fit float16, the others do not.
TAILS = {
    "masked_fill": (lambda net, y, x, k: y.masked_fill(x > 0, k), (0.0, -1.0, -1e9, 1e6)),
    "where": (lambda net, y, x, k: torch.where(x > 0, y, k), (0.0, -1.0, -1e9, 1e6)),
    "clamp": (lambda net, y, x, k: y.clamp(min=k).log(), (1.0, 0.5, 1e-9, 1e-12)),
    "pad": (lambda net, y, x, k: F.pad(y, (1, 1), value=k), (0.0, 1.0, -1e9, 1e6)),
    "full_like": (lambda net, y, x, k: torch.full_like(y, k) + y, (0.0, 1.0, -1e9, 1e6)),
    "mul": (lambda net, y, x, k: (y * k) / 1e3, (1.0, 0.5, 1e8, 1e9)),
    "add": (lambda net, y, x, k: (y + k) - k, (0.0, 0.5, 1e-5, 1e-6)),
    "setitem": (lambda net, y, x, k: _filled(y, x, k), (0.0, 1.0, -1e9, 1e6)),
    "mask": (
        lambda net, y, x, k: (y + torch.zeros(8).masked_fill(x[0, 0] > 0, k)).softmax(-1),
        (0.0, -1.0, -1e9, -1e6),
    ),
    "of a number": (lambda net, y, x, k: y.masked_fill(x > 0, -k * 2), (0.0, 1.0, 4e4, 1e9)),
}


def _filled(y, x, number):
    y = y * 1.0
    y[x > 0] = number
    return y


@pytest.mark.parametrize("tail", TAILS)
def test_a_watched_number_that_comes_later_is_looked_at(tail, captures):
    do, numbers = TAILS[tail]
    plain, model = pair(Net, do, numbers[0])
    for knob in (*numbers, numbers[1]):
        plain.knob = model.knob = knob
        found, expected, fresh = model(X), plain(X), fxamp.convert(plain, torch.float16)(X)
        assert error(found, expected) <= 4e-3 and torch.equal(found, fresh)
    variants = engine_of(model).all_variants()
    assert len(variants) == 2  # for numbers that fit, and for those that do not
    captures.clear()
    for knob in numbers:
        model.knob = knob
        model(X)
    assert not captures


@pytest.mark.parametrize("tail", TAILS)
def test_a_number_that_is_given_is_looked_at(tail, captures):
    do, numbers = TAILS[tail]
    plain, model = pair(Given, do)
    for knob in (*numbers, numbers[1]):
        assert error(model(X, knob), plain(X, knob)) <= 4e-3
    assert len(engine_of(model).all_variants()) == 2
    captures.clear()
    for knob in numbers:
        model(X, knob)
    assert not captures


def test_an_annealed_number_is_captured_again_where_its_verdict_changes_alone(captures):
    plain, model = pair(Net, lambda net, y, x, k: y * k + net.out(x), 1.0)
    for step in range(40):
        plain.knob = model.knob = 10.0 ** -(step / 4)  # below 6e-8 it vanishes in float16
        assert error(model(X), plain(X)) < 4e-3
    assert len(captures) == 3  # the number as a constant, as a value, and as one that vanishes


def test_the_reason_names_the_number():
    _, model = pair(Net, lambda net, y, x, k: y.masked_fill(x > 0, k), 0.0)
    for knob in (0.0, 1.0, -1e9):
        model.knob = knob
        model(X)
    rows = [row for row in fxamp.report(model).rows if row.op == "masked_fill"]
    assert [row.precision for row in rows] == ["low", "high"]
    assert "the number -1000000000.0 (knob) is beyond float16" in str(rows[1].reason)


def test_two_models_of_one_engine_have_their_own_numbers():
    plain, model = pair(Net, TAILS["masked_fill"][0], 0.0)
    for knob in (0.0, 1.0):
        model.knob = knob
        model(X)
    other = copy.deepcopy(model)
    other.knob = -1e9
    for _ in range(2):
        for each in (model, other):
            plain.knob = each.knob
            assert error(each(X), plain(X)) <= 4e-3


def test_sizes_are_no_numbers_of_the_model():
    plain, model = pair(Net, lambda net, y, x, k: y.masked_fill(x > 0, y.shape[0] * k), 1.0)
    for rows in (1, 2, 3):
        plain.knob = model.knob = rows / 10
        assert error(model(X.repeat(rows, 1, 1)), plain(X.repeat(rows, 1, 1))) <= 4e-3
    assert len(engine_of(model).all_variants()) == 1


def test_a_number_of_a_submodule_that_is_computed_in_many_steps():
    def tail(net, y, x, k):
        one, other = net.fc.knob, 1
        for _ in range(60):
            one, other = other, (one + other) / 2
        return y.masked_fill(x > 0, other)

    torch.manual_seed(0)
    plain = Net(tail, 1.0)
    plain.fc.knob = 1.0
    model = fxamp.convert(plain, torch.float16)
    for knob in (1.0, 0.5, -1e9, 0.25):
        plain.fc.knob = model.fc.knob = knob
        assert error(model(X), plain(X)) <= 4e-3
    assert len(engine_of(model).all_variants()) == 2


def test_a_compiled_model_follows_its_numbers():
    torch._dynamo.reset()
    plain, model = pair(Net, TAILS["masked_fill"][0], 0.0)
    for knob in (0.0, 1.0, -1e9):
        model.knob = knob
        model(X)
    compiled = torch.compile(model, backend="eager")
    for knob in (1.0, 0.5, -1e9, 0.25, 1e6):
        plain.knob = model.knob = knob
        assert error(compiled(X), plain(X)) <= 4e-3


@pytest.mark.parametrize("tail", ["masked_fill", "where", "clamp", "mul"])
def test_dynamo_looks_at_numbers_that_come_later(tail):
    torch._dynamo.reset()
    do, numbers = TAILS[tail]
    plain, model = pair(Net, do, numbers[0], capture="dynamo")
    for knob in (*numbers, numbers[1]):
        plain.knob = model.knob = knob
        assert error(model(X), plain(X)) <= 4e-3


def test_dynamo_makes_a_graph_where_a_verdict_changes_alone():
    torch._dynamo.reset()
    plain, model = pair(Net, lambda net, y, x, k: y * k + net.out(x), 1.0, capture="dynamo")
    for step in range(40):
        plain.knob = model.knob = 10.0 ** -(step / 4)
        assert error(model(X), plain(X)) < 4e-3
    assert len(engine_of(model).all_variants()) == 3


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("tail", [lambda net, y, x, k: (y * k) / k, lambda net, y, x, k: y * (k * 1.0) / k])
def test_dynamo_looks_at_integers_that_come_later(is_given, tail):
    torch._dynamo.reset()
    plain, model = pair(Given, tail, capture="dynamo") if is_given else pair(Net, tail, 2, capture="dynamo")
    for knob in (2, 3, 4, 100_000, 5, 70_000):
        plain.knob = model.knob = knob
        given = (X, knob) if is_given else (X,)
        assert error(model(*given), plain(*given)) <= 4e-3
    assert len(engine_of(model).all_variants()) == 3


def test_dynamo_asks_nothing_of_sizes():
    torch._dynamo.reset()
    plain, model = pair(Net, lambda net, y, x, k: (y * x.shape[0]) / 4, 0, capture="dynamo")
    for rows in (2, 3, 4, 5):
        x = torch.randn(rows, 4, 8)
        assert error(model(x), plain(x)) <= 4e-3
    assert len(engine_of(model).all_variants()) == 2


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 8)


class Less(Layers):
    """Stochastic depth."""

    def forward(self, x):
        return self.out(x + self.fc(x) * float(random.random() < 0.5))


class Negative(Layers):
    def forward(self, x):
        return self.out(x + self.fc(x) * -float(random.random() > 0.5))


class And(Layers):
    def forward(self, x):
        return self.out(x + self.fc(x) * float(random.random() > 0.2 and random.random() < 0.8))


class Floor(Layers):
    def forward(self, x):
        return self.out(x + self.fc(x) * math.floor(4 * random.random()))


class Large(Layers):
    def forward(self, x):
        number = random.random()  # where Dynamo breaks its graph
        return self.fc(x) * math.floor(1e6 * number)


@pytest.mark.parametrize("kind", [Less, Negative, And, Floor, Large])
@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_numbers_of_dynamos_for_which_sympy_finds_no_bounds(kind, capture):
    """They are multiplied in float32, which any number fits."""
    torch._dynamo.reset()
    plain, model = pair(kind, capture=capture)
    small = next(seed for seed in range(1000) if random.Random(seed).random() < 0.05)
    for seed in (small, *range(5)):
        random.seed(seed)
        expected = plain(X)
        random.seed(seed)
        found = model(X)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
        found.sum().backward()
