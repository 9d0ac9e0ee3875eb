"""What forward reads that is held neither by its model nor by its globals: each call answers as Python would."""

import array
import collections
import configparser
import contextvars
import functools
import gc
import io
import itertools
import operator
import os
import queue
import threading
import types
import weakref
from concurrent import futures
from linecache import cache as SOURCE_LINES
from sys import modules as LOADED

import numpy as np
import pytest
import torch
from torch import are_deterministic_algorithms_enabled as is_deterministic
from torch import distributed, nn
from torch.distributed import get_world_size, is_initialized
from torch.distributions import Independent, Normal
from torch.utils.data import DistributedSampler

import fxamp
from fxamp.capture.effects import Effects
from fxamp.errors import CaptureError
from fxamp.model.engine import engine_of

X = torch.linspace(-2, 2, 32).reshape(4, 8)
MODE = contextvars.ContextVar("mode", default=1.0)
UNSET = contextvars.ContextVar("unset")
BYTES, NUMBERS, ARRAY = bytearray(b"\x01\x02"), array.array("d", [1.0, 2.0]), np.ones(3)
EVENT = threading.Event()
GLOBAL = 1.0
COUNT = itertools.count(1)


class Box:
    def __init__(self, value):
        self.value = value


class Hidden:
    """A descriptor that keeps its value where the functions of the model do not name it."""

    def __get__(self, owner, kind=None):
        return owner.__dict__.get("_kept", 1.0)


class Holder:
    value = Hidden()


class Net(nn.Module):
    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.read, self.box, self.held = read, Box(1.0), None

    def forward(self, x):
        return self.last(self.first(x) * self.read(self))


def helper():
    helper.calls = getattr(helper, "calls", 0) + 1
    return helper.calls


def gained():
    return getattr(gained, "gain", 1.0)


def coded():
    return 1.0


def defaulted(gain=1.0):
    return gain


CODES = [(lambda: 1.0).__code__, (lambda: 3.0).__code__]


def env(name, value):
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def sets(name, value):
    return lambda model: setattr(model, name, value)


def sets_schedule(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.held = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def nested(value):
    return Box(Box(Box([1.0, {"gain": value}])))


def deep(model):
    return model.held.value.value.value[1]["gain"]


# name -> what forward reads, and what is done to it before each call.
READ = {
    "an environment variable": (
        lambda m: float(os.environ["FXT"]),
        [lambda m, v=v: env("FXT", v) for v in ("1", "3", "1")],
    ),
    "getenv": (
        lambda m: float(os.getenv("FXT", "2")),
        [lambda m, v=v: env("FXT", v) for v in (None, "3", None)],
    ),
    "whether there is a variable": (
        lambda m: 3.0 if "FXT" in os.environ else 1.0,
        [lambda m, v=v: env("FXT", v) for v in (None, "", None)],
    ),
    "a context variable": (lambda m: MODE.get(), [lambda m, v=v: MODE.set(v) for v in (1.0, 3.0, 1.0)]),
    "one with a default at the call": (lambda m: UNSET.get(2.0), [lambda m: None, lambda m: UNSET.set(3.0)]),
    "one that an object holds": (
        lambda m: m.held.value.get(),
        [lambda m: setattr(m, "held", Box(MODE)), *(lambda m, v=v: MODE.set(v) for v in (3.0, 4.0))],
    ),
    "what a context variable holds": (
        lambda m: MODE.get()["gain"],
        [lambda m: MODE.set({"gain": 1.0}), lambda m: MODE.get().update(gain=3.0)],
    ),
    "a weak reference": (
        lambda m: m.held().value,
        [
            lambda m: setattr(m, "held", weakref.ref(m.box)),
            *(lambda m, v=v: setattr(m.box, "value", v) for v in (3, 4)),
        ],
    ),
    "a weak proxy": (
        lambda m: m.held.value,
        [
            lambda m: setattr(m, "held", weakref.proxy(m.box)),
            *(lambda m, v=v: setattr(m.box, "value", v) for v in (3, 4)),
        ],
    ),
    "a dictionary of weak references": (
        lambda m: m.held["box"].value,
        [lambda m: setattr(m, "held", weakref.WeakValueDictionary(box=m.box)), lambda m: setattr(m.box, "value", 3.0)],
    ),
    "an attribute of a function": (
        lambda m: gained(),
        [lambda m, v=v: setattr(gained, "gain", v) for v in (1.0, 3.0, 4.0)],
    ),
    "a count in one": (lambda m: helper(), [lambda m: vars(helper).clear(), lambda m: None, lambda m: None]),
    "what lies deep": (
        deep,
        [
            lambda m: setattr(m, "held", nested(1.0)),
            lambda m: m.held.value.value.value[1].update(gain=3.0),
            lambda m: setattr(m, "held", nested(1.0)),
        ],
    ),
    "bytes": (lambda m: BYTES[0], [lambda m, v=v: operator.setitem(BYTES, 0, v) for v in (1, 3, 1)]),
    "an array": (lambda m: NUMBERS[1], [lambda m, v=v: operator.setitem(NUMBERS, 1, v) for v in (1.0, 3.0, 1.0)]),
    "an array of numpy": (lambda m: float(ARRAY[0]), [lambda m, v=v: ARRAY.fill(v) for v in (1.0, 3.0, 1.0)]),
    "one that is an attribute": (
        lambda m: float(m.held[0]),
        [lambda m: setattr(m, "held", np.ones(3)), lambda m: m.held.fill(3.0), lambda m: m.held.fill(4.0)],
    ),
    "an event": (
        lambda m: 3.0 if EVENT.is_set() else 1.0,
        [lambda m: EVENT.clear(), lambda m: EVENT.set(), lambda m: EVENT.clear()],
    ),
    "vars(self)": (lambda m: vars(m)["gain"], [sets("gain", 1.0), sets("gain", 3.0)]),
    "a number that is read at each call, too": (
        lambda m: m.gain + vars(m)["gain"],
        [sets("gain", 1.0), sets("gain", 3.0), sets("gain", 2.0)],
    ),
    "self.__dict__": (
        lambda m: m.__dict__.get("gain", 1.0),
        [lambda m: None, sets("gain", 3.0), lambda m: delattr(m, "gain")],
    ),
    "the epoch of a schedule": (
        lambda m: 1.0 + m.held.last_epoch,
        [sets_schedule, *(lambda m: m.held.step() for _ in range(2))],
    ),
    "what its method gives": (
        lambda m: m.held.get_last_lr()[0],
        [sets_schedule, *(lambda m: m.held.step() for _ in range(2))],
    ),
    "a learning rate": (
        lambda m: m.held["of"].optimizer.param_groups[0]["lr"],
        [
            lambda m: (sets_schedule(m), setattr(m, "held", {"of": m.held})),
            *(lambda m: m.held["of"].step() for _ in range(2)),
        ],
    ),
    "a distribution": (
        lambda m: m.held.mean,
        [
            lambda m: setattr(m, "held", Independent(Normal(torch.ones(8), torch.ones(8)), 1)),
            *(lambda m, v=v: setattr(m.held.base_dist, "loc", torch.full((8,), v)) for v in (3.0, 4.0)),
        ],
    ),
    "a sampler": (
        lambda m: 1.0 + m.held.epoch,
        [
            lambda m: setattr(m, "held", DistributedSampler(range(8), 2, 0)),
            *(lambda m, v=v: m.held.set_epoch(v) for v in (1, 3)),
        ],
    ),
    "an attribute that is put on one": (
        lambda m: getattr(m.held, "gain", 1.0),
        [
            lambda m: setattr(m, "held", torch.optim.SGD(m.parameters())),
            lambda m: None,
            *(lambda m, v=v: setattr(m.held, "gain", v) for v in (3.0, 4.0)),
        ],
    ),
    "one that has more than attributes": (
        lambda m: float(m.held.getvalue()),
        [lambda m, v=v: setattr(m, "held", io.StringIO(v)) for v in ("1", "3", "4")],
    ),
    "a method that is named later": (
        lambda m: (lambda held: m.box.value(held))(m.held),
        [
            lambda m: (sets_schedule(m), setattr(m, "box", Box(lambda schedule: schedule.get_last_lr()[0]))),
            *(lambda m: m.held.step() for _ in range(2)),
        ],
    ),
    "a configuration": (
        lambda m: m.held.getfloat("model", "gain"),
        [
            lambda m: (setattr(m, "held", configparser.ConfigParser()), m.held.read_dict({"model": {"gain": "1"}})),
            *(lambda m, v=v: m.held.set("model", "gain", v) for v in ("3", "4")),
        ],
    ),
    "a descriptor": (
        lambda m: m.held.value,
        [lambda m: setattr(m, "held", Holder()), *(lambda m, v=v: setattr(m.held, "_kept", v) for v in (3.0, 4.0))],
    ),
    "attrgetter": (operator.attrgetter("box.value"), [lambda m, v=v: setattr(m.box, "value", v) for v in (1.0, 3.0)]),
    "globals()": (
        lambda m: globals()["GLOBAL"],
        [lambda m, v=v: operator.setitem(globals(), "GLOBAL", v) for v in (1.0, 3.0)],
    ),
    "eval": (lambda m: eval("GLOBAL"), [lambda m, v=v: operator.setitem(globals(), "GLOBAL", v) for v in (1.0, 3.0)]),
    "torch's default dtype": (
        lambda m: 2.0 if torch.get_default_dtype() is torch.float64 else 1.0,
        [lambda m, v=v: torch.set_default_dtype(v) for v in (torch.float32, torch.float64, torch.float32)],
    ),
    "a setting of torch": (
        lambda m: 2.0 if torch.are_deterministic_algorithms_enabled() else 1.0,
        [lambda m, v=v: torch.use_deterministic_algorithms(v) for v in (False, True, False)],
    ),
    "the precision of products": (
        lambda m: 2.0 if torch.get_float32_matmul_precision() == "high" else 1.0,
        [lambda m, v=v: torch.set_float32_matmul_precision(v) for v in ("highest", "high", "highest")],
    ),
    "a flag of a backend": (
        lambda m: 2.0 if torch.backends.cudnn.benchmark else 1.0,
        [lambda m, v=v: setattr(torch.backends.cudnn, "benchmark", v) for v in (False, True, False)],
    ),
    "a kind of attention": (
        lambda m: 2.0 if torch.backends.cuda.flash_sdp_enabled() else 1.0,
        [lambda m, v=v: torch.backends.cuda.enable_flash_sdp(v) for v in (True, False, True)],
    ),
    "an iterator": (
        lambda m: next(m.held),
        [lambda m: setattr(m, "held", iter([1.0, 3.0, 2.0, 4.0])), lambda m: None, lambda m: None],
    ),
    "a generator": (
        lambda m: next(m.held),
        [lambda m: setattr(m, "held", (float(i) for i in range(1, 9))), lambda m: None],
    ),
    "one in a loop": (
        lambda m: next(each for each in m.held),
        [lambda m: setattr(m, "held", itertools.cycle([1.0, 3.0])), lambda m: None, lambda m: None],
    ),
    "a global iterator": (
        lambda m: float(next(COUNT)),
        [lambda m: operator.setitem(globals(), "COUNT", itertools.count(1)), lambda m: None, lambda m: None],
    ),
    "the last few": (
        lambda m: (m.held.append(len(m.held) + 1.0), sum(m.held))[1],
        [lambda m: setattr(m, "held", collections.deque(maxlen=2)), lambda m: None, lambda m: None],
    ),
    "whether weights are trained": (
        lambda m: 1.0 + sum(p.requires_grad for p in m.parameters()),
        [lambda m, v=v: m.first.weight.requires_grad_(v) for v in (True, False, True)],
    ),
    "whether one is": (
        lambda m: 2.0 if m.first.weight.requires_grad else 1.0,
        [lambda m, v=v: m.first.weight.requires_grad_(v) for v in (True, False, True)],
    ),
    "a setting by a name of its own": (
        lambda m: 2.0 if is_deterministic() else 1.0,
        [lambda m, v=v: torch.use_deterministic_algorithms(v) for v in (False, True, False)],
    ),
    "a function whose code is edited": (
        lambda m: coded(),
        [lambda m, v=v: setattr(coded, "__code__", v) for v in (*CODES, CODES[0])],
    ),
    "one whose defaults are": (
        lambda m: defaulted(),
        [lambda m, v=v: setattr(defaulted, "__defaults__", (v,)) for v in (1.0, 3.0, 1.0)],
    ),
}


@pytest.fixture(autouse=True)
def _left_as_it_was():
    saved = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    env("FXT", None)
    torch.set_default_dtype(saved[0])
    torch.set_float32_matmul_precision(saved[1])
    torch.backends.cudnn.benchmark = saved[2]
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_flash_sdp(True)


def run(name, **options):
    """What the calls of a model give, whose first is made in a fresh context; the model too."""
    read, changes = READ[name]

    def calls():
        model = Net(read).eval()
        model = fxamp.convert(model, dtype=torch.bfloat16, **options) if options else model
        results = []
        for change in changes:
            change(model)
            results.append(model(X).detach().float())
        return results, model

    return contextvars.Context().run(calls)


# What no graph holds: elements of iterators, a deque that drops some, a count in a function.
REFUSED = {
    *("an iterator", "a generator", "one in a loop", "a global iterator", "the last few", "a count in one"),
    "a kind of attention",
}


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("name", READ)
def test_each_call_answers_as_python_would(name, opt_level):
    (expected, _), (found, model) = run(name), run(name, opt_level=opt_level)
    methods = {variant.captured.method for variant in engine_of(model).all_variants() if not variant.is_preview}
    assert name in REFUSED or methods == {"symbolic"}, methods
    for result, right in zip(found, expected, strict=True):
        torch.testing.assert_close(result, right, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "name",
    ["getenv", "whether there is a variable", "a setting of torch", "the precision of products",
     "a flag of a backend", "an event", "an array of numpy", "bytes"],
)  # fmt: skip
def test_a_state_that_comes_back_finds_its_graph(name):
    _, model = run(name, capture="symbolic")
    assert len(engine_of(model).all_variants()) == 2


@pytest.mark.parametrize("asks", [True, False], ids=["asks before", "asks after"])
@pytest.mark.parametrize("leaves", [True, False], ids=["leaves it so", "puts it back"])
@pytest.mark.parametrize(
    ("ask", "put"),
    [
        (is_deterministic, torch.use_deterministic_algorithms),
        (lambda: torch.are_deterministic_algorithms_enabled(), torch.use_deterministic_algorithms),
        (lambda: torch.backends.cudnn.benchmark, lambda on: setattr(torch.backends.cudnn, "benchmark", on)),
    ],
    ids=["a name", "a function", "a property"],
)
def test_what_forward_sets_itself_it_finds_so(ask, put, leaves, asks):
    def read(model):
        before = ask() if asks else False
        put(True)
        found = 3.0 if ask() else 1.0
        if not leaves:
            put(before)
        return found + (2.0 if before else 0.0)

    def calls(converts):
        put(False)
        model = Net(read).eval()
        model = fxamp.convert(model, dtype=torch.bfloat16) if converts else model
        return [(model(X).detach(), ask()) for _ in range(3)], model

    (expected, _), (found, model) = calls(False), calls(True)
    assert [state for _, state in found] == [state for _, state in expected]
    for (result, _), (right, _) in zip(found, expected, strict=True):
        torch.testing.assert_close(result, right, rtol=0.05, atol=0.05)
    variants = list(engine_of(model).all_variants())
    assert len(variants) <= 2
    assert {variant.captured.method for variant in variants} == {"symbolic"}


@pytest.fixture
def ranks(tmp_path):
    def begin(_):
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)

    yield [lambda _: None, begin, lambda _: distributed.destroy_process_group()]
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_available(), reason="torch is built without distributed")
@pytest.mark.parametrize(
    "read",
    [
        lambda m: 3.0 if distributed.is_available() and distributed.is_initialized() else 1.0,
        lambda m: 3.0 if is_initialized() else 1.0,
        lambda m: 4.0 * get_world_size() if is_initialized() else 1.0,
        lambda m: 4.0 * torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1.0,
    ],
)
def test_a_process_group_that_comes_and_goes_is_seen(read, ranks):
    plain, converted = Net(read).eval(), fxamp.convert(Net(read).eval(), dtype=torch.bfloat16, capture="symbolic")
    for change in ranks:
        change(converted)
        torch.testing.assert_close(converted(X), plain(X), rtol=0.05, atol=0.05)
    assert len(engine_of(converted).all_variants()) == 2


def test_what_is_told_apart_by_context_is_so_at_once():
    converted = fxamp.convert(Net(lambda m: MODE.get()).eval(), dtype=torch.bfloat16)
    other = contextvars.copy_context()
    other.run(MODE.set, 3.0)
    plain = Net(lambda m: MODE.get()).eval()
    for _ in range(2):
        torch.testing.assert_close(converted(X), plain(X), rtol=0.05, atol=0.05)
        torch.testing.assert_close(other.run(converted, X), other.run(plain, X), rtol=0.05, atol=0.05)


def test_a_weak_reference_keeps_nothing_alive():
    model = Net(lambda m: m.held().value if m.held() is not None else 1.0).eval()
    box = Box(2.0)
    model.held = weakref.ref(box)
    converted = fxamp.convert(model, dtype=torch.bfloat16, capture="symbolic")
    converted(X), converted(X)
    del box
    gc.collect()
    assert model.held() is None
    torch.testing.assert_close(converted(X), model(X), rtol=0.05, atol=0.05)


def test_an_array_that_torch_reads_itself_may_change_at_each_call():
    model = Net(lambda m: torch.as_tensor(m.held)).eval()
    model.held = np.ones(8, dtype=np.float32)
    converted = fxamp.convert(model, dtype=torch.bfloat16, capture="symbolic")
    for number in range(4):
        model.held[:] = number
        torch.testing.assert_close(converted(X), model(X), rtol=0.05, atol=0.05)
    assert len(engine_of(converted).all_variants()) == 1


def test_an_iterator_is_named_and_not_used_up():
    model = Net(lambda m: next(m.held)).eval()
    model.held = iter([1.0, 2.0])
    with pytest.raises(CaptureError, match=r"the next element of self.held \(list_iterator\)"):
        fxamp.convert(model, dtype=torch.bfloat16, capture="symbolic", example_inputs=(X,))
    assert next(model.held) == 1.0


def test_other_threads_go_on_drawing_from_an_iterator():
    def read(model):
        with futures.ThreadPoolExecutor(1) as pool:  # stands for one that was there before
            pool.submit(next, model.held).result()
        return 2.0

    model = Net(read).eval()
    model.held = iter(range(9))
    fxamp.convert(model, dtype=torch.bfloat16, capture="symbolic")(X)
    assert next(model.held) in range(1, 9), "forward is run more than once at a capture"


def test_a_context_variable_that_forward_sets_is_set_by_each_call():
    def read(model):
        token = MODE.set(MODE.get() + 1)
        if model.held:
            MODE.reset(token)
        return MODE.get()

    def calls(converts, held):
        MODE.set(1.0)
        model = Net(read).eval()
        model.held = held
        model = fxamp.convert(model, dtype=torch.bfloat16) if converts else model
        return [(model(X).detach(), MODE.get()) for _ in range(3)]

    for held in (True, False):
        expected, found = (contextvars.Context().run(calls, converts, held) for converts in (False, True))
        assert [value for _, value in found] == [value for _, value in expected]
        for (result, _), (right, _) in zip(found, expected, strict=True):
            torch.testing.assert_close(result, right, rtol=0.05, atol=0.05)


def test_a_variable_that_forward_sets_and_never_reads_is_set_by_each_call():
    def read(model):
        UNSET.set("seen")
        return 2.0

    def calls():
        found = []
        model = fxamp.convert(Net(read).eval(), dtype=torch.bfloat16)
        for _ in range(3):
            UNSET.set("before")
            model(X)
            found.append(UNSET.get())
        return found

    assert contextvars.Context().run(calls) == ["seen"] * 3


QUEUE, GROWING, APPENDED = queue.Queue(), bytearray(), array.array("d")


def appends(path):
    with open(path, "a") as file:
        file.write("x")


# What forward does, and how often it has been done.
DONE = {
    "sets an environment variable": (
        lambda path: env("FXT", (os.environ.get("FXT") or "") + "x"),
        lambda path: len(os.environ["FXT"]),
    ),
    "puts into a queue": (lambda path: QUEUE.put(1), lambda path: QUEUE.qsize()),
    "adds bytes": (lambda path: GROWING.extend(b"x"), lambda path: len(GROWING)),
    "adds to an array": (lambda path: APPENDED.append(1.0), lambda path: len(APPENDED)),
    "writes a file": (appends, lambda path: path.stat().st_size),
}


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("name", DONE)
def test_what_forward_does_outside_it_does_once_in_each_call(name, opt_level, tmp_path):
    act, count = DONE[name]
    path = tmp_path / "written"
    QUEUE.queue.clear(), GROWING.clear()
    del APPENDED[:]
    converted = fxamp.convert(Net(lambda m: act(path) or 2.0).eval(), dtype=torch.bfloat16, opt_level=opt_level)
    for number in (1, 2, 3):
        converted(X)
        assert count(path) == number


def test_what_is_put_into_a_queue_is_no_value_of_a_trace():
    class Puts(Net):
        def forward(self, x):
            h = self.first(x)
            QUEUE.put(h.detach())
            return self.last(h)

    QUEUE.queue.clear()
    converted = fxamp.convert(Puts(None).eval(), dtype=torch.bfloat16)
    converted(X)
    assert type(QUEUE.get_nowait()) is torch.Tensor and QUEUE.empty()


def test_what_torch_asks_for_itself_is_no_state_of_the_model(monkeypatch):
    @functools.wraps(torch.relu)
    def asking(x):
        return os.environ.get("FXT_OF_TORCH") and x

    monkeypatch.setattr(asking, "__code__", asking.__code__.replace(co_filename=torch.__file__))
    asks = types.FunctionType(asking.__code__, {"os": os, "__name__": "torch"})
    converted = fxamp.convert(Net(lambda m: asks(2.0) or 2.0).eval(), dtype=torch.bfloat16, capture="symbolic")
    converted(X)
    monkeypatch.setenv("FXT_OF_TORCH", "")
    converted(X)
    assert len(engine_of(converted).all_variants()) == 1


def source_of(name):
    return SOURCE_LINES.get(name)


def framework():
    return "jax" if LOADED.get("jax") else "torch"


class AsksPython(nn.Module):
    """As type checkers of arguments do, which look for source lines, and for what has been imported."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        assert source_of("none") is None and framework() == "torch"
        return self.fc(x)


def test_what_python_keeps_of_modules_and_source_lines_is_no_state_of_the_model(monkeypatch):
    converted = fxamp.convert(AsksPython(), torch.bfloat16)
    for _ in range(3):
        converted(X)
        monkeypatch.setitem(SOURCE_LINES, f"file {len(SOURCE_LINES)}", (0, None, [], "file"))
        monkeypatch.setitem(LOADED, f"module_{len(LOADED)}", types.ModuleType("module"))
    assert len(engine_of(converted).all_variants()) == 1


def test_modules_that_a_capture_imports_stay_imported(monkeypatch):
    """As torch imports some for its first fake tensor of a size that the data decides: a second time it refuses."""
    effects = Effects()
    effects.remember(globals(), "LOADED", LOADED, "the global 'LOADED'")
    monkeypatch.setitem(LOADED, "imported_meanwhile", types.ModuleType("imported_meanwhile"))
    assert effects.undo() is None
    assert "imported_meanwhile" in LOADED
