"""Parameters and buffers that there are only later, and other state that a trace reads past the model's attributes."""

import threading

import pytest
import torch
from torch import nn

import fxamp
from fxamp.model.engine import engine_of

X = torch.linspace(-2, 2, 32).reshape(4, 8)
LOCAL = threading.local()
LOCAL.scale = 1.0
TABLE = [1.0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.layer = nn.Linear(8, 8)


class Has(Net):
    def forward(self, x):
        y = self.layer(self.inner(x))
        return y * self.late if hasattr(self, "late") else y


class Gets(Net):
    def forward(self, x):
        y, late = self.layer(self.inner(x)), getattr(self.inner, "late", None)
        return y if late is None else y * late


class Tables(Net):
    def forward(self, x):
        y = self.layer(self.inner(x))
        for table in (self._parameters, self._buffers):
            y = y * table["late"] if "late" in table else y
        return y


class Loops(Net):
    def forward(self, x):
        y = self.layer(self.inner(x))
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            y = y * tensor if name.endswith("late") else y
        return y


def converted(model, **options):
    return fxamp.convert(model, torch.bfloat16, **options)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("capture", ["symbolic", "auto", "dynamo"])
@pytest.mark.parametrize("kind", [Has, Gets, Tables, Loops])
@pytest.mark.parametrize("register", ["register_buffer", "register_parameter"])
def test_what_is_registered_later_is_used(kind, register, capture):
    model = kind()
    low = converted(model, capture=capture)
    before = model(X)
    close(low(X), before)
    owner = model.inner if kind is Gets else model
    late = torch.tensor(3.0)
    for each in {owner, low.inner if kind is Gets else low}:
        if not hasattr(each, "late"):
            getattr(each, register)("late", late if register == "register_buffer" else nn.Parameter(late))
    close(low(X), model(X))
    close(low(X), 3 * before)
    del owner.late
    close(low(X), before)


@pytest.mark.parametrize("capture", ["symbolic", "auto"])
def test_the_weights_that_forward_goes_through_cost_no_graph_while_they_stay(capture):
    low = converted(Loops(), capture=capture)
    for _ in range(3):
        low(X).sum().backward()
    assert len(engine_of(low).graphs()) == 1


class Lazy(nn.Module):
    """Makes its index when it is first asked for, as litgpt's LoRA does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    @property
    def index(self):
        if not hasattr(self, "_index"):
            self.register_buffer("_index", torch.arange(8).flip(0), persistent=False)
        return self._index

    def forward(self, x):
        return self.layer(x).index_select(-1, self.index)


def test_a_buffer_that_forward_registers_itself_leaves_one_graph_from_then_on():
    model = nn.Sequential(Lazy(), nn.Linear(8, 4))
    low = converted(model)
    for _ in range(3):
        found = low(X)
    close(found, model(X))
    engine = engine_of(low)
    (variant,) = [variant for known in engine.variants.values() for variant in known]
    assert variant.captured.method == "symbolic" and variant.inputs_for(low, [X]) is not None


class Threaded(Net):
    def forward(self, x):
        return self.layer(x) * LOCAL.scale


def test_what_a_thread_has_of_its_own_is_seen():
    model = Threaded()
    low = converted(model, capture="symbolic")
    for scale in (1.0, 3.0, 1.0):
        LOCAL.scale = scale
        close(low(X), model(X))
    found = []

    def other():
        LOCAL.scale = 5.0
        found.append(low(X))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    close(found[0], 5 * model(X))


def scale():
    return TABLE[0]


class Held:
    def __init__(self):
        self.gain = 1.0

    def times(self, y):
        return y * self.gain


HELD = Held()


class Defaults(Net):
    def forward(self, x, by=scale, *, held=HELD):
        return held.times(self.layer(x)) * by()


@pytest.mark.parametrize("capture", ["symbolic", "auto"])
def test_functions_and_objects_that_are_defaults_are_followed(capture, monkeypatch):
    model = Defaults()
    low = converted(model, capture=capture)
    before = model(X)
    close(low(X), before)
    monkeypatch.setitem(globals(), "TABLE", [2.0])
    close(low(X), 2 * before)
    monkeypatch.setattr(HELD, "gain", 3.0)
    close(low(X), 6 * before)


class Weighted(nn.Module):
    scale = 1.0

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", None)

    def forward(self, y):
        buffers = [buffer for buffer in self.buffers()]
        return y * self.scale if self.weight is None and not hasattr(self, "late") else y * len(buffers)


class MakesALoss(Net):
    def forward(self, x):
        y = self.layer(self.inner(x))
        return Weighted()(y), nn.CrossEntropyLoss()(y, torch.zeros_like(y[:, 0], dtype=torch.int64))


def test_a_module_that_forward_makes_registers_nothing_that_a_later_call_lacks(monkeypatch):
    converted = fxamp.convert(MakesALoss(), torch.bfloat16, capture="symbolic")
    for _ in range(3):
        first, _ = converted(X)
    assert fxamp.report(converted).captures == ("symbolic",)
    monkeypatch.setattr(Weighted, "scale", 2.0)
    torch.testing.assert_close(converted(X)[0], 2 * first)
