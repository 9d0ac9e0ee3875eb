"""Checkpointed regions of Dynamo's graphs: computed again with the same random numbers, in low precision."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxamp
from fxamp.engine import engine_of

LOW = torch.bfloat16
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def keep_products(ctx, op, *args, **kwargs):
    keeps = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, keep_products)


class Block(nn.Module):
    def __init__(self, nested=False, **options):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.4)
        self.nested, self.options = nested, options

    def inner(self, x, shift):
        return self.drop(torch.exp(-F.gelu(self.first(x)).square())), x + shift

    def outer(self, x, shift):
        if self.nested:
            y, z = checkpoint(self.inner, x, shift, use_reentrant=False)
        else:
            y, z = self.inner(x, shift)
        return self.drop(self.second(y)), z

    def forward(self, x):
        x = self.drop(x)
        y, z = checkpoint(self.outer, x, 1.0, use_reentrant=False, **self.options)
        return self.last(y) + z[:, :4]


def gradients(run, model):
    model.zero_grad()
    torch.manual_seed(5)
    run(X).square().sum().backward()
    return [weight.grad.clone() for weight in model.parameters()]


WAYS = {
    "convert": lambda model, **rest: fxamp.convert(model, LOW, capture="dynamo", **rest),
    "eager": lambda model, **rest: torch.compile(
        model, backend="fxamp", options={"dtype": LOW, "inner": "eager", **rest}
    ),
    "aot_eager": lambda model, **rest: torch.compile(
        model, backend="fxamp", options={"dtype": LOW, "inner": "aot_eager", **rest}
    ),
}


@pytest.mark.parametrize(
    "options",
    [{}, {"nested": True}, {"preserve_rng_state": True}, {"context_fn": SELECTIVE}],
    ids=["plain", "nested", "preserve", "selective"],
)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_same_random_numbers(way, options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Block(**options)
    expected = gradients(model, model)
    twin = copy.deepcopy(model)
    for exact, found in zip(expected, gradients(WAYS[way](twin, overrides={"**": "deny"}), twin), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)
    for exact, found in zip(expected, gradients(WAYS[way](twin), twin), strict=True):
        assert (found - exact).norm() <= 0.05 * exact.norm()


class Count(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("options", "products"), [({}, 2), ({"nested": True}, 2), ({"context_fn": SELECTIVE}, 1)])
def test_the_region_is_low_and_computed_again_in_backward(options, products):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Block(**options)
    converted = WAYS["convert"](model)
    converted(X)
    rows = [row for row in fxamp.report(converted).rows if row.op == "linear"]
    assert [row.precision for row in rows] == ["low"] * 3
    variant = engine_of(converted).graphs()[0]
    seen = []
    engine_of(converted).dynamo.watch = lambda _, inputs: (seen.append(inputs), variant.compiled.run(None, *inputs))[1]
    converted(X)
    with Count() as forward:
        result = variant.compiled.run(None, *seen[0])
    loss = sum(value.sum() for value in result)
    with Count() as backward:
        loss.backward()
    assert forward.calls.count("aten.exp.default") == backward.calls.count("aten.exp.default") == 1
    again = backward.calls.count("aten.addmm.default")
    assert forward.calls.count("aten.addmm.default") == 3
    assert again == (2 if products == 2 else 0)


def test_one_region_of_one_op_between_writes():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.register_buffer("count", torch.ones(8))

        def forward(self, x):
            y = checkpoint(F.gelu, self.fc(x) + self.count, use_reentrant=False)
            self.count.add_(1)
            return y + self.count

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Counts()
    twin = copy.deepcopy(model)
    converted = WAYS["convert"](twin, overrides={"**": "deny"})
    for _ in range(2):
        assert torch.equal(converted(X), model(X))
    assert torch.equal(model.count, twin.count)
