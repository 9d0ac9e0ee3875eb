"""What forward reads by methods that nobody names, by names made at run time, and in long containers: each call answers
as Python would, and one graph is enough while nothing changes."""

import ctypes
import dataclasses
import enum
import functools
import gc
import importlib
import itertools
import multiprocessing
import operator
import sys
import threading
import types
import typing
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import fxamp
from fxamp.capture import asked, elements, objects, unnamed
from fxamp.model.engine import engine_of

X = torch.linspace(-2, 2, 32).reshape(4, 8)
TABLE = {"gain": 1.0}
ELSEWHERE = types.ModuleType("gains_elsewhere")
sys.modules["gains_elsewhere"] = ELSEWHERE


def gain():
    return TABLE["gain"]


class Made:
    def __init__(self):
        self.gain = TABLE["gain"]


class Inherits(Made):
    def __init__(self):
        super().__init__()


class MadeByNew:
    def __new__(cls):
        made = object.__new__(cls)
        made.gain = TABLE["gain"]
        return made


@dataclasses.dataclass
class MadeAfter:
    gain: float = 0.0

    def __post_init__(self):
        self.gain = TABLE["gain"]


@dataclasses.dataclass
class MadeByFactory:
    gain: float = dataclasses.field(default_factory=lambda: TABLE["gain"])


class ByClass:
    gain = 1.0

    def __init__(self, value):
        self.value = value

    @classmethod
    def make(cls):
        return cls(cls.gain)


class Writes:
    """What is written into it, by whichever way, it multiplies."""

    def __init__(self):
        object.__setattr__(self, "held", {})

    def __setitem__(self, key, value):
        self.held[key] = value * TABLE["gain"]

    def __setattr__(self, name, value):
        self.held[name] = value * TABLE["gain"]

    def __iadd__(self, value):
        self.held["sum"] = value + TABLE["gain"]
        return self


class Setter:
    @property
    def value(self):
        return self._value

    @value.setter
    def value(self, value):
        self._value = value * TABLE["gain"]


class Descriptor:
    def __get__(self, owner, kind=None):
        return owner.__dict__["held"]

    def __set__(self, owner, value):
        owner.__dict__["held"] = value * TABLE["gain"]


class Described:
    value = Descriptor()


class Compares:
    __hash__ = None

    def __eq__(self, other):
        return TABLE["gain"] > 2

    def __lt__(self, other):
        return TABLE["gain"] > 2


class Missing(dict):
    def __missing__(self, key):
        return TABLE["gain"]


class Meta(type):
    def __call__(cls):
        made = super().__call__()
        made.gain = TABLE["gain"]
        return made

    def __instancecheck__(cls, value):
        return TABLE["gain"] > 2

    def __getattr__(cls, name):
        return TABLE[name]

    @property
    def held(cls):
        return TABLE["gain"]


class OfMeta(metaclass=Meta):
    def __class_getitem__(cls, key):
        return TABLE[key]


class Given:
    given = 1.0


@dataclasses.dataclass(order=True, unsafe_hash=True)
class Settings(Given):
    scale: float = 1.0
    other: int = 2


class Kind(enum.Enum):
    GAIN = 1

    def value_of(self):
        return TABLE[self.name.lower()]


class Text(str):
    def value_of(self):
        return TABLE[self]


class Later:
    """What it calls is found when a method runs that nobody has named."""

    def __call__(self, module):
        self["read"] = module
        return self.found

    def __setitem__(self, name, module):
        self.found = operator.methodcaller("of", module)(Reader)


class Reader:
    @staticmethod
    def of(module):
        return module.last


class Pair(typing.NamedTuple):
    factor: float = 1.0

    def value_of(self):
        return self.factor * TABLE["gain"]


def written(kind, write, read):
    def value(model):
        made = kind()
        write(made)
        return read(made)

    return value


def adds(made):
    made += 1.0


def sets(value):
    return lambda model: TABLE.update(gain=value)


def on(name, value):
    return lambda model: setattr(model.settings, name, value)


def drops(owner, name):
    return lambda model: name in vars(owner) and delattr(owner, name)


def scaled(scale=1.0, **others):
    return scale


def count(model):
    return next(model.held[0])


GAIN = [sets(1.0), sets(3.0), sets(1.0)]
SCALE = [on("scale", 1.0), on("scale", 3.0), on("scale", 1.0)]
REFERENCE = Settings()
BY_SETTINGS = {Settings(1.0): 1.0, Settings(3.0): 3.0}
LONG, HUGE = 5000, 100_000
VALUE = multiprocessing.Value("d", 1.0)
NUMBER = ctypes.c_double(1.0)


def holds(make, put):
    """A model that holds something, of which a part is exchanged in place."""
    return [lambda m: setattr(m, "held", make()), lambda m: put(m.held, 3.0), lambda m: put(m.held, 1.0)]


def at(place):
    return lambda held, value: held.__setitem__(place, value)


# name -> what forward reads, and what is done before each call.
READ = {
    "a constructor": (lambda m: Made().gain, GAIN),
    "one above it": (lambda m: Inherits().gain, GAIN),
    "__new__": (lambda m: MadeByNew().gain, GAIN),
    "__post_init__": (lambda m: MadeAfter().gain, GAIN),
    "a factory of defaults": (lambda m: MadeByFactory().gain, GAIN),
    "a class method that makes": (
        lambda m: ByClass.make().value,
        [lambda m, v=v: setattr(ByClass, "gain", v) for v in (1.0, 3.0)],
    ),
    "a class in a dictionary": (lambda m: {"made": Made}["made"]().gain, GAIN),
    "a class that is an attribute": (lambda m: m.held().gain, [lambda m: setattr(m, "held", Made), *GAIN]),
    "a partial of a class": (lambda m: functools.partial(Made)().gain, GAIN),
    "a constructor that is replaced": (
        lambda m: ByClass(1.0).value,
        [
            lambda m: None,
            lambda m: setattr(ByClass, "__init__", lambda self, value: setattr(self, "value", 3 * value)),
        ],
    ),
    "__setitem__": (written(Writes, lambda w: w.__setitem__("a", 1.0), lambda w: w.held["a"]), GAIN),
    "__setattr__": (written(Writes, lambda w: setattr(w, "a", 1.0), lambda w: w.held["a"]), GAIN),
    "+=": (written(Writes, adds, lambda w: w.held["sum"]), GAIN),
    "a setter": (written(Setter, lambda w: setattr(w, "value", 1.0), lambda w: w.value), GAIN),
    "__set__": (written(Described, lambda w: setattr(w, "value", 1.0), lambda w: w.value), GAIN),
    "==": (lambda m: 2.0 if m.held == 1 else 1.0, [lambda m: setattr(m, "held", Compares()), *GAIN]),
    "<": (lambda m: 2.0 if m.held < 1 else 1.0, [lambda m: setattr(m, "held", Compares()), *GAIN]),
    "__missing__": (lambda m: m.held["a"], [lambda m: setattr(m, "held", Missing()), *GAIN]),
    "a metaclass's __call__": (lambda m: OfMeta().gain, GAIN),
    "its __instancecheck__": (lambda m: 2.0 if isinstance(5, OfMeta) else 1.0, GAIN),
    "its __getattr__": (lambda m: OfMeta.gain, GAIN),
    "its property": (lambda m: OfMeta.held, GAIN),
    "__class_getitem__": (lambda m: OfMeta["gain"], GAIN),
    "== of a dataclass": (lambda m: 2.0 if m.settings == REFERENCE else 1.0, SCALE),
    "< of a dataclass": (lambda m: 2.0 if m.settings > REFERENCE else 1.0, SCALE),
    "hash of a dataclass": (lambda m: BY_SETTINGS[m.settings], SCALE),
    "a method of an enum's": (lambda m: Kind.GAIN.value_of(), GAIN),
    "one of a text's": (lambda m: m.held.value_of(), [lambda m: setattr(m, "held", Text("gain")), *GAIN]),
    "one of a named tuple's": (lambda m: m.held.value_of(), [lambda m: setattr(m, "held", Pair()), *GAIN]),
    "getattr of a name that is made": (lambda m: getattr(m.settings, "".join(("sc", "ale"))), SCALE),
    "of one that ends so": (
        lambda m: getattr(m.settings, m.prefix + "_scale"),
        [on("a_scale", 1.0), on("a_scale", 3.0)],
    ),
    "with a default": (
        lambda m: getattr(m.settings, m.prefix + "_gain", 1.0),
        [lambda m: None, on("a_gain", 3.0), lambda m: delattr(m.settings, "a_gain")],
    ),
    "of a class that gets it later": (
        lambda m: getattr(m.settings, m.prefix + "_late", 1.0),
        [lambda m: None, lambda m: setattr(Settings, "a_late", 3.0), drops(Settings, "a_late")],
    ),
    "of a class that takes it from another": (
        lambda m: m.settings.given,
        [lambda m: None, lambda m: setattr(Settings, "given", 3.0), drops(Settings, "given")],
    ),
    "of a class itself": (
        lambda m: getattr(Settings, "late", 1.0),
        [lambda m: None, lambda m: setattr(Settings, "late", 3.0), drops(Settings, "late")],
    ),
    "of a function": (
        lambda m: getattr(gain, m.prefix + "_factor", 1.0),
        [lambda m: None, lambda m: setattr(gain, "a_factor", 3.0), drops(gain, "a_factor")],
    ),
    "of a Python module": (
        lambda m: getattr(ELSEWHERE, m.prefix + "_gain"),
        [lambda m, v=v: setattr(ELSEWHERE, "a_gain", v) for v in (1.0, 3.0)],
    ),
    "of a Python module that gets it later": (
        lambda m: getattr(ELSEWHERE, m.prefix + "_late", 1.0),
        [lambda m: None, lambda m: setattr(ELSEWHERE, "a_late", 3.0), drops(ELSEWHERE, "a_late")],
    ),
    "hasattr": (
        lambda m: 2.0 if hasattr(m.settings, m.prefix + "_flag") else 1.0,
        [lambda m: None, on("a_flag", True), lambda m: delattr(m.settings, "a_flag")],
    ),
    "vars()": (lambda m: scaled(**vars(m.settings)), SCALE),
    "a new name in vars()": (
        lambda m: sum(vars(m.settings).values()),
        [lambda m: None, on("third", 3.0), lambda m: delattr(m.settings, "third")],
    ),
    "vars() of the function itself": (lambda m: (lambda scale: scaled(**vars()))(m.settings.scale), SCALE),
    "__dict__": (lambda m: scaled(**m.settings.__dict__), SCALE),
    "asdict": (lambda m: scaled(**dataclasses.asdict(m.settings)), SCALE),
    "astuple": (lambda m: dataclasses.astuple(m.settings)[0], SCALE),
    "replace": (lambda m: dataclasses.replace(m.settings, other=5).scale, SCALE),
    "import_module": (
        lambda m: importlib.import_module("gains_elsewhere").loaded,
        [lambda m, v=v: setattr(ELSEWHERE, "loaded", v) for v in (1.0, 3.0)],
    ),
    "sys.modules": (
        lambda m: sys.modules["gains_elsewhere"].listed,
        [lambda m, v=v: setattr(ELSEWHERE, "listed", v) for v in (1.0, 3.0)],
    ),
    "a Python module that is an attribute": (
        lambda m: m.held.kept,
        [
            lambda m: (setattr(m, "held", ELSEWHERE), setattr(ELSEWHERE, "kept", 1.0)),
            *(lambda m, v=v: setattr(ELSEWHERE, "kept", v) for v in (3.0, 1.0)),
        ],
    ),
    "a long list": (lambda m: m.held[7], holds(lambda: [1.0] * LONG, at(7))),
    "a long dictionary": (lambda m: m.held[7], holds(lambda: dict.fromkeys(range(LONG), 1.0), at(7))),
    "a long list in an object": (
        lambda m: m.settings.held[7],
        [on("held", [1.0] * LONG), lambda m: m.settings.held.__setitem__(7, 3.0)],
    ),
    "a long set": (
        lambda m: 2.0 if 7 in m.held else 1.0,
        [lambda m: setattr(m, "held", set(range(LONG))), lambda m: m.held.discard(7), lambda m: m.held.add(7)],
    ),
    "a long tuple": (lambda m: m.held[7], [lambda m, v=v: setattr(m, "held", (v,) * LONG) for v in (1.0, 3.0)]),
    "a long list of lists": (
        lambda m: m.held[7][0],
        [
            lambda m: setattr(m, "held", [[1.0] for _ in range(LONG)]),
            lambda m: m.held.__setitem__(7, [3.0]),
        ],
    ),
    "the length of a longer one": (
        lambda m: len(m.held) / HUGE,
        [lambda m: setattr(m, "held", [1.0] * HUGE), lambda m: m.held.extend([1.0] * HUGE)],
    ),
    "a longer one in its place": (
        lambda m: m.held[7],
        [lambda m, v=v: setattr(m, "held", [v] * HUGE) for v in (1.0, 3.0)],
    ),
    "what a function that comes later reads of a Python module": (
        lambda m: m.held(m.module),
        [
            lambda m: (setattr(m, "module", ELSEWHERE), setattr(m, "held", Later()), setattr(ELSEWHERE, "last", 1.0)),
            *(lambda m, v=v: setattr(ELSEWHERE, "last", v) for v in (3.0, 1.0)),
        ],
    ),
    "an array of numpy": (lambda m: float(m.held.mean()), holds(lambda: np.ones(100_000), at(slice(None)))),
    "a number of a process": (lambda m: VALUE.value, [lambda m, v=v: setattr(VALUE, "value", v) for v in (1.0, 3.0)]),
    "one of ctypes": (lambda m: NUMBER.value, [lambda m, v=v: setattr(NUMBER, "value", v) for v in (1.0, 3.0)]),
}

# What no graph can hold.
DRAWN = {
    "an iterator in a list": lambda: [iter([1.0, 2.0, 3.0, 4.0, 5.0])],
    "a generator": lambda: [(float(i) for i in range(1, 9))],
    "an endless one": lambda: [itertools.cycle([1.0, 2.0])],
    "one in a dictionary": lambda: {0: iter([1.0, 2.0, 3.0, 4.0, 5.0])},
}


class Net(nn.Module):
    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.read = nn.Linear(8, 8), read
        self.settings, self.prefix, self.held = Settings(), "a", None

    def forward(self, x):
        return self.layer(x) * self.read(self)


@pytest.fixture(autouse=True)
def _as_it_was():
    init = ByClass.__init__
    TABLE["gain"] = VALUE.value = NUMBER.value = ByClass.gain = 1.0
    yield
    ByClass.__init__ = init


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", READ)
def test_each_call_reads_what_python_would(name, level):
    read, changes = READ[name]
    plain, converted = Net(read), fxamp.convert(Net(read), opt_level=level)
    for change in changes:
        change(plain)
        expected = plain(X)
        change(converted)
        for _ in range(2):
            torch.testing.assert_close(converted(X), expected, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("name", READ)
def test_one_graph_is_enough_while_nothing_changes(name):
    read, (first, *_) = READ[name]
    model = Net(read)
    first(model)
    converted = fxamp.convert(model, capture="symbolic")
    for _ in range(3):
        converted(X)
    assert len(engine_of(converted).own_variants()) == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", DRAWN)
def test_an_element_is_taken_at_each_call(name, level):
    plain, converted = Net(count), fxamp.convert(Net(count), opt_level=level)
    for model in (plain, converted):
        model.held = DRAWN[name]()
    for _ in range(3):
        torch.testing.assert_close(converted(X), plain(X), atol=0.05, rtol=0.02)


def test_an_iterator_that_an_object_holds():
    plain, converted = (make(Net(lambda m: next(m.settings.held))) for make in (lambda m: m, fxamp.convert))
    for model in (plain, converted):
        model.settings.held = iter([1.0, 2.0, 3.0, 4.0])
    for _ in range(3):
        torch.testing.assert_close(converted(X), plain(X), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("name", READ)
def test_files_and_classes_are_left_as_they_were(name):
    read, (first, *_) = READ[name]
    kinds = [value for value in globals().values() if isinstance(value, type)]
    converted = fxamp.convert(Net(read))
    first(converted)
    before = {kind: dict(vars(kind)) for kind in kinds}
    files = dict(globals()), dict(vars(dataclasses)), importlib.import_module
    converted(X)
    assert {kind: dict(vars(kind)) for kind in kinds} == before
    assert (dict(globals()), dict(vars(dataclasses)), importlib.import_module) == files


def test_they_are_after_a_forward_that_raises():
    def fails(model):
        Made()
        getattr(model.settings, model.prefix + "_scale")

    converted, before = fxamp.convert(Net(fails)), dict(vars(Made))
    with pytest.raises(AttributeError, match="a_scale"):
        converted(X)
    assert dict(vars(Made)) == before and "getattr" not in globals()


class Sets(Net):
    """Sets an attribute to what is there already, which the capture looks at when forward is over."""

    def forward(self, x):
        self.held = OfFile
        return self.layer(x) * getattr(self.settings, self.prefix + "_scale", 1.0)


class OfFile:
    def __init__(self):
        self.gain = getattr(TABLE, "gain", 1.0)


def test_they_are_after_a_forward_that_sets_what_is_there():
    model = Sets(None)
    model.held = OfFile
    converted, before = fxamp.convert(model), dict(vars(OfFile))
    converted(X)
    assert dict(vars(OfFile)) == before and "getattr" not in globals()


def test_a_constructor_that_counts_is_no_constant():
    class Counts:
        made = 0

        def __init__(self):
            Counts.made += 1
            self.value = float(Counts.made)

    converted = fxamp.convert(Net(lambda m: Counts().value))
    plain = Net(None)
    for expected in (1.0, 2.0, 3.0):
        torch.testing.assert_close(converted(X), plain.layer(X) * expected, atol=0.05, rtol=0.02)


def test_what_is_written_into_a_long_list_is_written_at_each_call():
    class Keeps(Net):
        def forward(self, x):
            y = self.layer(x)
            self.held[5] = y.mean().detach()
            self.held.append(0.0)
            return y

    converted = fxamp.convert(Keeps(None))
    converted.held = [0.0] * LONG
    for call in range(1, 4):
        x = X * call
        result = converted(x)
        assert len(converted.held) == LONG + call
        torch.testing.assert_close(converted.held[5].float(), result.mean(), atol=0.02, rtol=0.02)


def test_what_a_traced_value_and_the_model_answer_is_asked_by_the_model():
    class Asks(Net):
        def forward(self, x):
            is_low = getattr(x, "dtype") is torch.float16  # noqa: B009
            has_bias = getattr(self.layer, "bias", None) is not None
            is_quick = getattr(torch.backends.cudnn, "benchmark")  # noqa: B009
            return self.layer(x) * (1 + 2 * is_low + 4 * has_bias + 8 * is_quick)

    plain, converted = Asks(None), fxamp.convert(Asks(None))
    before = torch.backends.cudnn.benchmark
    try:
        for quick in (False, True):
            torch.backends.cudnn.benchmark = quick
            torch.testing.assert_close(converted(X), plain(X), atol=0.5, rtol=0.02)
            assert len(engine_of(converted).own_variants()) == 1 + quick
    finally:
        torch.backends.cudnn.benchmark = before


def test_other_threads_are_not_listened_to():
    names, here = [], threading.get_ident()
    listening = asked.Asked(lambda value, name: names.append(name), lambda: threading.get_ident() != here)
    space = {}
    listening.listen(space)
    space["getattr"](Settings(), "scale")
    run = []
    watching = unnamed.Unnamed(lambda kind, name, *_: run.append((kind, name)))
    watching.watch(Made, is_made=True)
    before = vars(Made)["__init__"]
    thread = threading.Thread(target=lambda: (space["getattr"](Settings(), "other"), Made()))
    thread.start()
    thread.join()
    assert names == ["scale"] and run == [] and vars(Made)["__init__"] is before
    Made()
    assert run == [(Made, "__init__")] and vars(Made)["__init__"] is not before
    listening.restore()
    watching.restore()
    assert space == {}


def test_a_model_is_let_go():
    converted = fxamp.convert(Net(lambda m: getattr(m.settings, "".join(("sc", "ale")))))
    converted(X)
    model = weakref.ref(converted)
    del converted
    gc.collect()
    assert model() is None


def test_a_long_container_is_compared_and_not_looked_into():
    held = [[1.0] for _ in range(elements.MOST + 1)]
    scope = objects.Scope(frozenset(), {})
    before = objects.frozen(held, scope)
    held[0][0] = 2.0
    assert objects.frozen(held, scope) == before
    held[0] = [1.0]
    assert objects.frozen(held, scope) != before
