"""What forward sets in its first call alone is set by the converted model's first call, and nothing else is."""

import copy
import types

import pytest
import torch
from torch import nn

import fxamp
from fxamp.errors import CaptureError

LOW = torch.bfloat16


class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) * self.config.scale


class Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.config = types.SimpleNamespace(kind=None, scale=2.0, calls=0, seen={}, last=None)
        self.cache = {"kept": 1}
        self.tables = [torch.tensor([1.0]), torch.tensor([3.0])]
        self.inner = Inner(self.config)
        self.function = forward

    def forward(self, x, labels=None):
        return self.function(self, x, labels)


def problem_type(m, x, labels):
    """As transformers' heads choose their loss."""
    logits = m.inner(x)
    if m.config.kind is None:
        m.config.kind = "classes" if labels.dtype == torch.int64 else "numbers"
    if m.config.kind == "classes":
        return nn.functional.cross_entropy(logits, labels)
    return nn.functional.mse_loss(logits, labels)


def length(m, x, labels):
    m.config.last = x.shape[0]
    return m.inner(x)


def length_in_a_dictionary(m, x, labels):
    m.cache[len(x)] = True
    return m.inner(x) * len(m.cache)


def counter(m, x, labels):
    m.config.calls += 1
    return m.inner(x)


def first_is_another(m, x, labels):
    factor = 1.0 if m.config.kind else 3.0
    m.config.kind = "called"
    return m.inner(x) * factor


def other_constant(m, x, labels):
    """The graphs differ in a tensor alone."""
    table = torch.tensor([1.0 if m.config.kind else 3.0])
    m.config.kind = "called"
    return m.inner(x) * table


def other_table(m, x, labels):
    """So they do here, and the tensors have one name in both."""
    table = m.tables[0 if m.config.kind else 1]
    m.config.kind = "called"
    return m.inner(x) * table


def turns(m, x, labels):
    m.config.kind = "a" if m.config.kind == "b" else "b"
    return m.inner(x)


def no_plain_value(m, x, labels):
    m.config.last = [x]
    return m.inner(x)


def a_key_less(m, x, labels):
    m.cache.pop("kept", None)
    return m.inner(x)


def is_set_then_read_elsewhere(m, x, labels):
    m.config.scale = 3.0
    return m.inner(x)


def moved(module, args, output):
    return output + 1


moved.__module__ = "transformers.utils.output_capturing"  # it is told from the user's own by where it is from


def hooks(m, x, labels):
    """As transformers' base models set those that collect hidden states."""
    if not getattr(m, "has_hooks", False):
        m.inner.linear.register_forward_hook(moved)
        m.inner.has_hooks = m.has_hooks = True
    return m.inner(x)


def hooks_at_every_call(m, x, labels):
    m.inner.linear.register_forward_hook(moved)
    return m.inner(x)


ONCE = [problem_type, is_set_then_read_elsewhere, hooks]
REFUSED = [counter, first_is_another, other_constant, other_table, turns, no_plain_value, a_key_less]
EVERY = [*ONCE, *REFUSED, length, length_in_a_dictionary]
X, LABELS = torch.randn(4, 8), torch.tensor([0, 1, 2, 3])


def state(model):
    hooked = len(model.inner.linear._forward_hooks), vars(model).get("has_hooks"), vars(model.inner).get("has_hooks")
    return {**vars(model.config), "seen": dict(model.config.seen), "cache": dict(model.cache), "hooked": hooked}


def make(function):
    torch.manual_seed(0)
    return Model(function)


@pytest.mark.parametrize("function, capture", [*((each, "auto") for each in EVERY), (hooks_at_every_call, "dynamo")])
def test_calls_leave_the_state_that_fp32_leaves(function, capture):
    """Over calls of other sizes and types, and after the settings were taken back."""
    plain, converted = make(function), fxamp.convert(make(function), LOW, capture=capture)
    calls = [(X, LABELS), (X, LABELS), (X[:2], LABELS[:2]), (X, LABELS), (X, torch.randn(4, 8)), (X[:3], LABELS[:3])]
    for number, (x, labels) in enumerate(calls):
        if number in (2, 4):
            for model in (plain, converted):
                model.config.kind = None
        expected, found = (answer(model, x, labels) for model in (plain, converted))
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)
        else:
            assert expected is found is None, (expected, found)
        assert repr(state(converted)).replace(" ", "") == repr(state(plain)).replace(" ", ""), number
    torch._dynamo.reset()


def answer(model, x, labels):
    try:
        return model(x, labels).detach()
    except (RuntimeError, ValueError):  # of labels that do not fit what the first call has set
        return None


@pytest.mark.parametrize("function", ONCE)
def test_what_is_set_once_is_captured_symbolically_in_one_graph(function):
    converted = fxamp.convert(make(function), LOW, (X, LABELS), capture="symbolic")
    for _ in range(3):
        converted(X, LABELS)
    assert fxamp.report(converted).captures == ("symbolic",)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("function", ONCE)
def test_converting_for_an_example_sets_nothing(function, opt_level):
    plain, converted = make(function), fxamp.convert(make(function), LOW, (X, LABELS), opt_level=opt_level)
    assert state(converted) == state(plain)
    assert fxamp.find_nan(converted, (X, LABELS)) is None and state(converted) == state(plain)
    for _ in range(2):
        plain(X, LABELS)
        converted(X, LABELS).sum().backward()
        assert state(converted) == state(plain) != state(make(function))
    assert fxamp.report(converted).captures == ("symbolic",)


@pytest.mark.parametrize("function", REFUSED)
def test_what_a_graph_cannot_repeat_is_refused_and_undone(function):
    model = make(function)
    before = state(model)
    with pytest.raises(CaptureError, match=r"forward writes into self\.(config|cache)"):
        fxamp.convert(model, LOW, (X, LABELS), capture="symbolic")
    assert state(model) == before


def test_hooks_that_are_set_at_every_call_are_refused_and_undone():
    model = make(hooks_at_every_call)
    with pytest.raises(CaptureError, match=r"forward sets attribute 'inner\.linear\._forward_hooks'"):
        fxamp.convert(model, LOW, (X, LABELS), capture="symbolic")
    assert state(model) == state(make(hooks_at_every_call))


def test_a_copy_sets_its_own():
    converted = fxamp.convert(make(problem_type), LOW, (X, LABELS))
    other = copy.deepcopy(converted)
    other(X, LABELS)
    assert other.config.kind == "classes" and converted.config.kind is None
    converted(X, torch.randn(4, 8))
    assert other.config.kind == "classes" and converted.config.kind == "numbers"


def test_a_copy_sets_its_own_hooks():
    converted = fxamp.convert(make(hooks), LOW, (X, LABELS))
    other = copy.deepcopy(converted)
    assert torch.equal(other(X), other(X)) and not converted.inner.linear._forward_hooks
    assert torch.equal(converted(X), other(X)) and len(converted.inner.linear._forward_hooks) == 1
