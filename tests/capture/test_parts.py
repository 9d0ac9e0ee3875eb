"""What a module that stays whole gives (it has hooks, or is a boundary) is taken apart by forward as eager does it."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import fxamp
from fxamp.model.engine import engine_of


class Pair(NamedTuple):
    first: Any
    second: Any = None


@dataclasses.dataclass
class Plain:
    first: Any
    second: Any = None


class Named(collections.OrderedDict):
    """As the outputs of transformers: items by name and by number, fields that are None no items."""

    __match_args__ = ("first", "second", "third")

    def __getitem__(self, place):
        return super().__getitem__(place) if isinstance(place, str) else tuple(self.values())[place]

    def __getattr__(self, name):
        if name in self.__match_args__:
            return self.get(name)
        raise AttributeError(name)


pytree.register_pytree_node(
    Named,
    lambda named: (list(named.values()), list(named)),
    lambda parts, names: Named(zip(names, parts, strict=True)),
    serialized_type_name="tests.capture.test_parts.Named",
)


class Whole(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.fc, self.make, self.has_more, self.kind = nn.Linear(8, 8), make, False, "mean"

    def forward(self, x):
        y = self.fc(x)
        return self.make(y, y.sum() if self.has_more else None, y * 2 if self.kind == "mean" else y * 3)


class Around(nn.Module):
    def __init__(self, make, read, is_hooked):
        super().__init__()
        self.part, self.head, self.read = Whole(make), nn.Linear(8, 3), read
        if is_hooked:
            self.part.register_forward_hook(lambda *call: None)

    def forward(self, x):
        result = self.read(self.part(x))
        return self.head(result) if isinstance(result, torch.Tensor) else result


def add(y, more):
    return y if more is None else y + 100


MAKERS = {
    "tuple": lambda y, more, z: (y, more, z),
    "inner tuple": lambda y, more, z: (y, (more, z)),
    "dict": lambda y, more, z: {"first": y, "second": more, "third": z},
    "named tuple": lambda y, more, z: Pair(y, more),
    "object": lambda y, more, z: Plain(y, more),
    "itself": lambda y, more, z: more if more is None else y,
    "sizes": lambda y, more, z: (y, more, z.shape),
    "output": lambda y, more, z: Named({"first": y, **({} if more is None else {"second": more}), "third": z}),
}
READERS = {
    "tuple": [lambda o: add(o[0], o[1]), lambda o: o[2], lambda o: o, lambda o: sum(p for p in o if p is not None)],
    "inner tuple": [lambda o: add(o[0], o[1][0]), lambda o: o[1][1] + o[0], lambda o: o],
    "dict": [
        lambda o: add(o["first"], o["second"]),
        lambda o: add(o["first"], o.get("second")),
        lambda o: {**o}["third"] + o.pop("first"),
        lambda o: sum(part for part in o.values() if part is not None),
        lambda o: o,
    ],
    "named tuple": [lambda o: add(o.first, o.second), lambda o: add(*o._replace(first=o[0] * 2)), lambda o: o],
    "object": [lambda o: add(o.first, o.second)],
    "itself": [lambda o: torch.ones(2, 8) if o is None else o],
    "sizes": [lambda o: add(o[0], o[1]).reshape(o[2]), lambda o: o[0] * o[2][1]],
    "output": [
        lambda o: add(o.first, o.second),
        lambda o: o.third,
        lambda o: add(o[0], o.get("second")),
        lambda o: o[-1] + len(o),
        lambda o: o,
    ],
}
CASES = [(kind, number) for kind, readers in READERS.items() for number in range(len(readers))]


def assert_near(ours, theirs):
    """Within bfloat16's rounding of sums of eight products below 4, and far from the 100 of another branch."""
    assert type(ours) is type(theirs)
    parts, form = pytree.tree_flatten(ours)
    others, other_form = pytree.tree_flatten(theirs)
    assert form == other_form
    for part, other in zip(parts, others, strict=True):
        assert (part is None) == (other is None)
        assert part is None or torch.allclose(part, other, atol=2**-3, rtol=2**-4)


@pytest.mark.parametrize("options", [{}, {"boundaries": ("part",)}], ids=["hooks", "boundary"])
@pytest.mark.parametrize(("kind", "number"), CASES)
def test_parts_are_what_they_are(kind, number, options):
    torch.manual_seed(0)
    model, x = Around(MAKERS[kind], READERS[kind][number], is_hooked=not options), torch.randn(2, 8)
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=(x,), capture="symbolic", **options)
    assert_near(converted(x), model(x))


def test_a_question_for_none_is_no_op_that_nobody_knows():
    model, x = Around(MAKERS["tuple"], READERS["tuple"][0], is_hooked=True), torch.randn(2, 8)
    report = fxamp.report(fxamp.convert(model, torch.bfloat16, example_inputs=(x,), capture="symbolic"))
    assert [row.name for row in report.rows if row.colour == "unlisted"] == ["part"]


@pytest.mark.parametrize("options", [{}, {"boundaries": ("part",)}], ids=["hooks", "boundary"])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_part_that_is_none_at_some_calls_alone(kind, options):
    torch.manual_seed(0)
    model, x = Around(MAKERS[kind], READERS[kind][0], is_hooked=not options), torch.randn(2, 8)
    converted = fxamp.convert(model, torch.bfloat16, **options)
    for has_more in (False, True, False, True):
        model.part.has_more = converted.part.has_more = has_more
        assert_near(converted(x), model(x))


class Chosen(nn.Module):
    """Whether it gives more is said by an attribute of a module inside of it."""

    def __init__(self):
        super().__init__()
        self.fc, self.inner = nn.Linear(8, 8), nn.Identity()
        self.inner.choice = None

    def forward(self, x):
        y = self.fc(x)
        return y, y if self.inner.choice in (2, True, "more") else None


class AroundChosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.head = Chosen(), nn.Linear(8, 3)
        self.part.register_forward_hook(lambda *call: None)

    def forward(self, x):
        return self.head(add(*self.part(x)))


@pytest.mark.parametrize("choices", [(None, 2), (False, True), ("less", "more")])
def test_what_a_module_inside_says_of_a_part_is_seen(choices):
    torch.manual_seed(0)
    model, x = AroundChosen(), torch.randn(2, 8)
    model.part.inner.choice = choices[0]
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=(x,), capture="symbolic")
    for model.part.inner.choice in choices:
        assert_near(converted(x), model(x))


def test_a_part_that_does_not_ask_whether_it_is_trained_has_one_graph():
    model, x = Around(MAKERS["tuple"], READERS["tuple"][0], is_hooked=True), torch.randn(2, 8)
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=(x,), capture="symbolic")
    for is_trained in (False, True):
        assert_near(converted.train(is_trained)(x), model(x))
    assert len(engine_of(converted).all_variants()) == 1


def test_a_part_that_was_none_for_a_reason_that_nobody_sees_is_refused():
    reasons = [None, None, 1]
    part = MAKERS["tuple"]
    model = Around(lambda y, more, z: part(y, reasons[0] and y, z), READERS["tuple"][0], is_hooked=True)
    converted, x = fxamp.convert(model, torch.bfloat16, capture="symbolic"), torch.randn(2, 8)
    converted(x)
    reasons.pop(0), reasons.pop(0)
    with pytest.raises(AssertionError, match="was None when the model was captured"):
        converted(x)


class Slope(nn.Module):
    """Whether autograd gives a gradient depends on what is frozen."""

    def __init__(self):
        super().__init__()
        self.fc, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.fc(x)
        found = torch.autograd.grad(y.sum(), self.other.weight, create_graph=True, allow_unused=True)[0]
        return self.other(y if found is None else y + 100)


@pytest.mark.parametrize("example", [True, False])
def test_a_gradient_that_is_none(example):
    torch.manual_seed(0)
    model, x = Slope(), torch.randn(2, 8)
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=(x,) if example else None)
    assert_near(converted(x), model(x))


class Many(nn.Module):
    """Gives as many parts as its input has rows."""

    def __init__(self, make, read, is_hooked):
        super().__init__()
        self.part, self.head, self.read = Single(make), nn.Linear(8, 3), read
        if is_hooked:
            self.part.register_forward_hook(lambda *call: None)

    def forward(self, x):
        return self.head(self.read(self.part(x)))


class Single(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.fc, self.make = nn.Linear(8, 8), make

    def forward(self, x):
        return self.make(self.fc(x))


LISTS = {
    "list": (list, [torch.stack, lambda o: o[-1], lambda o: o[0] * len(o)]),
    "in a tuple": (lambda y: (y, list(y)), [lambda o: torch.stack(o[1])]),
    "of dictionaries": (lambda y: [{"row": row} for row in y], [lambda o: torch.stack([row["row"] for row in o])]),
    "in a dictionary": (lambda y: {"rows": list(y)}, [lambda o: torch.stack(o["rows"])]),
}
OTHERS = {
    "tuple": (lambda y: y.unbind(0), [torch.stack, lambda o: o[-1]]),
    "dictionary": (lambda y: {str(n): row for n, row in enumerate(y)}, [lambda o: torch.stack(list(o.values()))]),
    "longer list": (lambda y: [*y, y[0]], [torch.stack]),
    "empty": (lambda y: list(y[2:]), [lambda o: torch.zeros(8) + len(o)]),
}


def many(cases):
    return [(make, read) for make, readers in cases.values() for read in readers]


@pytest.mark.parametrize("options", [{}, {"boundaries": ("part",)}], ids=["hooks", "boundary"])
@pytest.mark.parametrize(("make", "read"), many(LISTS))
def test_a_list_of_as_many_parts_as_there_are_rows(make, read, options):
    torch.manual_seed(0)
    model = Many(make, read, is_hooked=not options)
    converted = fxamp.convert(model, torch.bfloat16, **options)
    for rows in (2, 3, 2, 4):
        x = torch.randn(rows, 8)
        assert_near(converted(x), model(x))


@pytest.mark.parametrize("options", [{}, {"boundaries": ("part",)}], ids=["hooks", "boundary"])
@pytest.mark.parametrize(("make", "read"), many(OTHERS))
def test_another_number_of_parts_is_refused(make, read, options):
    torch.manual_seed(0)
    model, few, more = Many(make, read, is_hooked=not options), torch.randn(2, 8), torch.randn(3, 8)
    converted = fxamp.convert(model, torch.bfloat16, capture="symbolic", example_inputs=(few,), **options)
    assert_near(converted(few), model(few))
    with pytest.raises(AssertionError, match=r"this held \d when the model was captured, .* capture='dynamo'"):
        converted(more)
    followed = fxamp.convert(model, torch.bfloat16, capture="dynamo", **options)
    for x in (few, more):
        assert_near(followed(x), model(x))


def test_nobody_counts_parts_of_which_the_first_is_read():
    model = Many(lambda y: y.unbind(0), lambda o: o[0], is_hooked=True)
    converted = fxamp.convert(model, torch.bfloat16, capture="symbolic")
    for rows in (2, 3):
        x = torch.randn(rows, 8)
        assert_near(converted(x), model(x))
    assert not any(row.op in ("len", "eq") for row in fxamp.report(converted).rows)


class Keeping(nn.Module):
    """Puts what it computes into lists and dictionaries that it keeps."""

    def __init__(self):
        super().__init__()
        self.fc, self.kept, self.last = nn.Linear(8, 8), [], {"of": {}}
        self.inner = nn.Identity()
        self.inner.kept = self.kept

    def forward(self, x):
        y = self.fc(x)
        self.kept.append(y)
        self.last["of"]["y"] = y
        return y * len(self.inner.kept)


@pytest.mark.parametrize("options", [{}, {"boundaries": ("0",)}], ids=["hooks", "boundary"])
@pytest.mark.parametrize("example", [True, False])
def test_a_capture_leaves_nothing_in_what_a_module_keeps(example, options):
    model, x = nn.Sequential(Keeping(), nn.Linear(8, 3)), torch.randn(2, 8)
    if not options:
        model[0].register_forward_hook(lambda *call: None)
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=(x,) if example else None, **options)
    assert (model[0].kept, model[0].last) == ([], {"of": {}})
    for calls in (1, 2):
        converted(x)
        assert len(model[0].kept) == calls and {type(kept) for kept in model[0].kept} == {torch.Tensor}


class GivesBack(nn.Module):
    """Gives a list that it is given, or that it keeps."""

    def __init__(self, is_own):
        super().__init__()
        self.fc, self.own, self.is_own = nn.Linear(8, 8), [], is_own

    def forward(self, x, given):
        return self.fc(x), {"list": self.own if self.is_own else given}


class Adds(nn.Module):
    def __init__(self, is_own):
        super().__init__()
        self.part, self.head = GivesBack(is_own), nn.Linear(8, 3)
        self.part.register_forward_hook(lambda *call: None)

    def forward(self, x):
        given = [x]
        y, parts = self.part(x, given)
        parts["list"].append(y)
        return self.head(y) + len(given) + 10 * len(self.part.own)


@pytest.mark.parametrize("is_own", [True, False])
def test_what_is_added_to_a_list_that_a_module_gives_back_is_not_lost(is_own):
    torch.manual_seed(0)
    model, same, x = Adds(is_own), Adds(is_own), torch.randn(2, 8)
    same.load_state_dict(model.state_dict())
    converted = fxamp.convert(same, torch.bfloat16)
    for _ in range(3):
        assert_near(converted(x), model(x))
    with pytest.raises(fxamp.CaptureError, match=r"'part' stays whole .* gives back a list or dictionary"):
        fxamp.convert(Adds(is_own), torch.bfloat16, example_inputs=(x,), capture="symbolic")


def test_a_gradient_that_is_none_is_no_none_for_every_call():
    """Another parameter may require one."""
    with pytest.raises(fxamp.CaptureError, match=r"a None that torch\.autograd\.grad gives"):
        fxamp.convert(Slope(), torch.bfloat16, example_inputs=(torch.randn(2, 8),), capture="symbolic")


class OwnList(list):
    """No container that torch knows."""


class Renames(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_forward_hook(lambda *call: None)

    def forward(self, x, given):
        given["new"] = given.pop("old")
        return OwnList([self.fc(x), x])


class AroundRenames(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.head = Renames(), nn.Linear(8, 3)

    def forward(self, x):
        given = {"old": x}
        y, same = self.part(x, given)
        return self.head(y + same) * (-1 if "new" in given else 1)


def test_a_key_that_a_module_renames_is_a_write():
    model, x = AroundRenames(), torch.randn(2, 8)
    assert_near(fxamp.convert(model, torch.bfloat16)(x), model(x))


def test_a_list_of_a_class_that_nobody_knows_is_asked_as_it_is():
    model, x = Around(lambda y, more, z: OwnList([y, z]), lambda o: o[0] + o[1], is_hooked=True), torch.randn(2, 8)
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=(x,), capture="symbolic")
    assert_near(converted(x), model(x))


class Rows(nn.Module):
    """How many rows it gives, a number that is read from the data decides: nothing can be guessed of it."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind

    def forward(self, x, chosen):
        rows = self.linear(x[: int(chosen.sum())])
        return {"list": [rows, rows], "dict": {0: rows, 1: rows}, "nested": (rows, (rows, rows))}[self.kind]


class RowsInside(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.part, self.head = Rows(kind), nn.Linear(8, 8)

    def forward(self, x, chosen):
        parts = self.part(x, chosen)
        first, second = parts[0], parts[1][0] if self.part.kind == "nested" else parts[1]
        return self.head(torch.cat([self.head(first), second.mul(0.5)]).mean(0))


@pytest.mark.parametrize("kind", ["list", "dict", "nested"])
def test_parts_of_which_nothing_is_known_are_read_as_they_come(kind):
    torch.manual_seed(0)
    model, x = RowsInside(kind), torch.randn(4, 8)
    converted = fxamp.convert(model, torch.bfloat16, boundaries=["part"])
    for chosen in (torch.tensor([True, False, True, True]), torch.tensor([False, True, False, True])):
        torch.testing.assert_close(converted(x, chosen), model(x, chosen), rtol=0.03, atol=0.03)
    assert {row.precision for row in fxamp.report(converted).rows if row.op == "linear"} == {"low"}


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, pair):
        return self.linear(pair.first) + pair.second


class Packing(nn.Module):
    def __init__(self):
        super().__init__()
        self.reader, self.rnn = Reader(), nn.GRU(8, 8, batch_first=True)

    def forward(self, x, lengths):
        x = self.reader(Pair(x, x * 2))
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


@pytest.mark.parametrize("whole", ["hooks", "boundaries"])
def test_a_module_that_stays_whole_is_given_a_tuple_of_its_class(whole):
    torch.manual_seed(0)
    model, calls = Packing(), []
    for part in model.children() if whole == "hooks" else ():
        part.register_forward_hook(lambda *_: calls.append(None))
    boundaries = ["reader", "rnn"] if whole == "boundaries" else ()
    converted = fxamp.convert(model, torch.bfloat16, boundaries=boundaries, capture="symbolic")
    x, lengths = torch.randn(2, 4, 8), torch.tensor([2, 4])
    found = converted(x, lengths)
    assert len(calls) == 2 * (whole == "hooks")
    torch.testing.assert_close(found, model(x, lengths), rtol=0.03, atol=0.03)


class WritesItsArgument(nn.Module):
    def forward(self, x):
        x.add_(1)
        return x * 2


@pytest.mark.parametrize("capture", ["auto", "symbolic"])
def test_a_write_into_what_data_sizes_is_seen(capture):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last, self.part = nn.Linear(8, 8), nn.Linear(8, 8), WritesItsArgument()
            self.part.register_forward_hook(lambda *_: None)

        def forward(self, x):
            h = self.first(x[(x > 0).nonzero()[:, 0]])
            self.part(h)
            return self.last(h)

    model, x = Model(), torch.randn(3, 8)
    if capture == "symbolic":
        with pytest.raises(fxamp.CaptureError, match=r"'part' stays whole .* writes into an argument"):
            fxamp.convert(model, dtype=torch.bfloat16, capture=capture)(x)
        return
    converted = fxamp.convert(model, dtype=torch.bfloat16)
    for _ in range(2):
        torch.testing.assert_close(converted(x), model(x), rtol=0.05, atol=0.05)
