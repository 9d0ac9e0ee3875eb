"""State that is read by what nothing names (constructors, operators, imports), and names that are defined later."""

import copy
import sys
import threading
import types

import pytest
import torch
from torch import nn

import fxamp

X = torch.linspace(-2, 2, 32).reshape(4, 8)
FACTOR = 1.0
LOCAL = threading.local()
HERE = sys.modules[__name__]
ELSEWHERE = types.ModuleType("settings_elsewhere")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)


class MadeScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = FACTOR

    def forward(self, y):
        return y * self.factor


class ConstructsAModule(Net):
    def forward(self, x):
        return MadeScale()(self.layer(x))


class Times:
    def __matmul__(self, y):
        return y * FACTOR

    def __rmul__(self, y):
        return y * FACTOR

    def __enter__(self):
        return FACTOR

    def __exit__(self, *_):
        pass


class Operator(Net):
    def forward(self, x):
        return Times() @ self.layer(x)


class HeldOperator(Net):
    def __init__(self):
        super().__init__()
        self.times = Times()

    def forward(self, x):
        return self.times @ self.layer(x)


class Context(Net):
    def forward(self, x):
        with Times() as factor:
            return self.layer(x) * factor


class Fallback(Net):
    def __getattr__(self, name):
        return FACTOR if name == "factor" else super().__getattr__(name)

    def forward(self, x):
        return self.layer(x) * self.factor


class Table(nn.ModuleList):
    def __getitem__(self, index):
        return super().__getitem__(index if FACTOR == 1.0 else 1)


class Indexes(Net):
    def __init__(self):
        super().__init__()
        self.table = Table([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        return self.table[0](self.layer(x))


class ImportsAName(Net):
    def forward(self, x):
        from settings_elsewhere import FACTOR

        return self.layer(x) * FACTOR


class ImportsAModule(Net):
    def forward(self, x):
        import settings_elsewhere as settings

        return self.layer(x) * settings.FACTOR


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch):
    monkeypatch.setattr(ELSEWHERE, "FACTOR", 1.0, raising=False)
    monkeypatch.setitem(sys.modules, "settings_elsewhere", ELSEWHERE)


@pytest.mark.parametrize(
    "kind",
    [
        ConstructsAModule,
        Operator,
        HeldOperator,
        Context,
        Fallback,
        Indexes,
        ImportsAName,
        ImportsAModule,
    ],
)
def test_what_is_called_without_being_named_is_followed(kind, monkeypatch):
    model = kind()
    low = fxamp.convert(model, torch.bfloat16, capture="symbolic")
    before = model(X)
    for _ in range(2):
        torch.testing.assert_close(low(X), before, rtol=0.05, atol=0.05)
    assert fxamp.report(low).captures == ("symbolic",)
    monkeypatch.setattr(ELSEWHERE if kind in (ImportsAName, ImportsAModule) else HERE, "FACTOR", 3.0)
    assert not torch.allclose(model(X), before, rtol=0.1, atol=0.1)
    torch.testing.assert_close(low(X), model(X), rtol=0.05, atol=0.05)


class GlobalLater(Net):
    def forward(self, x):
        return self.layer(x) * (LATER if "LATER" in globals() else 1.0)  # noqa: F821


class ClassLater(Net):
    def forward(self, x):
        return self.layer(x) * getattr(self, "later", 1.0)


class ThreadLater(Net):
    def forward(self, x):
        return self.layer(x) * getattr(LOCAL, "later", 1.0)


@pytest.mark.parametrize(("kind", "owner"), [(GlobalLater, HERE), (ClassLater, ClassLater), (ThreadLater, LOCAL)])
def test_a_name_that_is_defined_later_is_seen(kind, owner, monkeypatch):
    model = kind()
    low = fxamp.convert(model, torch.bfloat16, capture="symbolic")
    before = model(X)
    for _ in range(2):
        torch.testing.assert_close(low(X), before, rtol=0.05, atol=0.05)
    assert fxamp.report(low).captures == ("symbolic",)
    name = "LATER" if owner is HERE else "later"
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, 3.0, raising=False)
        torch.testing.assert_close(low(X), 3 * before, rtol=0.05, atol=0.05)
    torch.testing.assert_close(low(X), before, rtol=0.05, atol=0.05)


class SetsAGlobal(Net):
    def forward(self, x):
        global COUNTED
        COUNTED = 3
        return self.layer(x)


def test_a_global_that_forward_defines_is_no_lost_write():
    low = fxamp.convert(SetsAGlobal(), torch.bfloat16)
    try:
        for _ in range(2):
            low(X)
            assert globals().pop("COUNTED") == 3
    finally:
        globals().pop("COUNTED", None)


class DefaultOfItsClass(nn.Module):
    eps = 0.1

    def __init__(self):
        super().__init__()
        self.eps = 2 * self.eps

    def forward(self, y):
        return y + self.eps


class AsksEarly(nn.Module):
    def __init__(self):
        known = hasattr(self, "extra")
        super().__init__()
        self.extra = known

    def forward(self, y):
        return y + (100 if self.extra else 0)


class ReplacesADefault(Net):
    def forward(self, x):
        return DefaultOfItsClass()(self.layer(x))


class AsksBeforeInit(Net):
    def forward(self, x):
        return AsksEarly()(self.layer(x))


class SwitchesOff(Net):
    def forward(self, x):
        dropout = nn.Dropout(0.9)
        y = self.layer(x) if dropout.training else x
        return dropout.eval()(y)


class SetsPastTorch(Net):
    def forward(self, x):
        made = nn.Identity()
        object.__setattr__(made, "factor", 1.0)
        y = self.layer(x) * made.factor
        made.__dict__["factor"] = 2.0
        return y * made.factor


@pytest.mark.parametrize("kind", [ReplacesADefault, AsksBeforeInit, SwitchesOff, SetsPastTorch])
def test_what_forward_makes_may_change_its_own_attributes(kind):
    model = kind()
    low = fxamp.convert(model, torch.bfloat16, capture="symbolic")
    for _ in range(3):
        torch.testing.assert_close(low(X), model(X), rtol=0.05, atol=0.05)
    assert fxamp.report(low).captures == ("symbolic",)


TABLE = {"factor": 1.0}


class Holds(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, y):
        return y * self.table["factor"]


def make():
    return Holds(TABLE)


class MakesAHolder(Net):
    def forward(self, x):
        return make()(self.layer(x))


def test_what_an_attribute_of_what_forward_makes_holds_is_watched(monkeypatch):
    model = MakesAHolder()
    low = fxamp.convert(model, torch.bfloat16, capture="symbolic")
    before = low(X)
    monkeypatch.setitem(TABLE, "factor", 2.0)
    torch.testing.assert_close(low(X), 2 * before)


def test_a_class_attribute_of_what_forward_makes_is_watched(monkeypatch):
    model = ReplacesADefault()
    low = fxamp.convert(model, torch.bfloat16, capture="symbolic")
    low(X)
    monkeypatch.setattr(DefaultOfItsClass, "eps", 5.0)
    torch.testing.assert_close(low(X), model(X), rtol=0.05, atol=0.05)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = 1.0
        self.dropout = nn.Dropout(1.0)
        self.register_buffer("weight", torch.ones(8))

    def forward(self, y):
        return self.dropout(y) + y * self.weight * self.gain


class Copies(Net):
    def __init__(self, how, has_buffer):
        super().__init__()
        self.scaled, self.how = Scaled(), how
        if not has_buffer:
            del self.scaled.weight
            self.scaled.weight = 1.0

    def forward(self, x):
        return self.how(self.scaled)(self.layer(x))


@pytest.mark.parametrize("has_buffer", [True, False])
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_what_a_module_that_forward_copies_holds_is_watched(how, has_buffer):
    model = Copies(how, has_buffer)
    low = fxamp.convert(model, torch.bfloat16)
    for _ in range(2):
        torch.testing.assert_close(low(X), model(X), rtol=0.05, atol=0.05)
    assert len(fxamp.report(low).captures) == 1
    for each in (model, low):
        each.scaled.gain = 2.0
    torch.testing.assert_close(low(X), model(X), rtol=0.05, atol=0.05)
    model.scaled.weight *= 3  # the converted one has the same buffer
    if not has_buffer:
        low.scaled.weight *= 3
    torch.testing.assert_close(low(X), model(X), rtol=0.05, atol=0.05)
    low.eval()
    torch.testing.assert_close(low(X), model.eval()(X), rtol=0.05, atol=0.05)
    low.train()
    torch.testing.assert_close(low(X), model.train()(X), rtol=0.05, atol=0.05)
