"""A model that keeps references to itself: after conversion they lead to the converted model."""

import collections
import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.errors import OptionError
from fxamp.references import repointed

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
LOW = torch.bfloat16
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.head, self.scale = nn.Linear(8, 32), nn.Linear(32, 8), 1.0
        self.keep()

    def way(self, x):
        return self.head(F.dropout(torch.tanh(self.a(x)), 0.5, self.training)) * self.scale

    def forward(self, x):
        return self.run(x)


class Method(Base):
    def keep(self):
        self.run = {"a": self.way}["a"]


class Table(Base):
    def keep(self):
        self.ways = {"first": [self.way], "second": (self.way,)}

    def forward(self, x):
        return self.ways["first"][0](x) + self.ways["second"][0](x)


class Partial(Base):
    def keep(self):
        self.run = functools.partial(self.way)


class Closure(Base):
    def keep(self):
        self.run = lambda x: self.way(x)


class Default(Base):
    def keep(self):
        self.run = lambda x, model=self: model.way(x)


class Collected(Base):
    def keep(self):
        self.ways, self.by_name = {self.way}, collections.defaultdict(list, a=[self.way])

    def forward(self, x):
        return self.by_name["a"][0](x) + sum(way(x) for way in self.ways)


class Itself(Base):
    def keep(self):
        self.__dict__["me"] = self

    def forward(self, x):
        return self.me.way(x)


KINDS = pytest.mark.parametrize("kind", [Method, Table, Partial, Closure, Default, Collected, Itself])


def agree(model, converted):
    with torch.no_grad():
        for _ in range(2):
            exact = model(X)
            assert (converted(X) - exact).norm() <= 2e-2 * exact.norm()


@KINDS
@pytest.mark.parametrize("options", [{}, {"capture": "dynamo"}, {"opt_level": "O2"}], ids=["O1", "dynamo", "O2"])
@pytest.mark.parametrize("calls", [0, 2])
def test_what_is_set_on_the_converted_model_is_seen(kind, options, calls):
    model = kind()
    converted = fxamp.convert(kind(), dtype=LOW, **options)
    for _ in range(calls):
        converted(X)
    model.eval(), converted.eval()
    agree(model, converted)
    model.scale = converted.scale = 3.0
    agree(model, converted)
    if "opt_level" not in options:
        head = nn.Linear(32, 8)
        model.head = converted.head = head
        agree(model, converted)
        converted(X).sum().backward()
        assert head.weight.grad is not None
    converted.train()
    assert not torch.equal(converted(X), converted(X)), "dropout"


@KINDS
def test_the_original_keeps_what_it_had(kind):
    model = kind()
    before = {name: value for name, value in vars(model).items()}
    converted = fxamp.convert(model, dtype=LOW).eval()
    converted(X)
    assert vars(model).keys() == before.keys() and all(vars(model)[name] is value for name, value in before.items())
    assert model.training and not torch.equal(model(X), model(X))


@pytest.mark.parametrize("kind", [Method, Table, Partial, Itself])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_references_of_their_own(kind, copied):
    converted = fxamp.convert(kind(), dtype=LOW)
    converted(X)
    twin = copied(converted)
    twin.eval()
    twin.scale = 2.0
    model = kind().eval()
    model.scale = 2.0
    agree(model, twin)
    assert converted.training and converted.scale == 1.0


@KINDS
def test_references_make_no_graph_anew(kind):
    converted = fxamp.convert(kind(), dtype=LOW, capture="symbolic").eval()
    for _ in range(4):
        converted(X)
    assert len(converted._fxamp_engine.all_variants()) == 1


class Child(nn.Module):
    def __init__(self, parent):
        super().__init__()
        self.__dict__["parent"] = parent

    def forward(self, x):
        return self.parent.way(x)


class Parent(Base):
    def keep(self):
        self.child = Child(self)

    def forward(self, x):
        return self.child(x)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.eval(), "'training' of Parent .* it is True; of the converted model it is False"),
        (lambda model: setattr(model, "scale", 3.0), "'scale' .* it is 1.0; of the converted model it is 3.0"),
    ],
)
@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("hold", [lambda parent: parent, lambda parent: [parent]], ids=["itself", "list"])
def test_a_part_that_holds_the_model_is_refused_where_the_two_differ(change, said, calls, hold):
    model = Parent()
    model.child.__dict__["more"] = hold(model)
    converted = fxamp.convert(model, dtype=LOW)
    for _ in range(calls):
        converted(X).sum().backward()
    change(converted)
    with pytest.raises(OptionError, match=said):
        converted(X)


@pytest.mark.parametrize("hold", [lambda parent: parent, lambda parent: [parent.way]], ids=["itself", "method"])
def test_where_dynamo_captures_it_is_a_warning_once(hold, caplog):
    model = Parent()
    model.child.__dict__["more"] = hold(model)
    converted = fxamp.convert(model, dtype=LOW, capture="dynamo")
    converted(X)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    converted.eval()
    converted.scale = 3.0
    for _ in range(2):
        converted(X)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2 and "if forward reads 'scale' of Parent" in said[0] and "'training'" in said[1]


def test_a_part_that_holds_the_model_finds_a_part_that_was_exchanged_or_is_refused():
    head = nn.Linear(32, 8)
    converted = fxamp.convert(Parent(), dtype=LOW)
    converted.head = head
    with pytest.raises(OptionError, match=r"'head' .* another Linear"):
        converted(X)
    model = Parent().eval()
    converted = fxamp.convert(model, dtype=LOW).eval()
    converted(X)
    converted.head = head  # a graph reads its weights by their paths
    model = copy.deepcopy(model)
    model.head = head
    model.child = Child(model)
    agree(model, converted)


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_a_part_that_holds_the_model_may_read_what_both_have(capture):
    model = Parent()
    converted = fxamp.convert(model, dtype=LOW, capture=capture)
    converted(X)
    for each in (model, converted):
        each.eval()
        each.scale = 2.0
    agree(model, converted)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.run = self.way

    def way(self, x):
        return x + F.dropout(self.a(x), 0.5, self.training)

    def forward(self, x):
        return self.run(x)


class Trunk(nn.Module):
    """Runs its blocks in an order that it keeps in a list, by a method that it keeps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.order, self.run = [self.blocks[1], self.blocks[0]], self.way

    def way(self, x):
        for block in self.order:
            x = block(x)
        return F.dropout(x, 0.5, self.training)

    def forward(self, x):
        return self.run(x)


@pytest.mark.parametrize("make", [Trunk, lambda: nn.Sequential(Trunk(), nn.Linear(8, 8))])
@pytest.mark.parametrize("options", [{}, {"boundaries": [Block]}], ids=["whole", "blocks"])
def test_blocks_in_a_list_are_the_converted_ones(make, options):
    torch.manual_seed(0)
    model = make()
    converted = fxamp.convert(copy.deepcopy(model), dtype=LOW, **options)
    converted(X).sum().backward()
    model.eval(), converted.eval()
    agree(model, converted)


def test_what_holds_nothing_stays_the_same_object():
    class Thing:
        def method(self):
            return self

    thing, twin = Thing(), Thing()
    others = [1, "a", [2], {"k": (3,)}, len, lambda: None, functools.partial(int, "1"), Thing().method]
    assert all(repointed(each, {id(thing): twin}) is each for each in others)
    held = {"k": [(thing.method, functools.partial(print, thing), 1)]}
    found = repointed(held, {id(thing): twin})
    assert found["k"][0][0]() is twin and found["k"][0][1].args == (twin,) and held["k"][0][0]() is thing


def test_a_function_that_refers_to_itself_and_to_the_model():
    model, twin = nn.Linear(2, 2), nn.Linear(2, 2)

    def count(depth, *, of=model):
        return [model, of] if depth == 0 else count(depth - 1)

    found = repointed(count, {id(model): twin})
    assert found(0) == [twin, twin] and count(0) == [model, model]
    assert found.__name__ == "count" and found.__kwdefaults__ == {"of": twin}
