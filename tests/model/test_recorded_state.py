"""What torch.compile, torch.export and torch.jit.trace make of a converted model holds for its Python state of then."""

import collections
import contextvars
import copy
import dataclasses
import enum
import functools
import gc
import os
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import fxamp

GAIN = 1.0
GAINS = {"all": 1.0}
LEVEL = contextvars.ContextVar("LEVEL", default=1.0)


class Way(enum.Enum):
    THERE = 1
    BACK = 2


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    name: str = "plain"
    gains: list = dataclasses.field(default_factory=lambda: [1.0, 2.0])
    inner: object = dataclasses.field(default_factory=lambda: types.SimpleNamespace(deep=[1.0]))


def scaled(x, by):
    return x * by


class Net(nn.Module):
    """Reads what `read` reads."""

    factor = 1.0

    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.parts = nn.ModuleList([nn.Linear(8, 8)])
        self.norm, self.leaky = nn.LayerNorm(8), nn.LeakyReLU(0.1)
        self.register_buffer("table", torch.ones(8))
        self.config, self.way, self.names = Config(), Way.THERE, {1}
        self.numbers, self.by_name, self.pair = [1.0, 2.0], {"all": 1.0, "more": {"deep": 1.0}}, (1.0, 2.0)
        self.queue, self.array, self.single = collections.deque([1.0]), np.ones(3), np.float32(1.0)
        self.boxes, self.nothing, self.number, self.text = [types.SimpleNamespace(v=1.0)], None, 1.0, "a"
        self.function, self.partial = functools.partial(scaled, by=1.0), functools.partial(scaled, by=1.0)
        self.config_reference = weakref.ref(self.config)
        self.schedule = types.SimpleNamespace(optimizer=torch.optim.SGD(self.first.parameters(), lr=1.0))
        self.read = read

    def forward(self, x):
        return self.last(self.read(self, self.first(x)))


def _set_global(net):
    global GAIN
    GAIN = 3.0


def _set_rate(net):
    net.schedule.optimizer.param_groups[0]["lr"] = 3.0


CASES = {
    "a number": (lambda s, h: h * s.number, lambda s: setattr(s, "number", 3.0)),
    "a text": (lambda s, h: h * 3 if s.text == "b" else h, lambda s: setattr(s, "text", "b")),
    "a field": (lambda s, h: h * s.config.scale, lambda s: setattr(s.config, "scale", 3.0)),
    "a name of a field": (lambda s, h: h * 3 if s.config.name == "b" else h, lambda s: setattr(s.config, "name", "b")),
    "an item of a field": (lambda s, h: h * s.config.gains[1], lambda s: s.config.gains.__setitem__(1, 5.0)),
    "a longer list": (lambda s, h: h * sum(s.config.gains), lambda s: s.config.gains.append(5.0)),
    "deep inside": (lambda s, h: h * s.config.inner.deep[0], lambda s: s.config.inner.deep.__setitem__(0, 5.0)),
    "another object": (lambda s, h: h * s.config.scale, lambda s: setattr(s, "config", Config(scale=4.0))),
    "a weak reference": (lambda s, h: h * s.config_reference().scale, lambda s: setattr(s.config, "scale", 3.0)),
    "an entry": (lambda s, h: h * s.by_name["all"], lambda s: s.by_name.update(all=3.0)),
    "an entry inside": (lambda s, h: h * s.by_name["more"]["deep"], lambda s: s.by_name["more"].update(deep=3.0)),
    "a new entry": (lambda s, h: h * 3 if "new" in s.by_name else h, lambda s: s.by_name.update(new=1)),
    "an item": (lambda s, h: h * s.numbers[1], lambda s: s.numbers.__setitem__(1, 7.0)),
    "a tuple": (lambda s, h: h * s.pair[0], lambda s: setattr(s, "pair", (4.0, 1.0))),
    "an enum": (lambda s, h: h * 3 if s.way is Way.BACK else h, lambda s: setattr(s, "way", Way.BACK)),
    "a function": (lambda s, h: s.function(h), lambda s: setattr(s, "function", lambda x: x * 3)),
    "a partial": (lambda s, h: s.partial(h), lambda s: setattr(s, "partial", functools.partial(scaled, by=3.0))),
    "a set": (lambda s, h: h * 3 if 2 in s.names else h, lambda s: s.names.add(2)),
    "a deque": (lambda s, h: h * s.queue[0], lambda s: s.queue.__setitem__(0, 4.0)),
    "an object in a list": (lambda s, h: h * s.boxes[0].v, lambda s: setattr(s.boxes[0], "v", 4.0)),
    "numpy's number": (lambda s, h: h * float(s.single), lambda s: setattr(s, "single", np.float32(3.0))),
    "numpy's array": (lambda s, h: h * float(s.array[1]), lambda s: s.array.__setitem__(1, 4.0)),
    "a tensor for None": (
        lambda s, h: h if s.nothing is None else h * s.nothing,
        lambda s: setattr(s, "nothing", torch.full((8,), 4.0)),
    ),
    "an attribute that is new": (lambda s, h: h * 3 if hasattr(s, "new") else h, lambda s: setattr(s, "new", 1)),
    "an attribute of the class": (lambda s, h: h * s.factor, lambda s: setattr(Net, "factor", 3.0)),
    "a global": (lambda s, h: h * GAIN, _set_global),
    "an entry of a global": (lambda s, h: h * GAINS["all"], lambda s: GAINS.update(all=3.0)),
    "an environment variable": (
        lambda s, h: h * float(os.environ.get("GAIN_OF_TESTS", "1")),
        lambda s: os.environ.update(GAIN_OF_TESTS="3"),
    ),
    "a context variable": (lambda s, h: h * LEVEL.get(), lambda s: LEVEL.set(3.0)),
    "a rate": (lambda s, h: h * s.schedule.optimizer.param_groups[0]["lr"], _set_rate),
    "a slope": (lambda s, h: s.leaky(h), lambda s: setattr(s.leaky, "negative_slope", 3.0)),
    "an eps": (lambda s, h: s.norm(h), lambda s: setattr(s.norm, "eps", 10.0)),
    "a mode of a part": (lambda s, h: h * 3 if s.parts[0].training else h, lambda s: s.parts.eval()),
    "one part more": (
        lambda s, h: functools.reduce(lambda v, f: f(v), s.parts, h),
        lambda s: s.parts.append(nn.Tanh()),
    ),
    "another part": (lambda s, h: s.parts[0](h), lambda s: s.parts.__setitem__(0, nn.Tanh())),
    "a hook": (lambda s, h: s.parts[0](h), lambda s: s.parts[0].register_forward_hook(lambda m, i, o: o * 3)),
    "a forward": (lambda s, h: s.parts[0](h), lambda s: setattr(s.parts[0], "forward", lambda h: h * 3)),
    "no bias": (lambda s, h: s.parts[0](h), lambda s: setattr(s.parts[0], "bias", None)),
    "a buffer": (lambda s, h: h * s.table, lambda s: setattr(s, "table", torch.full((8,), 4.0))),
    "a buffer's numbers": (lambda s, h: h * s.table, lambda s: s.table.fill_(4.0)),
}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def reset():
    global GAIN
    GAIN, GAINS["all"], Net.factor = 1.0, 1.0, 1.0
    os.environ["GAIN_OF_TESTS"] = "1"
    LEVEL.set(1.0)


@pytest.fixture(autouse=True)
def state_put_back():
    torch._dynamo.reset()
    reset()
    yield
    reset()
    del os.environ["GAIN_OF_TESTS"]


def _expected(read, change):
    """What the plain model gives before and after a change, which is far from it."""
    net = Net(read)
    before = net(X).detach()
    change(net)
    after = net(X).detach()
    reset()
    assert _far(before, after) > 0.05
    return before, after


def _far(found, expected):
    return (found.detach().float() - expected).norm() / expected.norm()


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_model_sees_what_changes(case):
    read, change = CASES[case]
    before, after = _expected(read, change)
    converted = fxamp.convert(Net(read), torch.bfloat16)
    compiled = torch.compile(converted, backend="eager")
    for _ in range(2):
        assert _far(compiled(X), before) < 0.02
    change(converted)
    for _ in range(2):
        assert _far(compiled(X), after) < 0.02


def _exported(model):
    return torch.export.export(model, (X,)).module()


def _traced(model):
    return torch.jit.trace(model, (X,), check_trace=False)


@pytest.mark.parametrize("record", [_exported, _traced])
@pytest.mark.parametrize("case", CASES)
def test_what_is_recorded_after_a_change_is_of_the_model_as_it_is(case, record):
    read, change = CASES[case]
    before, after = _expected(read, change)
    converted = fxamp.convert(Net(read), torch.bfloat16)
    assert _far(converted(X), before) < 0.02
    change(converted)
    assert _far(record(converted)(X), after) < 0.02


def test_what_is_compiled_stays_where_equal_values_are_written():
    counter = CompileCounter()
    converted = fxamp.convert(Net(CASES["a field"][0]), torch.bfloat16)
    compiled = torch.compile(converted, backend=counter)
    for _ in range(3):
        compiled(X)
        converted.config = Config()
    assert counter.frame_count == 1


def test_a_function_compiled_around_several_models_asks_each():
    """Copies share a graph, and what is compiled with it; each has a state of its own."""
    converted = fxamp.convert(Net(CASES["a field"][0]), torch.bfloat16)
    other = copy.deepcopy(converted)
    other.config.scale = 3.0

    @torch.compile(backend="eager")
    def step(model, x):
        return model(x) * 2

    for _ in range(2):
        assert torch.equal(step(converted, X), converted(X) * 2)
        assert torch.equal(step(other, X), other(X) * 2)
    converted.config.scale, other.config.scale = 3.0, 1.0
    assert torch.equal(step(converted, X), converted(X) * 2)
    assert torch.equal(step(other, X), other(X) * 2)
    assert _far(converted(X), other(X).float()) > 0.1


def test_arguments_that_dynamo_does_not_show_take_no_graph_of_another_state():
    class Box:
        def __init__(self, value):
            self.value = value

    class Boxed(Net):
        def forward(self, x, box):
            return super().forward(x) * box.value

    converted = fxamp.convert(Boxed(CASES["a field"][0]), torch.bfloat16)
    compiled = torch.compile(converted, backend="eager")
    for scale in (1.0, 3.0, 1.0):
        converted.config.scale = scale
        for value in (1.0, 2.0):
            assert _far(compiled(X, Box(value)), Boxed.forward(converted, X, Box(value)).detach()) < 0.02


def test_training_goes_on_with_what_a_schedule_says():
    """Updates as those of the plain model, under a weight that is another in each epoch."""
    weights = {}
    for name in ("plain", "compiled"):
        net = Net(CASES["a field"][0])
        model = fxamp.convert(net, torch.bfloat16) if name == "compiled" else net
        run = torch.compile(model, backend="aot_eager") if name == "compiled" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(4):
            net.config.scale = 1.0 / (epoch + 1)
            for _ in range(2):
                optimizer.zero_grad()
                run(X).square().mean().backward()
                optimizer.step()
        weights[name] = torch.cat([p.detach().flatten() for p in model.parameters()])
    start = torch.cat([p.detach().flatten() for p in Net(None).parameters()])
    assert _far(weights["compiled"] - start, weights["plain"] - start) < 0.02


def test_a_model_that_no_question_holds_for_runs_as_it_does_uncompiled(monkeypatch):
    monkeypatch.setattr("fxamp.model.compiling.question", lambda *_: lambda module: False)
    converted = fxamp.convert(Net(CASES["a field"][0]), torch.bfloat16)
    compiled = torch.compile(converted, backend="eager")
    for scale in (1.0, 3.0):
        converted.config.scale = scale
        assert torch.equal(compiled(X), converted(X))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Net is another at each call"):
        torch.compile(converted, backend="eager", fullgraph=True)(X)


def test_a_function_that_stays_compiled_keeps_no_model():
    @torch.compile(backend="eager")
    def step(model, x):
        return model(x) * 2

    def weight_of_one():
        net = Net(CASES["a field"][0])
        step(fxamp.convert(net, torch.bfloat16), X)
        return weakref.ref(net.first.weight)

    weights = [weight_of_one() for _ in range(3)]
    gc.collect()
    assert [weight() for weight in weights] == [None, None, None]


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_model_that_has_got_a_hook_is_compiled_with_it(opt_level, called_before):
    """At O2 no graph holds it then, and it runs as it is written, outside of what Dynamo compiles."""
    read, change = CASES["a hook"]
    before, after = _expected(read, change)
    converted = fxamp.convert(Net(read), torch.bfloat16, opt_level=opt_level)
    compiled = torch.compile(converted, backend="eager")
    if called_before:
        assert _far(compiled(X), before) < 0.02
    change(converted)
    for _ in range(2):
        result = compiled(X)
        assert _far(result, after) < 0.02
    result.sum().backward()
    assert converted.first.weight.grad is not None


def test_so_is_one_whose_block_has_got_one():
    read, change = CASES["a hook"]
    before, after = _expected(read, change)
    converted = fxamp.convert(Net(read), torch.bfloat16, boundaries=["parts.0"])
    compiled = torch.compile(converted, backend="eager")
    assert _far(compiled(X), before) < 0.02
    change(converted)
    assert _far(compiled(X), after) < 0.02
