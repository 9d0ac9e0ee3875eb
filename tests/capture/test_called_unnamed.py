"""State that is read by what nothing names (constructors, operators, imports), and names that are defined later."""

import copy
import subprocess
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


def test_a_module_that_forward_is_the_first_to_import_is_followed(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("FACTOR = 1.0")
    monkeypatch.syspath_prepend(tmp_path)

    class ImportsLate(Net):
        def forward(self, x):
            import imported_late

            return self.layer(x) * imported_late.FACTOR

    low = fxamp.convert(ImportsLate(), torch.bfloat16, (X,), capture="symbolic")
    before = low(X)
    monkeypatch.setattr(sys.modules["imported_late"], "FACTOR", 2.0)
    torch.testing.assert_close(low(X), 2 * before)
    monkeypatch.delitem(sys.modules, "imported_late")


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


class CopiesItsTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.__dict__["table"] = TABLE
        self.__dict__["table"] = {**self.table, "shift": 1.0}

    def forward(self, y):
        return y * self.table["factor"] + self.table["shift"]


class ReplacesAnObject(Net):
    def forward(self, x):
        return CopiesItsTable()(self.layer(x))


@pytest.mark.parametrize("kind", [ReplacesADefault, AsksBeforeInit, SwitchesOff, SetsPastTorch, ReplacesAnObject])
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


class Base(Net):
    gain = 1.0

    def forward(self, x):
        return self.helper(self.layer(x)) * FACTOR

    def helper(self, y):
        return y * self.gain

    @staticmethod
    def scaled(y):
        return y * FACTOR


class CallsSuper(Base):
    def forward(self, x):
        return super().forward(x)


class NamesItsBase(Base):
    def forward(self, x):
        return Base.forward(self, x)


class CallsAStaticMethod(Net):
    def forward(self, x):
        return Base.scaled(self.layer(x))


@pytest.mark.parametrize("kind", [CallsSuper, NamesItsBase, CallsAStaticMethod])
def test_methods_that_are_called_by_their_class_are_followed(kind, monkeypatch):
    model = kind()
    low = fxamp.convert(model, torch.bfloat16, capture="symbolic")
    before = low(X)
    monkeypatch.setattr(HERE, "FACTOR", 2.0)
    torch.testing.assert_close(low(X), 2 * before)
    monkeypatch.setattr(Base, "forward", lambda self, x: 3 * self.layer(x))
    monkeypatch.setattr(Base, "scaled", staticmethod(lambda y: 3 * y))
    torch.testing.assert_close(low(X), 3 * before, rtol=0.05, atol=0.05)


COUNTED_CALLS = [0]


class Counts(Net):
    def forward(self, x):
        COUNTED_CALLS[0] += 1
        return self.layer(x)


class CountsAbove(Counts):
    def forward(self, x):
        return super().forward(x)


def test_what_a_forward_above_writes_is_not_lost():
    low, before = fxamp.convert(CountsAbove(), torch.bfloat16), COUNTED_CALLS[0]
    for _ in range(3):
        low(X)
    assert COUNTED_CALLS[0] == before + 3


class Derived(Base):
    pass


@pytest.mark.parametrize(
    ("name", "value", "factor"),
    [
        ("gain", 2.0, 2),
        ("helper", lambda self, y: 3 * y, 3),
        ("forward", lambda self, x: 4 * self.layer(x), 4),
    ],
)
def test_what_a_class_is_given_in_the_place_of_what_it_inherited_is_seen(name, value, factor, monkeypatch):
    model = nn.Sequential(Derived())
    low = fxamp.convert(model, torch.bfloat16, capture="symbolic")
    before = low(X)
    monkeypatch.setattr(Derived, name, value, raising=False)
    torch.testing.assert_close(low(X), factor * before, rtol=0.05, atol=0.05)


def replacement(self, x):
    return 5 * self.layer(x)


def test_a_forward_whose_code_is_replaced_in_place_is_captured_again(monkeypatch):
    """As IPython's autoreload does with an edited file."""
    low = fxamp.convert(ConstructsAModule(), torch.bfloat16, capture="symbolic")
    before = low(X)
    monkeypatch.setattr(ConstructsAModule.forward, "__code__", replacement.__code__)
    torch.testing.assert_close(low(X), 5 * before, rtol=0.05, atol=0.05)


class State:
    def __init__(self):
        self.factor, self.step = 2.0, 0

    def __lt__(self, other):
        return self.step < other.step

    def __iadd__(self, count):
        self.step += count
        return self


class ReadsState(Net):
    def __init__(self):
        super().__init__()
        self.state = State()

    def forward(self, x):
        return self.layer(x) * self.state.factor


def test_what_only_operators_that_compare_and_write_name_may_change():
    low = fxamp.convert(ReadsState(), torch.bfloat16, capture="symbolic")
    for _ in range(3):
        low(X)
        low.state.step += 1
    assert fxamp.report(low).captures == ("symbolic",)


def stack():
    try:
        return LOCAL.stack
    except AttributeError:
        LOCAL.stack = []
        return LOCAL.stack


class FillsAThread(Net):
    def forward(self, x):
        stack().append(1)
        try:
            return self.layer(x)
        finally:
            stack().pop()


def test_a_thread_may_get_its_own_when_forward_first_asks():
    low = fxamp.convert(FillsAThread(), torch.bfloat16, capture="symbolic")
    for _ in range(2):
        low(X)
    assert fxamp.report(low).captures == ("symbolic",)


class Single(nn.Module):
    """There is one of it, whose `__init__` runs at every `Single()`."""

    one = None

    def __new__(cls):
        if cls.one is None:
            cls.one = super().__new__(cls)
        return cls.one

    def __init__(self):
        had = self.__dict__.get("factor", 1.0)
        super().__init__()
        self.factor = had

    def forward(self, y):
        return y * self.factor


class AsksTheSingle(Net):
    def forward(self, x):
        return Single()(self.layer(x))


def test_a_module_that_was_made_before_and_is_initialised_again_is_watched():
    single = Single()
    model = AsksTheSingle()
    low = fxamp.convert(model, torch.bfloat16)
    before = low(X)
    object.__setattr__(single, "factor", 3.0)
    torch.testing.assert_close(low(X), 3 * before, rtol=0.05, atol=0.05)


def test_an_import_behind_many_names_is_followed():
    """Python's instructions have one byte for the number of a name, and a prefix beyond."""
    names = "\n".join(f"    known.n{number} = {number}" for number in range(300))
    text = f"def forward(self, x):\n    import types\n    known = types.SimpleNamespace()\n{names}\n"
    text += "    from settings_elsewhere import FACTOR\n    return self.layer(x) * FACTOR\n"
    space = {"__name__": "__main__"}
    exec(text, space)
    low = fxamp.convert(type("Many", (Net,), {"forward": space["forward"]})(), torch.bfloat16, capture="symbolic")
    before = low(X)
    ELSEWHERE.FACTOR = 2.0
    torch.testing.assert_close(low(X), 2 * before)


SESSION = """
import torch, fxamp
from torch import nn

FACTOR = 1.0

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x) * FACTOR

model, x = Model(), torch.ones(2, 8)
low = fxamp.convert(model, torch.bfloat16)
before = low(x)
FACTOR = 3.0
torch.testing.assert_close(low(x), 3 * before, rtol=0.05, atol=0.05)
"""


def test_what_is_typed_in_a_session_is_followed():
    subprocess.run([sys.executable, "-c", SESSION], check=True)


class Config:
    def __init__(self):
        self.alpha, self.beta = 1.0, 1.0


class NamesItsKeys(Net):
    def __init__(self):
        super().__init__()
        self.config, self.key = Config(), "beta"

    def forward(self, x):
        y = self.layer(x)
        for name in ("alpha", "gamma"):
            y = y * getattr(self.config, name, 1.0)
        return y * getattr(self.config, self.key)


@pytest.mark.parametrize("name", ["alpha", "beta", "gamma"])
def test_attributes_whose_names_stand_in_a_tuple_or_an_attribute_are_watched(name):
    low = fxamp.convert(NamesItsKeys(), torch.bfloat16, capture="symbolic")
    before = low(X)
    setattr(low.config, name, 2.0)
    torch.testing.assert_close(low(X), 2 * before)
