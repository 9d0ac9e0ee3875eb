"""What a trace must neither do to the user's objects nor freeze: each program evolves as in eager, converted or not."""

import collections
import copy
import functools
import random
import subprocess
import sys
import threading
from random import random as draw

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.errors import CaptureError, OptionError
from fxamp.model.engine import engine_of

LOW = torch.bfloat16
WEIGHT = torch.ones(16)
COUNT = 0
GENERATOR = torch.Generator()


def inputs(step):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step))


@functools.lru_cache(None)
def ones(size):
    return torch.ones(size, size)


@functools.lru_cache(None)
def triangle(size):
    return torch.tril(ones(size))


class Tables:
    """An object of the user's own that keeps what it has made."""

    def __init__(self):
        self.kept = functools.lru_cache(None)(lambda size: torch.ones(size) * 2)

    @functools.lru_cache(None)  # noqa: B019
    def doubled(self, size):
        return torch.ones(size) * 2

    @staticmethod
    @functools.lru_cache(None)
    def tripled(size):
        return torch.ones(size) * 3

    def triangle(self, size):
        return triangle(size)

    @functools.cached_property
    def places(self):
        return [1, 3]

    def count(self):
        global COUNT
        COUNT += 1


class Net(nn.Module):
    calls = 0
    table = (1,)
    log = []  # noqa: RUF012

    def __init__(self, body):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        for parameter in self.k.parameters():
            parameter.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(16))
        self.kept = [torch.ones(16)]
        self.teacher = [nn.BatchNorm1d(16)]
        self.queue = collections.deque(maxlen=3)
        self.tables = Tables()
        self.made = functools.lru_cache(None)(lambda size: torch.ones(size) * 2)
        self.several = {"made": self.made}
        self.generator = torch.Generator()
        self.new, self.old = numpy.random.default_rng(), numpy.random.RandomState()
        self.own = random.Random()
        self.body = body

    @functools.lru_cache(None)  # noqa: B019
    def doubled(self, size):
        return torch.ones(size) * 2

    @staticmethod
    @functools.lru_cache(None)
    def tripled(size):
        return torch.ones(size) * 3

    @classmethod
    @functools.lru_cache(None)
    def named(cls, size):
        return torch.ones(size) * len(cls.__name__)

    @functools.cached_property
    def factor(self):
        return 2.5

    @functools.cached_property
    def steps(self):
        return torch.arange(16.0) * self.factor

    def forward(self, x, *more):
        return self.body(self, x, *more)


def momentum(net, x):
    with torch.no_grad():
        for mine, theirs in zip(net.q.parameters(), net.k.parameters(), strict=True):
            theirs.mul_(0.5).add_(mine, alpha=0.5)
    return net.q(x) + net.k(x)


def buffers_in_a_loop(net, x):
    for buffer in net.buffers():
        buffer.add_(1)
    return net.q(x) + net.seen


def regularised(net, x):
    return net.q(x).sum() + sum(p.square().sum() for p in net.parameters())


def tensor_in_a_list(net, x):
    return net.q(x) * (net.kept[0] * 2)


def tensor_of_the_module(net, x):
    return net.q(x) * (WEIGHT + 1).exp()


def cached(net, x):
    return net.q(x) @ triangle(16)


def argument_is_filled(net, batch):
    batch["y"] = net.q(batch["x"])
    return batch["y"] * 2


def counts_in_a_global(net, x):
    global COUNT
    COUNT += 1
    return net.q(x)


def counts_in_its_class(net, x):
    type(net).calls += 1
    return net.q(x)


def replaces_a_table_of_its_class(net, x):
    type(net).table = [*type(net).table, 1]
    return net.q(x) * len(net.table)


def writes_into_a_table_of_its_class(net, x):
    type(net).log.append(1)
    return net.q(x)


def starts_to_count_in_its_class(net, x):
    type(net).started = True
    return net.q(x)


def remembers(net, x, seen=[]):  # noqa: B006
    seen.append(1)
    return net.q(x)


def queues(net, x):
    net.queue.append(1)
    return net.q(x) * len(net.queue)


def counts_in_an_object_of_its_own(net, x):
    net.tables.count()
    return net.q(x)


def sets_a_hook(net, x):
    net.k.register_forward_hook(lambda module, args, kwargs, result: result, with_kwargs=True, always_call=True)
    return net.q(x)


def calls_with_a_hook(net, x):
    handle = net.q.register_forward_hook(lambda module, args, result: result * 2)
    result = net.q(x)
    handle.remove()
    return result


class Draws(nn.Module):
    def forward(self, x):
        return x * random.random()


def test_a_module_that_stays_whole_draws_at_each_call():
    eager = nn.Sequential(nn.Linear(4, 4), Draws(), nn.Linear(4, 4))
    eager[1].register_forward_hook(lambda *given: None)
    converted, x = fxamp.convert(eager, torch.bfloat16, capture="symbolic"), torch.randn(2, 4)
    for seed in range(3):
        random.seed(seed)
        expected, after = eager(x), random.random()
        random.seed(seed)
        torch.testing.assert_close(converted(x), expected, rtol=0.05, atol=0.05)
        assert random.random() == after


def draws_new(net, x):
    return net.q(x) * float(net.new.random())


def draws_old(net, x):
    return net.q(x) * float(net.old.rand())


def draws_from_torch(net, x):
    return net.q(x) * torch.rand(16, generator=net.generator)


def draws_from_a_global(net, x):
    return net.q(x) * torch.empty(16).uniform_(generator=GENERATOR)


def drops_layers(net, x):
    return net.q(x) * float(numpy.random.rand() > 0.5)


def in_a_set(net, x, n):
    return net.q(x) * (2.0 if n in {1, 2} else 1.0) * {3: 5.0}.get(n, 1.0)


def size_in_a_set(net, x):
    return net.q(x) * (2.0 if x.shape[0] in {4, 8} else 1.0)


def dtype_in_a_set(net, x):
    return net.q(x) * (2.0 if x.dtype in {torch.float32} else 1.0) * {"cpu": 3.0}.get(x.device.type, 1.0)


def named_by_a_number(net, x, n):
    return net.q(x) * {"s1": 2.0, "s2": 3.0}[f"s{n}"]


def asks_for_a_gradient(net, x):
    return net.q(x) * (2.0 if x.requires_grad else 1.0)


def teaches(net, x):
    return net.q(x) + net.teacher[0](x)


def pairs(body):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(body)
    return model, copy.deepcopy(model)


def same(one, other, rtol=0.03):
    torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * float(other.detach().abs().max()))


def same_state(one, other):
    for mine, theirs in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    "body", [momentum, buffers_in_a_loop, regularised, tensor_in_a_list, tensor_of_the_module, cached]
)
@pytest.mark.parametrize("example", [False, True])
def test_state_evolves_as_in_eager(body, example):
    plain, model = pairs(body)
    converted = fxamp.convert(model, LOW, example_inputs=(inputs(0),) if example else None)
    same_state(converted, plain)  # a conversion runs nothing
    for step in range(3):
        x = inputs(step)
        mine, theirs = converted(x), plain(x)
        same(mine, theirs)
        same_state(converted, plain)
        for net in (converted, plain):
            net.zero_grad()
        mine.sum().backward()
        theirs.sum().backward()
        same(converted.q.weight.grad, plain.q.weight.grad)


def test_what_a_list_holds_is_read_at_each_call():
    plain, model = pairs(tensor_in_a_list)
    converted = fxamp.convert(model, LOW)
    for scale in (1.0, 3.0):
        for net in (plain, converted):
            net.kept[0].mul_(scale)
        same(converted(inputs(1)), plain(inputs(1)))


CACHED = {
    "global": lambda net, x: net.q(x) @ triangle(16),
    "global of an object's method": lambda net, x: net.q(x) @ net.tables.triangle(16),
    "method": lambda net, x: net.q(x) * net.doubled(16),
    "static method": lambda net, x: net.q(x) * net.tripled(16),
    "class method": lambda net, x: net.q(x) * net.named(16),
    "static method of a global": lambda net, x: net.q(x) * Tables.tripled(16),
    "method of an object": lambda net, x: net.q(x) * net.tables.doubled(16),
    "static method of an object": lambda net, x: net.q(x) * net.tables.tripled(16),
    "attribute": lambda net, x: net.q(x) * net.made(16),
    "attribute of an object": lambda net, x: net.q(x) * net.tables.kept(16),
    "in a dictionary": lambda net, x: net.q(x) * net.several["made"](16),
}


def caches(net):
    """What each cached function gives and has given since it was made, and where it stands."""
    functions = [ones, triangle, net.doubled, net.tripled, net.named, net.made]
    return [*functions, net.tables.doubled, net.tables.tripled, net.tables.kept]


@pytest.mark.parametrize("name", CACHED)
def test_a_cache_holds_no_traced_value(name):
    plain, model = pairs(CACHED[name])
    for function in caches(model):
        function.cache_clear()
    is_refused = name in ("attribute of an object", "in a dictionary")
    if is_refused:
        with pytest.raises(CaptureError, match=r"forward fills the cache of .*<lambda>"):
            fxamp.convert(model, LOW, example_inputs=(inputs(0),), capture="symbolic")
    converted = fxamp.convert(model, LOW, example_inputs=(inputs(0),), capture="auto" if is_refused else "symbolic")
    for function in caches(model):
        assert isinstance(getattr(function, "__func__", function), functools._lru_cache_wrapper)
        assert type(function(16)) is torch.Tensor
    for _ in range(2):
        same(converted(inputs(0)), plain(inputs(0)))
    if not is_refused:
        assert len(engine_of(converted).all_variants()) == 1


PROPERTIES = {
    "number": lambda net, x: net.q(x) * net.factor,
    "tensor": lambda net, x: net.q(x) * net.steps,
    "of an object": lambda net, x: net.q(x)[:, net.tables.places] * 2,
}


@pytest.mark.parametrize("is_known", [False, True], ids=["not read yet", "read before"])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("name", PROPERTIES)
def test_a_cached_property_holds_no_traced_value(name, opt_level, is_known):
    plain, model = pairs(PROPERTIES[name])
    if is_known:
        model.factor, model.steps, model.tables.places  # noqa: B018
    converted = fxamp.convert(model, LOW, example_inputs=(inputs(0),), capture="symbolic", opt_level=opt_level)
    for _ in range(2):
        same(converted(inputs(0)), plain(inputs(0)))
    assert len(engine_of(converted).all_variants()) == 1
    for kind, kept in ((Net, ("factor", "steps")), (Tables, ("places",))):
        assert all(type(vars(kind)[each]) is functools.cached_property for each in kept)
    for net in (model, converted):
        assert net.factor == 2.5 and net.tables.places == [1, 3] and type(net.steps) is torch.Tensor


def python_state(net):
    in_objects = (len(remembers.__defaults__[0]), len(net.queue), random.getstate())
    return COUNT, Net.calls, Net.table, len(Net.log), set(vars(Net)), *in_objects, numpy.random.get_state()[1].tolist()


@pytest.mark.parametrize(
    "body",
    [
        counts_in_a_global,
        counts_in_its_class,
        counts_in_an_object_of_its_own,
        starts_to_count_in_its_class,
        replaces_a_table_of_its_class,
        writes_into_a_table_of_its_class,
        remembers,
        queues,
        drops_layers,
    ],
)
def test_a_write_that_no_graph_makes_is_refused_and_undone(body):
    _, model = pairs(body)
    before = python_state(model)
    with pytest.raises(CaptureError, match=r"forward (sets|writes into|draws)"):
        fxamp.convert(model, LOW, example_inputs=(inputs(0),), capture="symbolic")
    assert python_state(model) == before


class Counted(nn.Linear):
    """A module that notes its calls in a `__call__` of its own."""

    def __call__(self, x):
        CALLS.append(tuple(x.shape))
        return super().__call__(x)


CALLS = []


def test_what_a_call_method_writes_is_left_to_dynamo_too():
    model = nn.Sequential(Counted(16, 16), nn.ReLU())
    with pytest.raises(CaptureError, match="writes into the global 'CALLS'"):
        fxamp.convert(copy.deepcopy(model), LOW, capture="symbolic", example_inputs=(inputs(0),))
    converted = fxamp.convert(model, LOW)
    CALLS.clear()
    for step in range(3):
        converted(inputs(step))
    assert CALLS == [(4, 16)] * 3


def test_a_variable_that_was_not_set_is_not_set_afterwards():
    def make():
        def body(net, x):
            nonlocal seen
            seen = 1
            return net.q(x)

        def is_set():
            try:
                _ = seen
            except NameError:
                return False
            return True

        if COUNT < 0:
            seen = 0
        return body, is_set

    body, is_set = make()
    with pytest.raises(CaptureError, match=r"forward sets a variable of an enclosing function"):
        fxamp.convert(Net(body), LOW, example_inputs=(inputs(0),), capture="symbolic")
    assert not is_set()


def states(net):
    torch_states = [bytes(each.get_state().tolist()) for each in (net.generator, GENERATOR)]
    return [*torch_states, repr(net.new.bit_generator.state), repr(net.old.get_state()), net.own.getstate()]


@pytest.mark.parametrize("body", [draws_new, draws_old, draws_from_torch, draws_from_a_global])
def test_a_generator_of_the_user_s_is_drawn_from_at_each_call(body):
    plain, model = pairs(body)
    before = states(model)
    with pytest.raises(CaptureError, match=r"forward draws from a (torch\.)?(Generator|RandomState)"):
        fxamp.convert(model, LOW, example_inputs=(inputs(0),), capture="symbolic")
    assert states(model) == before
    converted = fxamp.convert(model, LOW)
    found = [converted(inputs(step)) for step in range(3)]
    GENERATOR.set_state(torch.tensor(list(before[1]), dtype=torch.uint8))
    for step, result in enumerate(found):
        same(result, plain(inputs(step)))


@pytest.mark.parametrize("example", [None, (inputs(0),)])
def test_a_model_that_draws_from_a_generator_of_python_s_runs_as_it_is_written(example):
    """Dynamo, too, would freeze what it draws."""
    eager, model = pairs(lambda net, x: net.q(x) * net.own.random())
    before = states(model)
    converted = fxamp.convert(model, LOW, example_inputs=example, overrides={"*": "deny"})
    assert states(model) == before
    for seed in range(3):
        assert torch.equal(converted(inputs(seed)), eager(inputs(seed)))


def skips(net, x):
    for layer in (net.q, net.q, net.q):
        if draw() < 0.5:
            continue
        x = layer(x)
    return x


@pytest.mark.parametrize("body", [lambda net, x: net.q(x) * draw(), skips])
def test_a_function_of_the_random_module_draws_at_each_call(body):
    plain, model = pairs(body)
    with pytest.raises(CaptureError, match="forward draws from Python's random module"):
        fxamp.convert(model, LOW, example_inputs=(inputs(0),), capture="symbolic")
    converted = fxamp.convert(model, LOW)
    for step in range(6):
        random.seed(step)
        result, state = converted(inputs(step)), random.getstate()
        random.seed(step)
        same(result, plain(inputs(step)))
        assert random.getstate() == state


def test_a_generator_that_forward_seeds_is_as_it_was():
    def body(net, x):
        net.generator.manual_seed(3)
        return net.q(x)

    _, model = pairs(body)
    before = states(model)
    with pytest.raises(CaptureError, match=r"forward draws from a Generator"):
        fxamp.convert(model, LOW, example_inputs=(inputs(0),), capture="symbolic")
    assert states(model) == before


def dictionaries(module):
    return {name: dict(value) for name, value in vars(module).items() if isinstance(value, dict)}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (sets_a_hook, r"sets attribute 'k\._forward_hooks"),
        (calls_with_a_hook, r"test_side_effects\.py:\d+: forward sets a hook on 'q'"),
    ],
)
def test_a_hook_that_forward_sets_is_refused_and_undone(body, message):
    plain, model = pairs(body)
    before = [dictionaries(module) for module in model.modules()]
    with pytest.raises(CaptureError, match=message):
        fxamp.convert(model, LOW, example_inputs=(inputs(0),), capture="symbolic")
    assert [dictionaries(module) for module in model.modules()] == before
    same(fxamp.convert(model, LOW)(inputs(1)), plain(inputs(1)))


def test_a_tensor_that_is_read_twice_is_one_value():
    plain, model = pairs(lambda net, x: (net.q(x) + net.kept[0]) * net.kept[0] + WEIGHT * WEIGHT + net.seen)
    converted = fxamp.convert(model, LOW, capture="symbolic")
    same(converted(inputs(0)), plain(inputs(0)))
    reads = [node.target for node in engine_of(converted).all_variants()[0].graph.nodes if node.op == "get_attr"]
    assert len(reads) == len(set(reads))


def test_an_argument_that_is_filled_comes_back_filled():
    plain, model = pairs(argument_is_filled)
    converted = fxamp.convert(model, LOW)
    batch = {"x": inputs(0)}
    same(converted(batch), plain({"x": inputs(0)}))
    assert set(batch) == {"x", "y"}


@pytest.mark.parametrize("body", [in_a_set, named_by_a_number])
def test_numbers_are_known_to_sets_and_strings(body):
    plain, model = pairs(body)
    converted = fxamp.convert(model, LOW, capture="symbolic", example_inputs=(inputs(0), 1))
    for n in (1, 2, 1):
        same(converted(inputs(0), n), plain(inputs(0), n))


@pytest.mark.parametrize("body", [size_in_a_set, dtype_in_a_set, asks_for_a_gradient])
def test_what_is_asked_of_an_input_is_asked_at_each_call(body):
    plain, model = pairs(body)
    converted = fxamp.convert(model, LOW)
    for x in (inputs(0), inputs(1)[:3], inputs(2).requires_grad_(), inputs(3)):
        same(converted(x), plain(x))


def test_modules_in_a_plain_list_are_followed():
    plain, model = pairs(teaches)
    converted = fxamp.convert(model, LOW)
    changes = (
        lambda net: None,
        lambda net: net.teacher[0].eval(),
        lambda net: setattr(net.teacher[0], "weight", nn.Parameter(torch.full((16,), 3.0))),
    )
    for change in changes:
        for net in (plain, converted):
            change(net)
        same(converted(inputs(0)), plain(inputs(0)))


@pytest.mark.parametrize("boundaries", [(), "q"])
def test_untied_weights_are_two_weights(boundaries):
    torch.manual_seed(0)
    model = Net(lambda net, x: net.k(net.q(x)))
    model.k.weight = model.q.weight
    converted = fxamp.convert(model, LOW, boundaries=boundaries)
    for _ in range(2):  # the second call asks whether the graph holds
        same(converted(inputs(0)), model(inputs(0)))
    converted.k.weight = model.k.weight = nn.Parameter(torch.randn(16, 16))
    same(converted(inputs(0)), model(inputs(0)))
    converted(inputs(0)).sum().backward()
    assert converted.k.weight.grad is not None


def test_a_first_call_under_a_checkpoint():
    model = Net(lambda net, x: net.k(torch.relu(net.q(x))))
    converted = fxamp.convert(model, LOW)
    checkpoint(converted, inputs(0).requires_grad_(), use_reentrant=False).sum().backward()
    assert model.q.weight.grad is not None


def test_threads_that_make_the_first_call_together():
    plain, model = pairs(lambda net, x: net.k(torch.relu(net.q(x))))
    converted = fxamp.convert(model, LOW)
    found, errors = {}, []

    def call(number):
        try:
            found[number] = converted(inputs(number))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for number, result in found.items():
        same(result, plain(inputs(number)))
    assert "__getattribute__" not in vars(nn.Module) and isinstance.__module__ == "builtins"


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x, out):
        out.add_(self.a(x))
        return x


def test_a_block_that_writes_into_an_argument_is_not_hidden_in_a_graph():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Writes() for _ in range(2))
            self.head = nn.Linear(16, 16)

        def forward(self, x):
            out = torch.zeros_like(x)
            for block in self.blocks:
                x = block(x, out)
            return self.head(out)

    torch.manual_seed(0)
    model = Outer()
    converted = fxamp.convert(model, LOW, boundaries="blocks")
    same(converted(inputs(0)), model(inputs(0)))


def test_lazy_modules_are_named():
    with pytest.raises(OptionError, match=r"lazy modules.*Call it once"):
        fxamp.convert(nn.Sequential(nn.LazyLinear(4)), LOW)


class Ordered(collections.OrderedDict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value if isinstance(value, tuple) else (value,))


def rebuilt(net, x):
    value = net.table.pop("a")
    net.table["c"] = value
    net.table["a"] = net.fc(x)
    return net.table["a"][0]


def turned(net, x):
    """The next item's turn at each call."""
    key = next(iter(net.table))
    net.table.move_to_end(key)
    return net.fc(x) * net.table[key][0]


@pytest.mark.parametrize("body", [rebuilt, turned])
def test_an_ordered_dictionary_is_in_its_order_after_a_trace(body):
    """dict's own methods leave the keys of an OrderedDict that they take away in its order: it cannot be read then."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.table = nn.Linear(16, 16), Ordered(a=2.0, b=3.0)
            self.table.move_to_end("a")

        def forward(self, x):
            return body(self, x)

    model = Net()
    with pytest.raises(CaptureError, match=r"writes into self\.table \(Ordered\)"):
        fxamp.convert(model, LOW, capture="symbolic", example_inputs=(inputs(0),))
    assert list(model.table.items()) == [("b", (3.0,)), ("a", (2.0,))]
    assert list(reversed(model.table)) == ["a", "b"]
    if body is turned:
        converted, plain = fxamp.convert(copy.deepcopy(model), LOW, overrides={"*": "deny"}), model
        for step in range(4):
            same(converted(inputs(step)), plain(inputs(step)))


EVALUATES = """
import torch
from collections import namedtuple

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.space = torch.nn.Linear(8, 4), {"torch": torch}

    def named(self, y):
        return namedtuple("Out", ["y"])(y).y

    def safe(self, y):
        return eval("y * 2", {"__builtins__": {}}, {"y": y})

    def kept(self, y):
        return eval("torch.tanh(y)", self.space, {"y": y})

    def forward(self, x):
        return self.METHOD(self.fc(x))
"""


@pytest.mark.parametrize("method", ["named", "safe", "kept"])
def test_pythons_builtins_stay_what_they_are(method, tmp_path):
    """In a process of its own, and of a module, which has them as a dictionary."""
    (tmp_path / "of_a_user.py").write_text(EVALUATES.replace("METHOD", method))
    code = (
        "import builtins, torch, fxamp\nfrom of_a_user import Net\nbefore = dict(vars(builtins))\nplain = Net()\n"
        "x = torch.randn(2, 8)\nexpected = plain(x)\nmodel = fxamp.convert(plain, torch.bfloat16)\n"
        "for _ in range(3):\n    assert (model(x) - expected).abs().max() < 0.05\nassert vars(builtins) == before\n"
        "assert [variant.is_preview for variant in fxamp.model.engine.engine_of(model).all_variants()] == [False]\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=tmp_path)


@functools.lru_cache(None)
def table(size):
    return torch.full((size,), 2.0)


@torch.compiler.disable
def looked_up(size):
    return table(size)


def test_a_cache_that_dynamo_does_not_look_into_keeps_nothing_of_a_preview():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x):
            return self.fc(x) * looked_up(16)

    table.cache_clear()
    converted = fxamp.convert(Looks(), LOW, example_inputs=(inputs(0),), capture="dynamo")
    assert type(table(16)) is torch.Tensor
    assert torch.isfinite(converted(inputs(0)).detach()).all()
