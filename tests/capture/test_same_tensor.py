"""Arguments that are one tensor, and the question whether two are: `if key is value: ...`."""

import copy

import pytest
import torch
from torch import nn

import fxamp
from fxamp.model.engine import engine_of

X = torch.linspace(-2, 2, 32).reshape(4, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen = None


class Asks(Net):
    def forward(self, x, y):
        h = self.first(x)
        return self.last(h) if x is y else self.last(h + 3 * y)


class AsksByName(Net):
    def forward(self, query, *, key=None, value=None):
        if key is value and key is not None:
            key = value = 2 * key
        return self.last(self.first(query) + key - value / 2)


class Counts(Net):
    def forward(self, parts):
        return self.last(sum(map(self.first, parts))) * len({id(part) for part in parts})


class WritesOne(Net):
    def forward(self, x, y):
        x.add_(1)
        return self.last(self.first(y))


def one(number=1.0):
    x = number * X
    return x, x


CALLS = {
    Asks: [lambda: (one(), {}), lambda: ((X, X.clone()), {}), lambda: (one(2), {}), lambda: ((2 * X, X), {})],
    AsksByName: [
        lambda: ((X,), dict(zip(("key", "value"), one(2), strict=True))),
        lambda: ((X,), {"key": 2 * X, "value": 2 * X}),
        lambda: ((X,), {"value": X, "key": X}),
    ],
    Counts: [lambda: (([X, X],), {}), lambda: (([X, 2 * X],), {}), lambda: (([2 * X, *one()],), {})],
    WritesOne: [lambda: (one(), {}), lambda: ((X.clone(), X.clone()), {}), lambda: (one(2), {})],
}


def near(found, expected):
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("kind", CALLS)
def test_each_call_is_answered_for_its_own_tensors(kind, opt_level, order):
    plain, converted = kind().eval(), fxamp.convert(kind().eval(), dtype=torch.bfloat16, opt_level=opt_level)
    for _ in range(2):
        for call in CALLS[kind][::order]:
            (args, kwargs), (others, named) = call(), call()
            near(converted(*others, **named), plain(*args, **kwargs))
    variants = list(engine_of(converted).all_variants())
    assert {variant.captured.method for variant in variants} == {"symbolic"}
    assert len(variants) <= 3, "one for each way of being the same"


def test_the_gradient_of_one_that_is_given_twice_is_that_of_both():
    plain, converted = Asks(), fxamp.convert(Asks(), dtype=torch.bfloat16)
    for _ in range(2):
        found = []
        for model in (plain, converted):
            x, y, z = (X.clone().requires_grad_() for _ in range(3))
            (model(x, x).sum() + model(y, z).sum()).backward()
            found.append(torch.stack((x.grad, y.grad, z.grad)))
        near(*found)


@pytest.mark.parametrize("way", ["compile", "fullgraph", "export", "copy", "example", "what_if"])
def test_graphs_made_in_other_ways_are_for_their_own_tensors(way):
    plain, converted = Asks().eval(), fxamp.convert(Asks().eval(), dtype=torch.bfloat16)
    torch._dynamo.reset()
    if way in ("compile", "fullgraph"):
        converted = torch.compile(converted, backend="eager", fullgraph=way == "fullgraph")
    elif way == "copy":
        converted(*one())
        converted = copy.deepcopy(converted)
    elif way == "example":
        converted = fxamp.convert(Asks().eval(), dtype=torch.bfloat16, example_inputs=one())
    elif way == "what_if":
        converted(*one())
        tried = fxamp.what_if(converted, deny=["linear"])
        assert tried.low_precision_nodes == 0
        assert not [row for row in tried.rows if row.op == "add"], "that of two that are the same"
        assert "linear" in fxamp.explain(converted, "linear")
        assert not [row for row in fxamp.report(converted).rows if row.op == "add"], "that of two that are the same"
    for args in (one(), (X, X.clone()), one(2), (2 * X, X)):
        run = torch.export.export(converted, args).module() if way == "export" else converted
        near(run(*args), plain(*args))


def test_one_that_is_kept_may_be_asked_for_by_is():
    class Keeps(Net):
        def forward(self, x):
            is_known = x is self.seen
            self.seen = x
            return self.last(self.first(x)) * (3.0 if is_known else 1.0)

    plain, converted = Keeps().eval(), fxamp.convert(Keeps().eval(), dtype=torch.bfloat16)
    for x in (X, X, other := 2 * X, X, X, other):
        near(converted(x), plain(x))


def test_none_alone_is_asked_of_what_is_kept():
    class Keeps(Net):
        def forward(self, x):
            seen, self.seen = self.seen, x
            return self.last(self.first(x)) if seen is None else self.last(self.first(x + seen))

    plain = Keeps().eval()
    converted = fxamp.convert(Keeps().eval(), dtype=torch.bfloat16, capture="symbolic")
    for x in (X, X, 2 * X, X):
        near(converted(x), plain(x))


def test_attention_by_itself_knows_self_attention():
    attention = fxamp.convert(nn.MultiheadAttention(8, 2, batch_first=True).eval(), dtype=torch.bfloat16)
    plain = attention.__class__(8, 2, batch_first=True).eval()
    plain.load_state_dict(attention.state_dict())
    for args in ((X[None],) * 3, (X[None], 2 * X[None], 3 * X[None])):
        near(attention(*args)[0], plain(*args)[0])
