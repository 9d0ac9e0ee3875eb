"""Containers of tensors that are attributes, and others at each call: `self.hidden = h, c`. One graph is for all."""

import collections
import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.model.engine import engine_of
from tests.zoo.measure import LOW, autocast

X = torch.linspace(-2, 2, 32).reshape(4, 8)
State = collections.namedtuple("State", "h c")


class Model(nn.Module):
    """Reads what a call before has left, and leaves something for the next."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.cell = nn.Linear(8, 8), nn.LSTMCell(8, 8)
        self.register_buffer("mask", torch.linspace(0, 1, 8))
        self.hidden = self.first()

    def first(self):
        return torch.zeros(4, 8), torch.zeros(4, 8)

    def forward(self, x):
        h, c = self.cell(self.linear(x), self.hidden)
        self.hidden = h.detach(), c.detach()
        return h


class Layers(Model):
    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(8, 8, batch_first=True)
        self.hidden = None

    def forward(self, x):
        out, hidden = self.layers(self.linear(x)[:, None], self.hidden)
        self.hidden = tuple(each.detach() for each in hidden)
        return out[:, 0]


class InAList(Model):
    def first(self):
        return [torch.zeros(4, 8)]

    def forward(self, x):
        y = self.linear(x + self.hidden[0])
        self.hidden = [y.detach()]
        return y


class InADictionary(Model):
    def first(self):
        return {"memory": torch.zeros(4, 8), "count": 0}

    def forward(self, x):
        y = self.linear(x + self.hidden["memory"])
        self.hidden = {"memory": y.detach(), "count": 0}
        return y * (1 + len(self.hidden))


class Named(Model):
    def first(self):
        return State(torch.zeros(4, 8), torch.zeros(4, 8))

    def forward(self, x):
        y = self.linear(x + self.hidden.h) * (1 + self.hidden.c)
        self.hidden = State(c=y.detach().sigmoid(), h=self.hidden.c)
        return y


class Nested(Model):
    def first(self):
        return [{"h": torch.zeros(4, 8), "c": None}, (torch.ones(8), 0.5)]

    def forward(self, x):
        state, (scale, rate) = self.hidden
        y = self.linear(x + state["h"]) * scale * rate
        self.hidden = [{"h": y.detach(), "c": None}, (scale / 2 + 0.5, rate)]
        return y


class Item(Model):
    """Sets an item of the same dictionary."""

    def first(self):
        return {"h": torch.zeros(4, 8)}

    def forward(self, x):
        before = self.hidden["h"]
        y = self.linear(x + before)
        self.hidden["h"] = y.detach()
        return y + self.hidden["h"] - before


class ItemOfAList(Model):
    def first(self):
        return [torch.zeros(4, 8), torch.ones(8)]

    def forward(self, x):
        y = self.linear(x + self.hidden[0]) * self.hidden[1]
        self.hidden[0] = y.detach()
        return y


class Window(Model):
    """The last three."""

    def first(self):
        return []

    def forward(self, x):
        y = self.linear(x + sum(self.hidden))
        self.hidden = [*self.hidden[-2:], y.detach()]
        return y


class Grown(Model):
    """Copies the dictionary, whatever is in it."""

    def first(self):
        return {}

    def forward(self, x):
        y = self.linear(x + sum(self.hidden.values()))
        self.hidden = {**self.hidden, "last": y.detach()}
        return y


class Same(Model):
    """One tensor, twice."""

    def forward(self, x):
        y = self.linear(x + self.hidden[0] - 2 * self.hidden[1])
        self.hidden = (y.detach(),) * 2
        return y


class AskingForOne(Model):
    """Asks whether two are one, which they are in every second call."""

    def forward(self, x):
        a, b = self.hidden
        y = self.linear(x + a) * (2 if a is b else 1)
        self.hidden = (y.detach(), y.detach()) if a is b else (y.detach(),) * 2
        return y


class Passed(Model):
    """What was the first is the second."""

    def forward(self, x):
        y = self.linear(x + self.hidden[0] - 2 * self.hidden[1])
        self.hidden = y.detach(), self.hidden[0]
        return y


class Buffered(Model):
    """Holds a buffer, then others."""

    def first(self):
        return self.mask, self.mask

    def forward(self, x):
        y = self.linear(x + self.hidden[0]) + self.hidden[1] * self.mask
        self.hidden = y.detach(), self.mask
        return y


class OnceBuffered(Model):
    """Holds a buffer, then another of its size."""

    def first(self):
        return self.mask, torch.ones(8)

    def forward(self, x):
        y = self.linear(x + self.hidden[0]) + self.hidden[1] * self.mask
        self.hidden = y.detach()[0], y.detach()[1]
        return y


class Started(Model):
    """Knows where it has begun."""

    def __init__(self):
        super().__init__()
        self.start = [self.hidden[0]]

    def first(self):
        return torch.ones(4, 8), torch.zeros(4, 8)

    def forward(self, x):
        y = self.linear(x + self.hidden[0] - 2 * self.start[0])
        self.hidden = y.detach(), y.detach()
        return y


class Sized(Model):
    """Asks for a size, which is another at each call."""

    def forward(self, x):
        h = self.hidden[0]
        y = self.linear(x + h.sum(0)) * len(h) / h.shape[0] ** 2
        self.hidden = y.detach()[: 1 + h.shape[0] % 4], y.detach()
        return y


class Counted(Model):
    """Beside a number that decides."""

    def first(self):
        return torch.zeros(4, 8), 1

    def forward(self, x):
        h, count = self.hidden
        y = self.linear(x + h)
        for _ in range(count):
            y = y.tanh()
        self.hidden = y.detach(), 1
        return y


class Marked(Model):
    """Asks for an attribute of a tensor."""

    def forward(self, x):
        h = self.hidden[0]
        y = self.linear(x + h) * (2 if getattr(h, "is_marked", False) else 1)
        self.hidden = y.detach(), y.detach()
        return y


class Written(Model):
    """In place."""

    def forward(self, x):
        self.hidden[0].mul_(0.5).add_(x)
        y = self.linear(self.hidden[0]) + self.hidden[1]
        self.hidden = self.hidden[0], y.detach()
        return y


class Returned(Model):
    def forward(self, x):
        before = self.hidden
        y = self.linear(x + before[0])
        self.hidden = y.detach(), before[0] + 1
        return y + sum(before) * 2 + sum(self.hidden)


class Kept(Model):
    """Under another name, too."""

    def __init__(self):
        super().__init__()
        self.before = None

    def forward(self, x):
        y = self.linear(x + self.hidden[0])
        if self.before is not None:
            y = y + self.before[1]
        self.before, self.hidden = self.hidden, (y.detach(), y.detach() + 1)
        return y


class KeptList(Model):
    """Keeps the list itself under another name."""

    def __init__(self):
        super().__init__()
        self.before = self.first()

    def first(self):
        return [torch.zeros(4, 8)]

    def forward(self, x):
        y = self.linear(x + self.hidden[0] - self.before[0])
        self.before, self.hidden = self.hidden, [y.detach()]
        return y


class Connected(Model):
    """The gradient goes on to the calls before."""

    def forward(self, x):
        y = self.linear(x + self.hidden[0])
        self.hidden = y.tanh(), y
        return y


class Recomputed(Model):
    def forward(self, x):
        h, _ = self.hidden  # not in what is recomputed, where eager would read what has been set by then
        y = checkpoint(lambda x: self.linear(x + h), x, use_reentrant=False)
        self.hidden = y.detach(), y.detach()
        return y


class Strided(Model):
    """Asks how what it holds lies in memory, which is another way at each call."""

    def forward(self, x):
        h = self.hidden[0]
        y = self.linear(x + h) * (2 if h.is_contiguous() else 1)
        now = y.detach()
        self.hidden = (now.t().contiguous().t() if h.is_contiguous() else now, now)
        return y


class Versioned(Model):
    """Asks for what is other for each tensor."""

    def forward(self, x):
        y = self.linear(x + self.hidden[0]) * (1 + self.hidden[0]._version)
        self.hidden = y.detach().clone().add_(1), y.detach()
        return y


class Asking(Model):
    """Decides on the numbers."""

    def forward(self, x):
        y = self.linear(x + self.hidden[0])
        if self.hidden[0].sum() > 0:
            y = -y
        self.hidden = y.detach(), y.detach()
        return y


class WithGradients(Model):
    """Asks whether one requires a gradient, which every second does."""

    def forward(self, x):
        y = self.linear(x + self.hidden[0]) * (2 if self.hidden[0].requires_grad else 1)
        self.hidden = (y.detach() if self.hidden[0].requires_grad else y.detach().requires_grad_(), y.detach())
        return y


ONCE = [Model, InAList, InADictionary, Named, Nested, Item, ItemOfAList, Passed, Written, Returned, Connected]
OTHERS = [Layers, Window, Grown, Same, AskingForOne, Buffered, OnceBuffered, Started, Sized, Counted, Marked]
KINDS = [*ONCE, *OTHERS, Kept, KeptList, Recomputed, Strided, Versioned, Asking, WithGradients]


def run(model, steps=8, between=lambda model, step: None, x=X):
    """Outputs, the gradients of all steps, and what is left."""
    found = []
    for step in range(steps):
        between(model, step)
        model.zero_grad()
        y = model(x + step / 8)
        y.square().mean().backward(retain_graph=True)
        found += [y.detach().clone(), *(each.grad for each in model.parameters() if each.grad is not None)]
    left, _ = torch.utils._pytree.tree_flatten(model.hidden)
    return [*found, *(each.detach() for each in left if isinstance(each, torch.Tensor))]


def same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_call_goes_on_where_the_last_one_ended(kind, opt_level):
    model = fxamp.convert(kind(), overrides={"*": "deny"}, opt_level=opt_level)
    same(run(model), run(kind()))
    assert type(model.hidden) is type(kind().hidden) or kind is Layers


@pytest.mark.parametrize("kind", ONCE)
def test_there_is_one_graph(kind):
    model = fxamp.convert(kind(), overrides={"*": "deny"})
    run(model)
    variants = [each for each in engine_of(model).all_variants() if not each.is_preview]
    assert [each.captured.method for each in variants] == ["symbolic"]
    assert "_constant" not in variants[0].compiled.source


@pytest.mark.parametrize("kind", [Window, Grown, Layers, Started])
def test_there_is_one_for_each_make(kind):
    model = fxamp.convert(kind(), overrides={"*": "deny"})
    run(model)
    variants = [each for each in engine_of(model).all_variants() if not each.is_preview]
    assert {each.captured.method for each in variants} == {"symbolic"}
    assert len(variants) == {Window: 4, Grown: 2, Layers: 2, Started: 1}[kind]


def reset(model, step):
    if step % 3 == 2:
        model.hidden = model.first()


def scale(model, step):
    model.hidden = torch.utils._pytree.tree_map(
        lambda each: each * 0.5 if torch.is_tensor(each) else each, model.hidden
    )


def share(model, step):
    if step == 4 and type(model.hidden) is tuple:
        model.hidden = (model.hidden[0],) * 2


def write(model, step):
    with torch.no_grad():
        for each in torch.utils._pytree.tree_leaves(model.hidden):
            if isinstance(each, torch.Tensor) and each is not model.mask:
                each.detach().add_(0.25)


def count(model, step):
    model.hidden = model.hidden[0], step % 3


def mark(model, step):
    if step % 2:
        model.hidden[0].is_marked = True


@pytest.mark.parametrize("between, kind", [(count, Counted), (mark, Marked)])
def test_what_else_is_asked_tells_graphs_apart(between, kind):
    model = fxamp.convert(kind(), overrides={"*": "deny"})
    same(run(model, between=between), run(kind(), between=between))


CHANGED = [*ONCE, Kept, Same, Buffered]
WAYS = [(kind, between) for kind in CHANGED for between in (reset, scale, share)]
# Of Connected eager's own backward refuses the write.
WAYS += [(kind, write) for kind in CHANGED if kind is not Connected]


@pytest.mark.parametrize("kind, between", WAYS)
def test_it_may_be_changed_from_outside(kind, between):
    model = fxamp.convert(kind(), overrides={"*": "deny"})
    same(run(model, between=between), run(kind(), between=between))


class Given(Model):
    """Reads what somebody else sets."""

    def forward(self, x):
        return self.linear(x + self.hidden[0]) * self.hidden[1]


def test_what_is_set_from_outside_alone_is_read_at_each_call(caplog):
    def between(model, step):
        model.hidden = torch.full((4, 8), step / 4), torch.full((8,), 1 - step / 4)

    model = fxamp.convert(Given(), overrides={"*": "deny"})
    with caplog.at_level(logging.WARNING, "fxamp"):
        same(run(model, between=between), run(Given(), between=between))
    assert not caplog.messages
    assert len([each for each in engine_of(model).all_variants() if not each.is_preview]) == 1


def test_a_list_that_is_kept_elsewhere_stays_that_list():
    model = fxamp.convert(KeptList(), overrides={"*": "deny"})
    for _ in range(7):
        held = model.hidden
        model(X)
        assert model.before is held and model.hidden is not held


def test_sizes_that_change_have_graphs_of_their_own():
    plain, model = Model(), fxamp.convert(Model(), overrides={"*": "deny"})
    for rows in (4, 4, 2, 2, 4, 2, 4):
        for each in (plain, model):
            if each.hidden[0].shape[0] != rows:
                each.hidden = torch.ones(rows, 8), torch.zeros(rows, 8)
        assert torch.equal(model(X[:rows]), plain(X[:rows]))
    with pytest.raises(RuntimeError):
        plain(X[:2])
    with pytest.raises(RuntimeError):
        model(X[:2])


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("kind", [Model, Layers, InAList, InADictionary, Item, Connected])
def test_states_are_no_further_from_float32_than_under_autocast(kind, opt_level):
    def mean_error(found):
        return sum((one.float() - other).abs().mean() for one, other in zip(found, exact, strict=True))

    exact, theirs = run(kind()), kind()
    with autocast():
        theirs = run(theirs)
    model = fxamp.convert(kind(), dtype=LOW, opt_level=opt_level)
    ours = run(model)
    assert 0 < mean_error(ours) < 1.5 * mean_error(theirs) + 1e-4
    if opt_level == "O1":
        left = torch.utils._pytree.tree_leaves(model.hidden)
        assert all(each.dtype == torch.float32 for each in left if isinstance(each, torch.Tensor))


@pytest.mark.parametrize("way", ["copy", "compile", "boundary", "part", "dynamo", "frozen", "pickle"])
@pytest.mark.parametrize("kind", [Model, InADictionary, Item])
def test_in_other_ways_too(kind, way, tmp_path):
    torch._dynamo.reset()
    plain = nn.Sequential(kind()) if way == "boundary" else kind()
    options = {"boundary": {"boundaries": ["0"]}, "dynamo": {"capture": "dynamo"}}.get(way, {})
    model = fxamp.convert(copy.deepcopy(plain), overrides={"*": "deny"}, **options)
    plain(X), model(X)
    if way == "copy":
        model = copy.deepcopy(model)
    elif way == "compile":
        model = torch.compile(model, backend="eager")
    elif way == "frozen":
        model.eval().freeze()
    elif way == "pickle":
        torch.save(model, tmp_path / "model.pt")
        model = torch.load(tmp_path / "model.pt", weights_only=False)
    for step in range(6):
        with torch.no_grad():
            assert torch.equal(model(X + step), plain(X + step))


class Undecided(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Model()

    def forward(self, x):
        y = self.inner(x)
        return y if y.sum() > 100 else F.relu(y)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_as_a_part_of_a_forward_that_runs_as_written(opt_level):
    plain, model = Undecided(), fxamp.convert(Undecided(), overrides={"*": "deny"}, opt_level=opt_level)
    for step in range(8):
        assert torch.equal(model(X + step / 8), plain(X + step / 8))


def test_two_threads_of_state_are_two():
    plain, model = Model(), fxamp.convert(Model(), overrides={"*": "deny"})
    other_plain, other = copy.deepcopy(plain), copy.deepcopy(model)
    for step in range(6):
        one, two = (model, plain) if step % 2 else (other, other_plain)
        assert torch.equal(one(X + step), two(X + step))


def test_a_nan_in_what_is_held_is_found_and_nothing_is_changed_by_the_search():
    model = fxamp.convert(Model())
    model(X), model(X)
    assert "self.hidden[0]" in engine_of(model).all_variants()[0].compiled.source
    held = model.hidden = (torch.full((4, 8), float("nan")), torch.zeros(4, 8))
    assert "hidden" in str(fxamp.find_nan(model, (X,)))
    assert model.hidden is held


class OddNames(nn.Module):
    """Names that look like those of items."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict({"a[0]": nn.Linear(8, 8), "a['b']": nn.Linear(8, 8)})
        self.register_buffer("scale[0]", torch.full((8,), 0.5))
        setattr(self, "held[0]", torch.ones(8))
        self.held = [torch.zeros(8)]

    def forward(self, x):
        y = self.parts["a[0]"](x) * getattr(self, "scale[0]") + self.parts["a['b']"](x) * getattr(self, "held[0]")
        y = y + self.held[0]
        self.held = [y.detach()[0]]
        return y


def test_names_that_look_like_items_are_names():
    plain, model = OddNames(), fxamp.convert(OddNames(), overrides={"*": "deny"})
    for step in range(4):
        assert torch.equal(model(X + step), plain(X + step))
    with torch.no_grad():
        for each in (plain, model):
            each.get_buffer("scale[0]").mul_(2)
    assert torch.equal(model(X), plain(X))


def test_a_long_list_is_not_gone_through_at_each_call():
    class Long(Model):
        def first(self):
            return [torch.zeros(4, 8)] + [0.5] * 1000

        def forward(self, x):
            y = self.linear(x + self.hidden[0]) * self.hidden[-1]
            self.hidden = [y.detach()] + [0.5] * 1000
            return y

    same(run(fxamp.convert(Long(), overrides={"*": "deny"})), run(Long()))
