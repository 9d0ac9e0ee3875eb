"""Objects that forward makes and returns: made anew at each call, as eager makes them."""

import argparse
import collections
import copy
import dataclasses
import enum
import threading
import types

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import fxamp
from fxamp.errors import CaptureError

BF16 = torch.bfloat16


class Kind(enum.Enum):
    FULL = 1


class Layer:
    is_sliding = False

    def __init__(self):
        self.keys = None
        self.is_initialized = False

    def update(self, keys):
        self.dtype, self.device = keys.dtype, keys.device
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], -2)
        self.is_initialized = True


class Cache:
    def __init__(self, layers):
        self.layers = [Layer() for _ in range(layers)]
        self.layer_class = Layer
        self.kind = Kind.FULL
        self.sizes = collections.OrderedDict()
        self.first = self.layers[0]


class Net(nn.Module):
    def __init__(self, make=lambda cache, x: {"y": x, "cache": cache}):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.make = make
        self.config = Layer()

    def forward(self, x):
        cache = Cache(3)
        for place, block in enumerate(self.blocks):
            x = block(x)
            cache.layers[place].update(x)
            cache.sizes[place] = x.shape[0]
        return self.make(cache, x)


def converted_and_plain(make=lambda cache, x: {"y": x, "cache": cache}, **more):
    model = Net(make)
    return fxamp.convert(model, BF16, capture="symbolic", **more), model


def test_an_object_comes_back_as_eager_makes_it():
    model, plain = converted_and_plain()
    x = torch.randn(4, 8)
    found, expected = model(x)["cache"], plain(x)["cache"]
    assert type(found) is Cache and found.kind is Kind.FULL and found.layer_class is Layer
    assert list(vars(found)) == list(vars(expected)) and found.sizes == expected.sizes
    assert found.first is found.layers[0] and type(found.sizes) is collections.OrderedDict
    for own, other in zip(found.layers, expected.layers, strict=True):
        assert {**vars(own), "keys": 0} == {**vars(other), "keys": 0}
        assert (own.keys is None) == (other.keys is None)
        if own.keys is not None:
            torch.testing.assert_close(own.keys.float(), other.keys, rtol=0.02, atol=0.02)


class Holder:
    def __init__(self, cache):
        self.cache = cache


def test_an_object_that_only_holds_another_is_made_too():
    model, _ = converted_and_plain(lambda cache, x: (cache, Holder(cache), x))
    cache, holder, _ = model(torch.randn(4, 8))
    assert type(holder) is Holder and holder.cache is cache


def test_what_a_list_hands_out_beside_an_object_is_a_result():
    def make(cache, x):
        holder = Holder([cache.layers[0].keys])
        return {"holder": holder, "kept": holder.cache, "more": Holder(cache.layers[0].keys + 1.0)}

    model, _ = converted_and_plain(make)
    result = model(torch.randn(4, 8))
    assert result["kept"][0] is result["holder"].cache[0]
    assert (result["kept"][0].dtype, result["more"].cache.dtype) == (torch.float32, BF16)


def test_sizes_in_an_object_are_those_of_the_call():
    class Sized(Net):
        def forward(self, x):
            holder = Holder(self.blocks[0](x))
            holder.rows, holder.length, holder.text = x.shape[0], len(x), f"{x.shape[0]} rows"
            return holder

    model = fxamp.convert(Sized(), BF16)
    for rows in (2, 5, 3):
        found = model(torch.randn(rows, 8))
        assert (found.rows, found.length, found.text) == (rows, rows, f"{rows} rows")


def test_each_call_makes_its_own():
    model, _ = converted_and_plain()
    one, other = model(torch.zeros(4, 8))["cache"], model(torch.ones(4, 8))["cache"]
    one.layers.append("mine")
    one.sizes["mine"] = one.first.note = 1
    assert len(other.layers) == len(model(torch.zeros(4, 8))["cache"].layers) == 3
    assert "mine" not in other.sizes and not hasattr(other.first, "note")
    assert not torch.equal(one.first.keys, other.first.keys)
    assert model(torch.ones(2, 8))["cache"].sizes == {0: 2, 1: 2}


def test_gradients_flow_through_it():
    model, plain = converted_and_plain()
    x = torch.randn(4, 8)
    for net in (model, plain):
        net.zero_grad()
        cache = net(x)["cache"]
        (cache.layers[0].keys.square().mean() + cache.layers[1].keys.sum()).backward()
        net.grads = [parameter.grad.clone() for parameter in net.parameters()]
    for own, other in zip(model.grads, plain.grads, strict=True):
        torch.testing.assert_close(own, other, rtol=0.05, atol=0.05)


def test_what_the_model_holds_stays_itself():
    class Holding(Net):
        def forward(self, x):
            result = super().forward(x)
            result["cache"].config, result["cache"].bounds = self.config, self.config.bounds
            return result

    model = Holding()
    model.config.bounds = [1, 2]
    result = fxamp.convert(model, BF16, capture="symbolic")(torch.randn(2, 8))
    assert result["cache"].config is model.config and result["cache"].bounds is model.config.bounds


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
def test_at_every_opt_level(opt_level):
    model, _ = converted_and_plain(opt_level=opt_level)
    result = model(torch.randn(4, 8))
    assert result["y"].dtype == torch.float32 and result["cache"].layers[1].keys is result["y"]
    assert result["cache"].layers[0].keys.dtype == BF16, "what an object alone holds comes as it is computed"


@dataclasses.dataclass
class Named:
    x: torch.Tensor
    more: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor


class Slots:
    __slots__ = ("unset", "x")

    def __init__(self, x):
        self.x = x


class OneSlot:
    __slots__ = "held"

    def __init__(self, x):
        self.held = x


class BesideSlots(Slots):
    def __init__(self, x):
        super().__init__(x)
        self.other = x + 1


class Attributes(dict):
    """What is an item is an attribute: two ways that packages have, and one that has more."""

    __getattr__ = dict.__getitem__


class OwnNamespace(dict):
    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


class NoNamespace(dict):
    __slots__ = ()


class InOrder(collections.OrderedDict):
    def __init__(self, **items):
        super().__init__(**items)
        vars(self).update(items)
        self.move_to_end("x")


def asks_the_data(module, x):
    return nn.functional.relu(x) if float(x.detach().sum() * float(x[0, 0])) > 1e9 else x


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("runs", ["graph", "as written"])
@pytest.mark.parametrize(
    ("make", "results", "others"),
    [
        (lambda x: Named(x), lambda y: [y.x], None),
        (lambda x: Frozen(x), lambda y: [y.x], None),
        (lambda x: Slots(x), lambda y: [y.x], None),
        (lambda x: OneSlot(x), lambda y: [y.held], None),
        (lambda x: BesideSlots(x), lambda y: [y.x, y.other], None),
        (lambda x: types.SimpleNamespace(x=x), lambda y: [y.x], None),
        (lambda x: argparse.Namespace(x=x), lambda y: [y.x], None),
        (lambda x: [x, {"a": Named(x, (Frozen(x + 1),))}], lambda y: [y[0], y[1]["a"].x, y[1]["a"].more[0].x], None),
        (lambda x: Attributes(x=x, more=[x + 1]), lambda y: [y["x"], y.x, y.more[0]], None),
        (lambda x: (OwnNamespace(x=x, more=None),), lambda y: [y[0]["x"], y[0].x], None),
        (lambda x: InOrder(x=x, more=Named(x + 1)), lambda y: [y["x"], y.x, y["more"].x, [*y.values()][-1]], None),
        (lambda x: NoNamespace(x=x), lambda y: [y["x"]], None),
        (lambda x: Named(x, Holder(x + 1)), lambda y: [y.x], lambda y: y.more.cache),
        (lambda x: (x, Holder(x + 1)), lambda y: [y[0]], lambda y: y[1].cache),
        (lambda x: Holder(Holder(x + 1)), lambda y: [], lambda y: y.cache.cache),
    ],
    ids=[
        *("named", "frozen", "slots", "one_slot", "beside_slots", "namespace", "argparse", "nested", "attributes"),
        *("own_namespace", "in_order", "no_namespace", "cache_in_it", "cache_beside_it", "cache"),
    ],
)
def test_what_named_fields_hold_is_a_result(make, results, others, runs, opt_level):
    """As that of a tuple; what other objects hold comes as it is computed."""

    class Makes(Net):
        def forward(self, x):
            h = self.blocks[0](x)
            return make(asks_the_data(self, h) if runs == "as written" else h)

    x, plain = torch.randn(4, 8), Makes()
    expected = plain(x)
    converted = fxamp.convert(Makes(), BF16, opt_level=opt_level)
    for _ in range(2):
        found = converted(x)
        assert type(found) is type(expected)
        for result, exact in zip(results(found), results(expected), strict=True):
            assert result.dtype == torch.float32 and result.requires_grad
            torch.testing.assert_close(result, exact, rtol=0.05, atol=0.05)
        if others is not None and (runs == "graph" or opt_level != "O1"):  # Dynamo's graphs give float32
            assert others(found).dtype == BF16


def test_an_object_that_forward_keeps_and_returns_is_not_written_into():
    class Keeps(Net):
        def forward(self, x):
            h = asks_the_data(self, self.blocks[0](x))
            self.kept = Named(h, [h])
            return self.kept

    model = fxamp.convert(Keeps(), BF16, opt_level="O2")
    for _ in range(2):
        result = model(torch.randn(4, 8))
    assert result.x is result.more[0] and result.x.dtype == torch.float32
    assert model.kept.x.dtype == BF16, "what forward has set on the model, as it is written"


def test_what_holds_nothing_low_is_given_as_it_is():
    class Keeps(Net):
        def forward(self, x):
            asks_the_data(self, self.blocks[0](x))
            self.kept = Named(x, [Named(x)])
            return self.kept, self.kept.more[0]

    model = fxamp.convert(Keeps(), BF16, opt_level="O2")
    for _ in range(2):
        one, other = model(torch.randn(4, 8))
        assert one is model.kept and other is model.kept.more[0]


class MadeOfRows:
    """What pytree sees of it is made at each look."""

    def __init__(self, rows):
        self.rows = rows


pytree.register_pytree_node(
    MadeOfRows, lambda made: (list(made.rows.unbind()), None), lambda rows, _: MadeOfRows(torch.stack(list(rows)))
)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_leaves_that_a_pytree_makes_are_told_apart(opt_level):
    class Parts(Net):
        def forward(self, x):
            h = asks_the_data(self, self.blocks[0](x))
            return Named(MadeOfRows(h[:2]), [MadeOfRows(h[2:4]), Named(MadeOfRows(h[4:]))])

    plain, model, x = Parts(), fxamp.convert(Parts(), BF16, opt_level=opt_level), torch.randn(6, 8)
    for _ in range(2):
        results = [[each.x, each.more[0], each.more[1].x] for each in (model(x), plain(x))]
        for found, exact in zip(*results, strict=True):
            torch.testing.assert_close(found.rows, exact.rows, rtol=0.05, atol=0.05)


class Private:
    __slots__ = ("__x", "y")

    def __init__(self, x):
        self.__x = self.y = x


def test_what_private_slots_hold_comes_back():
    model, plain = converted_and_plain(lambda cache, x: Private(x))
    x = torch.randn(4, 8)
    found, expected = model(x), plain(x)
    assert type(found) is Private and found._Private__x is found.y
    torch.testing.assert_close(found.y, expected.y, rtol=0.05, atol=0.05)


class OfItsOwn(dict):
    pass


class Ring:
    def __init__(self, x):
        self.x, self.self = x, self


MADE_BEFORE = Layer()


def with_what_was_there(cache, x):
    cache.other = [Layer(), collections.deque([x])]
    return cache


def with_a_lock(cache, x):
    cache.lock = threading.Lock()
    return cache


def with_an_object_of_unknown_age(cache, x):
    holder = Ring.__new__(Ring)
    holder.x, holder.config = x, MADE_BEFORE
    return holder


@pytest.mark.parametrize(
    "make",
    [
        lambda cache, x: OfItsOwn(x=x),
        lambda cache, x: Ring(x),
        with_what_was_there,
        with_a_lock,
        with_an_object_of_unknown_age,
    ],
)
def test_what_cannot_be_made_anew_is_left_to_dynamo(make):
    with pytest.raises(CaptureError, match="forward returns a"):
        converted_and_plain(make)
    torch._dynamo.reset()
    plain, x = Net(make), torch.randn(2, 8)
    converted = fxamp.convert(plain, BF16)
    assert type(converted(x)) is type(plain(x))
    assert fxamp.report(converted).captures == ("dynamo",)


@pytest.mark.parametrize(
    "make",
    [
        lambda cache, x: nn.Parameter(x.detach()),
        lambda cache, x: {"new": nn.Parameter(x.detach(), requires_grad=False)},
    ],
)
def test_a_parameter_that_forward_makes_comes_as_one(make):
    plain, x = Net(make), torch.randn(2, 8)
    with pytest.raises(CaptureError, match=r"an nn\.Parameter that it has made"):
        fxamp.convert(plain, BF16, opt_level="O2", example_inputs=(x,), capture="symbolic")
    (expected,), (found,) = (pytree.tree_leaves(model(x)) for model in (plain, fxamp.convert(plain, BF16)))
    assert isinstance(found, nn.Parameter) and found.is_leaf
    assert found.dtype == torch.float32 and found.requires_grad == expected.requires_grad


class Fields(collections.OrderedDict):
    """As transformers' ModelOutput: fields are items and attributes; made of its items, it has the order of fields."""

    FIELDS = ("hidden", "pooled", "states")

    def __init__(self, **fields):
        super().__init__()
        for name in self.FIELDS:
            if name in fields:
                setattr(self, name, fields[name])

    def __setattr__(self, name, value):
        self[name] = value
        object.__setattr__(self, name, value)


pytree.register_pytree_node(
    Fields,
    lambda made: (list(made.values()), list(made)),
    lambda values, names: Fields(**dict(zip(names, values, strict=True))),
)


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_result_with_named_fields_keeps_their_order(is_nested):
    """A field that forward sets later comes last, and `result[1]` or a tuple of it is by that order."""

    class SetsOneLater(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            made = Fields(hidden=self.linear(x), states=(x, x + 1))
            made.pooled = made.hidden.mean(0)
            return {"inner": [made], "sizes": x.shape} if is_nested else made

    model, x = SetsOneLater(), torch.randn(2, 4)
    converted = fxamp.convert(model, torch.bfloat16, capture="symbolic")
    for result, exact in ((converted(x), model(x)), (copy.deepcopy(converted)(x), model(x))):
        made, wanted = (each["inner"][0] if is_nested else each for each in (result, exact))
        assert list(made) == list(wanted) == ["hidden", "states", "pooled"]
        assert torch.allclose(made.pooled, wanted.pooled, atol=0.05)
        assert torch.equal(made.states[1], wanted.states[1])
