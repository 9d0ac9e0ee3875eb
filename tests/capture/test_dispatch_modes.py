"""A TorchDispatchMode of the user's around a model that Dynamo captures: its ops are seen, and it stays converted."""

import functools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import fxamp

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Breaks(nn.Module):
    """A decision by data between two graphs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.a(x)
        if h.sum() > 1e9:
            h = h * 2
        return self.b(h)


class Gemms(TorchDispatchMode):
    """Dtypes of matrix products."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            self.dtypes.append(args[-1].dtype)
        return func(*args, **(kwargs or {}))


def built(capture):
    torch.manual_seed(0)
    return fxamp.convert(Breaks(), dtype=torch.float16, capture=capture)


def exact(capture):
    with torch.no_grad():
        return built(capture)(X)


@pytest.mark.parametrize("calls_before", [0, 1, 2])
@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("modes", [1, 2])
def test_a_mode_sees_low_products_and_leaves_the_model_converted(capture, calls_before, modes, fresh_dynamo):
    model, expected = built(capture), exact(capture)
    with torch.no_grad():
        for _ in range(calls_before):
            model(X)
        counters = [Gemms() for _ in range(modes)]
        for counter in counters:
            counter.__enter__()
        try:
            inside = model(X)
        finally:
            for counter in reversed(counters):
                counter.__exit__(None, None, None)
        after = model(X)
        with Gemms() as again:
            model(X)
    assert torch.equal(inside, expected) and torch.equal(after, expected)
    assert [counter.dtypes for counter in (*counters, again)] == [[torch.float16] * 2] * (modes + 1)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@pytest.mark.parametrize("calls_before", [0, 1])
def test_flops_are_counted_forward_and_backward(calls_before, fresh_dynamo):
    """Hooks on all modules come with this mode: such a call runs as it was written, and only such a call."""
    model, expected = built("auto"), exact("auto")
    for _ in range(calls_before):
        model(X)
    with FlopCounterMode(display=False) as counter:
        model(X).sum().backward()
    assert counter.get_total_flops() == 2 * 4 * 8 * 8 * (2 + 2 + 1)  # the input's gradient is not needed
    with torch.no_grad():
        assert torch.equal(model(X), expected)


def test_a_mode_sees_what_dynamo_has_given_up(fresh_dynamo):
    class Loop(Breaks):
        def forward(self, x):
            for part in (self.a, self.b):
                x = part(x)
                if x.sum() > 1e9:
                    x = x * 2
            return x

    model = fxamp.convert(Loop(), dtype=torch.float16)
    model(X)
    with Gemms() as counter:
        model(X)
    assert len(counter.dtypes) == 2


def test_an_error_in_a_graph_leaves_the_modes_as_they_were(fresh_dynamo):
    class Fails(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.addmm.default:
                raise ValueError("no products today")
            return func(*args, **(kwargs or {}))

    model, expected = built("auto"), exact("auto")
    with Gemms() as outer, Fails() as inner:
        with pytest.raises(ValueError, match="no products today"):
            model(X)
        assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == [outer, inner]
    with torch.no_grad():
        assert torch.equal(model(X), expected)


def test_selective_checkpointing_around_the_model(fresh_dynamo):
    def keep_products(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    plain, model = built("auto"), built("auto")
    plain(X).square().sum().backward()
    checkpoint(model, X, use_reentrant=False, context_fn=contexts).square().sum().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    with torch.no_grad():
        assert torch.equal(model(X), exact("auto"))
