"""Hooks on all modules there are (`torch.nn.modules.module.register_module_forward_hook`): a graph would hold them."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.modules import module as every_module

import fxamp
from fxamp.errors import CaptureError
from fxamp.model.engine import engine_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.first(x).relu())


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


@contextlib.contextmanager
def doubled():
    """While it is entered every linear layer gives twice as much; those that were called, in their order."""
    called = []

    def hook(module, given, result):
        if isinstance(module, nn.Linear):
            called.append(module)
            return result * 2
        return None

    handle = every_module.register_module_forward_hook(hook)
    try:
        yield called
    finally:
        handle.remove()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("graphs_before", [False, True])
def test_a_global_hook_fires_at_each_call_and_not_after_it_is_removed(level, graphs_before):
    converted = fxamp.convert(model(), opt_level=level)
    plain, x = model(), torch.randn(4, 8)
    if graphs_before:
        converted(x)
    with doubled() as called:
        for calls in range(1, 4):
            result = converted(x)
            assert len(called) == 4 * calls
        expected = plain(x)
    torch.testing.assert_close(result, expected, atol=0.05, rtol=0.05)
    torch.testing.assert_close(converted(x), plain(x), atol=0.02, rtol=0.05)
    assert len(called) == 16
    assert len(engine_of(converted).own_variants()) == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_hooks_before_forward_and_around_backward(level):
    converted, seen = fxamp.convert(model(), opt_level=level), []
    x = torch.randn(4, 8, requires_grad=True)
    converted(x).sum().backward()
    handles = [
        every_module.register_module_forward_pre_hook(lambda m, given: seen.append("forward")),
        every_module.register_module_full_backward_hook(lambda m, taken, given: seen.append("backward")),
    ]
    try:
        converted(x).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    assert seen.count("forward") == seen.count("backward") == 7  # four layers, two blocks and the model


def test_the_call_runs_low_as_under_autocast():
    converted, dtypes = fxamp.convert(model()), []
    handle = every_module.register_module_forward_hook(lambda m, given, result: dtypes.append(result.dtype))
    try:
        converted(torch.randn(4, 8))
    finally:
        handle.remove()
    assert dtypes[:2] == [torch.bfloat16, torch.bfloat16] and dtypes[-1] is torch.float32


def test_blocks_that_are_converted_by_themselves():
    converted = fxamp.convert(model(), boundaries=["0"])
    x = torch.randn(4, 8)
    before = converted(x)
    with doubled() as called:
        converted(x)
    assert len(called) == 4
    assert torch.equal(converted(x), before)


def test_where_dynamo_captures_the_model_it_does_so_again_afterwards():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            torch._dynamo.graph_break()
            return self.layer(x)

    converted, x = fxamp.convert(Odd()), torch.randn(4, 8)
    before = converted(x)
    way = engine_of(converted).way
    with doubled() as called:
        hooked = converted(x)
    assert len(called) == 1
    torch.testing.assert_close(hooked, before * 2, atol=0.02, rtol=0.05)
    assert torch.equal(converted(x), before) and engine_of(converted).way is way


def test_symbolic_capture_refuses():
    converted = fxamp.convert(model(), capture="symbolic")
    with doubled(), pytest.raises(CaptureError, match="global hooks"):
        converted(torch.randn(4, 8))
    converted(torch.randn(4, 8))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_compiled_model_breaks_its_graph_while_they_are_there(level):
    compiled = torch.compile(fxamp.convert(model(), opt_level=level), backend="eager")
    plain, x = model(), torch.randn(4, 8)
    before = compiled(x)
    with doubled() as called:
        for calls in range(1, 4):
            hooked = compiled(x)
            assert len(called) == 4 * calls
        expected = plain(x)
    torch.testing.assert_close(hooked, expected, atol=0.05, rtol=0.05)
    assert torch.equal(compiled(x), before) and len(called) == 16
    assert torch._dynamo.explain(compiled)(x).graph_break_count == 0


def test_an_example_makes_no_graph_that_holds_them():
    plain, x = model(), torch.randn(4, 8)
    with doubled():
        converted = fxamp.convert(model(), example_inputs=(x,))
    torch.testing.assert_close(converted(x), plain(x), atol=0.02, rtol=0.05)


def test_a_model_that_was_compiled_among_them_reads_its_state_afterwards():
    class Scaled(Block):
        doubles = False

        def forward(self, x):
            return super().forward(x) * (2.0 if self.doubles else 1.0)

    torch.manual_seed(0)
    converted, x = fxamp.convert(Scaled()), torch.randn(4, 8)
    compiled = torch.compile(converted, backend="eager")
    with doubled():
        compiled(x)
    before = compiled(x)
    converted.doubles = True
    assert torch.equal(compiled(x), before * 2)
    converted.doubles = False
    assert torch.equal(compiled(x), before)
