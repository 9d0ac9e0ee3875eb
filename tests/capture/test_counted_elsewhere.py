"""Forward writes into objects of many kinds: as often as in eager, whichever way a call is captured and how often."""

import array
import copy
import ctypes
import dataclasses
import io
import mmap
import multiprocessing
import typing

import numpy as np
import pytest
import torch
from torch import nn

import fxamp

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Slots:
    __slots__ = ("n", "other")

    def __init__(self):
        self.n = 0.0  # `other` is empty


class SlotsAndMore:
    __slots__ = ("__dict__", "n")

    def __init__(self):
        self.n, self.more = 0.0, 0.0


class Behind:
    __slots__ = ("_n",)

    def __init__(self):
        self._n = 0.0

    @property
    def n(self):
        return self._n

    @n.setter
    def n(self, value):
        self._n = value


@dataclasses.dataclass(slots=True)
class Counted:
    n: float = 0.0
    seen: list = dataclasses.field(default_factory=list)


def adds(name):
    def count(held, x):
        setattr(held, name, getattr(held, name, 0.0) + 1)
        return getattr(held, name)

    return count


def fills(held, x):
    held.other = getattr(held, "other", 0.0) + 1
    return held.other


def averages(held, x):
    held.n = held.n * 0.5 + x.detach().mean()
    return held.n


def first(held, x):
    held[0] += 1
    return float(held[0])


def inside(held, x):
    held[0][0] += 1
    return held[0][0]


def lists(held, x):
    held.seen.append(len(held.seen))
    return float(len(held.seen))


def writes(held, x):
    before = len(held.getvalue())
    held.write(b"ab" if isinstance(held, io.BytesIO) else "ab")
    return 10.0 * before + held.tell()


def with_text(kind, text):
    held = kind(text)
    held.seek(1)
    return held


def moves(held, x):
    held.loc = held.loc + 1
    return held.mean


def asks_once(held, x):
    return held.probs.sum() + held.probs[0]


def objects():
    return np.array([[0.0], None], dtype=object)


def normal():
    return torch.distributions.Normal(torch.zeros(8), torch.ones(8))


def shared():
    return multiprocessing.Value("d", 0.0)


HELD = {
    "slots": (Slots, adds("n")),
    "empty slot": (Slots, fills),
    "average in a slot": (Slots, averages),
    "slots and a dictionary": (SlotsAndMore, adds("n")),
    "a dictionary and slots": (SlotsAndMore, adds("more")),
    "property": (Behind, adds("n")),
    "dataclass": (Counted, adds("n")),
    "list in a slot": (Counted, lists),
    "shared number": (shared, adds("value")),
    "ctypes": (lambda: ctypes.c_double(0.0), adds("value")),
    "ctypes array": (lambda: (ctypes.c_int * 2)(), first),
    "memoryview": (lambda: memoryview(bytearray(4)), first),
    "part of a memoryview": (lambda: memoryview(bytearray(8))[::2], first),
    "part of a memoryview of numbers": (lambda: memoryview(array.array("d", [0.0] * 4))[::2], first),
    "bytearray": (lambda: bytearray(4), first),
    "array": (lambda: array.array("d", [0.0]), first),
    "numpy": (lambda: np.zeros(2), first),
    "numpy of objects": (objects, inside),
    "mmap": (lambda: mmap.mmap(-1, 4), first),
    "text": (io.StringIO, writes),
    "bytes": (io.BytesIO, writes),
    "text that is written over": (lambda: with_text(io.StringIO, "xyz"), writes),
    "bytes that are written over": (lambda: with_text(io.BytesIO, b"xyz"), writes),
    "attribute of a tensor": (lambda: torch.ones(1), adds("n")),
    "attribute of a library's object": (normal, adds("n")),
    "tensor of a library's object": (normal, moves),
    "what a library's object computes once": (lambda: torch.distributions.Categorical(logits=X[0]), asks_once),
}


class Counts(nn.Module):
    def __init__(self, make, count, decides):
        super().__init__()
        self.held, self.count, self.decides = make(), count, decides
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        y = self.fc(x)
        y = y * self.count(self.held, y)
        return -y if self.decides and y.detach().sum() > 1e30 else y


@pytest.mark.parametrize("is_given", [False, True], ids=["call", "example"])
@pytest.mark.parametrize("decides", [False, True], ids=["plain", "decides"])
@pytest.mark.parametrize("name", HELD)
def test_each_call_counts_once(name, decides, is_given, fresh_dynamo):
    if name == "attribute of a tensor" and decides and torch.__version__ < "2.12":
        pytest.skip("Dynamo takes it for a constant before torch 2.12")
    torch.manual_seed(0)
    eager = Counts(*HELD[name], decides)
    model = Counts(*HELD[name], decides)
    model.load_state_dict(eager.state_dict())
    converted = fxamp.convert(model, torch.bfloat16, (X,) if is_given else None, overrides={"*": "deny"})
    for _ in range(4):
        assert torch.allclose(converted(X), eager(X), rtol=1e-6)


def closed(held):
    held.close() if hasattr(held, "close") else held.release()
    return held


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.array(["2026-01-01"], dtype="M8[D]"),
        lambda: np.array([(1.0, None)], dtype=[("number", "f8"), ("thing", "O")]),
        lambda: np.float32(2.0),
        lambda: closed(mmap.mmap(-1, 4)),
        lambda: closed(io.StringIO()),
        lambda: closed(memoryview(bytearray(4))),
        lambda: memoryview(np.zeros((2, 3))),
    ],
)
def test_what_is_held_and_not_written_keeps_no_model_from_a_graph(make):
    model = Counts(make, lambda held, x: 1.0 if held is not None else 2.0, decides=False)
    converted = fxamp.convert(model, torch.bfloat16)
    converted(X)
    assert fxamp.report(converted).captures == ("symbolic",)


def test_what_a_library_keeps_for_itself_is_no_write_of_the_models():
    def asks(held, x):
        held._hash = getattr(held, "_hash", 0) + 1  # as DeviceMesh does when it is first asked
        return held.mean

    converted = fxamp.convert(Counts(normal, asks, decides=False), torch.bfloat16)
    converted(X)
    assert fxamp.report(converted).captures == ("symbolic",)


def test_what_a_library_computes_once_is_computed_by_the_graph():
    model = Counts(*HELD["what a library's object computes once"], decides=False)
    converted = fxamp.convert(model, torch.bfloat16)
    converted(X)
    assert fxamp.report(converted).captures == ("symbolic",)
    assert "probs" not in vars(converted.held)


def test_an_array_is_as_it_was_whose_view_was_read_later():
    """The view was written by then, so it must not be put back as it was when it was read."""
    numbers = np.zeros(4)

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole, self.part = numbers, numbers[:2]
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            self.whole += 1
            self.part += 1
            return self.fc(x)

    converted = fxamp.convert(Looks(), torch.bfloat16)
    converted(X)
    assert numbers.tolist() == [2, 2, 1, 1]


def test_a_value_of_a_trace_stays_nowhere():
    model = Counts(Slots, averages, decides=False)
    converted = fxamp.convert(model, torch.bfloat16)
    converted(X)
    assert type(converted.held.n) is torch.Tensor
    assert not hasattr(copy.deepcopy(converted).held, "other")


TABLE, NUMBERS, TENSOR, HOLDER = {"n": 0}, [], torch.zeros(2), Slots()


class Held:
    n = 0
    seen: typing.ClassVar[list] = []
    tensor = torch.zeros(1)


def in_a_closure():
    n, seen = 0, [0]

    def count():
        nonlocal n
        n += 1
        seen[0] += 1
        return n + seen[0]

    count.now = lambda: n + seen[0]
    return count


def by_itself():
    by_itself.n += 1


by_itself.n = 0
COUNT = in_a_closure()


def counts_in_slots():
    HOLDER.n += 1
    return 0


def adds_everywhere():
    TABLE["n"] += 1
    NUMBERS.append(1)
    Held.n += 1
    Held.seen.append(1)
    COUNT()
    by_itself()
    counts_in_slots()


def writes_tensors():
    TENSOR.add_(1)
    Held.tensor.add_(1)


def everywhere():
    tensors = TENSOR.sum().item(), Held.tensor.sum().item()
    return TABLE["n"], len(NUMBERS), Held.n, len(Held.seen), COUNT.now(), by_itself.n, HOLDER.n, *tensors


class Does(nn.Module):
    def __init__(self, what, decides=True):
        super().__init__()
        self.what, self.decides = what, decides
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        self.what()
        y = self.fc(x)
        return -y if self.decides and y.detach().sum() > 1e30 else y


@pytest.mark.parametrize("what", [adds_everywhere, writes_tensors])
@pytest.mark.parametrize("decides", [False, True], ids=["plain", "decides"])
@pytest.mark.parametrize("is_given", [False, True], ids=["call", "example"])
def test_what_stands_outside_of_the_model_is_written_by_calls_alone(what, decides, is_given, fresh_dynamo):
    start = everywhere()
    converted = fxamp.convert(Does(what, decides), torch.bfloat16, (X,) if is_given else None)
    assert everywhere() == start
    for _ in range(3):
        converted(X)
    found = [now - before for now, before in zip(everywhere(), start, strict=True)]
    assert found == ([3, 3, 3, 3, 6, 3, 3, 0, 0] if what is adds_everywhere else [0] * 7 + [6, 3])


def rows_of(mask, _count=counts_in_slots):
    """Looks into inputs alone; what it counts with is reached by a default alone."""
    return [int(value) + _count() for value in mask.sum(1).tolist()]


class ByDefault(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, mask):
        return sum(self.fc(x) * rows for rows in rows_of(mask))


def wrapped(kind):
    inner = kind.forward

    def forward(self, x, _inner=inner):
        return _inner(self, x)

    return type("Wrapped", (kind,), {"forward": forward})


def test_a_function_that_looks_into_inputs_counts_once_in_each_call(fresh_dynamo):
    mask, before = torch.ones(4, 8), HOLDER.n
    converted = fxamp.convert(ByDefault(), torch.bfloat16)
    for _ in range(3):
        converted(X, mask)
    assert HOLDER.n - before == 3 * len(mask)


@pytest.mark.parametrize("decides", [False, True], ids=["plain", "decides"])
def test_a_forward_inside_of_a_wrapper_s_default_counts_once(decides, fresh_dynamo):
    start = everywhere()
    converted = fxamp.convert(wrapped(Does)(adds_everywhere, decides), torch.bfloat16)
    for _ in range(3):
        converted(X)
    assert [now - before for now, before in zip(everywhere(), start, strict=True)] == [3, 3, 3, 3, 6, 3, 3, 0, 0]
