"""What a trace must neither do to the user's objects nor freeze: each program evolves as in eager, converted or not."""

import collections
import copy
import functools
import random
import threading

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.engine import engine_of
from fxamp.errors import CaptureError, OptionError

LOW = torch.bfloat16
WEIGHT = torch.ones(16)
COUNT = 0


def inputs(step):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step))


class Net(nn.Module):
    calls = 0

    def __init__(self, body):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        for parameter in self.k.parameters():
            parameter.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(16))
        self.kept = [torch.ones(16)]
        self.teacher = [nn.BatchNorm1d(16)]
        self.queue = collections.deque(maxlen=3)
        self.body = body

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


@functools.lru_cache(None)
def triangle(size):
    return torch.tril(torch.ones(size, size))


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


def remembers(net, x, seen=[]):  # noqa: B006
    seen.append(1)
    return net.q(x)


def queues(net, x):
    net.queue.append(1)
    return net.q(x) * len(net.queue)


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


def test_a_cache_holds_no_traced_value():
    triangle.cache_clear()
    plain, model = pairs(cached)
    converted = fxamp.convert(model, LOW, example_inputs=(inputs(0),))
    assert type(triangle(16)) is torch.Tensor and isinstance(triangle, functools._lru_cache_wrapper)
    same(converted(inputs(0)), plain(inputs(0)))


@pytest.mark.parametrize("body", [counts_in_a_global, counts_in_its_class, remembers, queues, drops_layers])
def test_a_write_that_no_graph_makes_is_refused_and_undone(body):
    _, model = pairs(body)
    before = (COUNT, Net.calls, len(remembers.__defaults__[0]), len(model.queue), random.getstate())
    state = numpy.random.get_state()[1].copy()
    with pytest.raises(CaptureError, match=r"forward (sets|writes into|draws)"):
        fxamp.convert(model, LOW, example_inputs=(inputs(0),), capture="symbolic")
    assert before == (COUNT, Net.calls, len(remembers.__defaults__[0]), len(model.queue), random.getstate())
    assert (numpy.random.get_state()[1] == state).all()


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
    converted = fxamp.convert(model, LOW)
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
