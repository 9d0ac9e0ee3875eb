"""Calls that symbolic capture cannot follow: what is remembered of them, and for how long."""

import copy
import gc
import logging
import weakref

import pytest
import torch
from torch import nn

import fxamp
from fxamp.capture.refusals import Refusals
from fxamp.capture.tracer import SymbolicTracer
from fxamp.errors import CaptureError
from fxamp.model.engine import engine_of


class Deciding(nn.Module):
    """Decides on data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        return y + 1 if y.sum() > 0 else y


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_no_call_is_kept_alive():
    converted = fxamp.convert(Deciding(), dtype="bfloat16")
    inputs = []
    for _ in range(4):
        x = torch.randn(2, 8)
        inputs.append(weakref.ref(x))
        converted(x)
        del x
    gc.collect()
    assert [each() for each in inputs] == [None] * 4


def test_the_reason_is_given_again_by_an_error_of_its_own(monkeypatch):
    converted = fxamp.convert(Deciding(), dtype="bfloat16")
    reasons = []
    fall_back = type(converted._fxamp_engine).fall_back

    def noting(engine, module, reason):
        reasons.append(reason)
        fall_back(engine, module, reason)

    monkeypatch.setattr(type(converted._fxamp_engine), "fall_back", noting)
    for _ in range(3):
        converted(torch.randn(2, 8))
    assert len({str(reason) for reason in reasons}) == 1 and "bool() of a traced value" in str(reasons[0])
    assert len({id(reason) for reason in reasons}) == 3
    assert all(isinstance(reason, CaptureError) for reason in reasons)


def test_a_call_inside_autocast_is_told_of_like_any_other(caplog):
    converted = fxamp.convert(Deciding(), dtype="bfloat16")
    with caplog.at_level(logging.INFO, "fxamp"), torch.autocast("cpu", dtype=torch.bfloat16):
        converted(torch.randn(2, 8))
    assert "captured: 1 graph (dynamo)" in caplog.text


class Settings:
    def __init__(self) -> None:
        self.debug = True


class Watched(nn.Module):
    """Decides on data while it is told to; a submodule, an object or a global may be what tells it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(8, 8), nn.Dropout(0.0)
        self.debug, self.mode, self.settings, self.calls = True, "careful", Settings(), 0

    def forward(self, x):
        y = self.inner(x)
        if self.debug and self.mode == "careful" and self.settings.debug and self.drop.training:
            y = y + float(y.sum() > 1e9)
        return y * (1 + 0 * self.calls)


SWITCHES = {
    "a flag": (lambda model: setattr(model, "debug", False), lambda model: setattr(model, "debug", True)),
    "a string": (lambda model: setattr(model, "mode", ""), lambda model: setattr(model, "mode", "careful")),
    "an object": (
        lambda model: setattr(model.settings, "debug", False),
        lambda model: setattr(model.settings, "debug", True),
    ),
    "the mode of a part": (lambda model: model.drop.eval(), lambda model: model.drop.train()),
}


def methods(converted) -> list[str]:
    return sorted(variant.captured.method for variant in engine_of(converted).all_variants())


@pytest.fixture
def traces(monkeypatch):
    made = []
    trace = SymbolicTracer.trace
    monkeypatch.setattr(SymbolicTracer, "trace", lambda *given: (made.append(1), trace(*given))[1])
    return made


@pytest.mark.parametrize("switch", SWITCHES)
def test_state_that_lets_a_call_be_followed_is_noticed(switch, traces):
    off, on = SWITCHES[switch]
    converted, x = fxamp.convert(Watched(), dtype="bfloat16"), torch.randn(2, 8)
    converted(x)
    assert "symbolic" not in methods(converted)
    traces.clear()
    converted(x)
    assert not traces
    off(converted)
    expected = converted(x)
    assert "symbolic" in methods(converted)
    traces.clear()
    on(converted)
    torch.testing.assert_close(converted(x), expected, rtol=0, atol=0)
    off(converted)
    converted(x)
    assert not traces  # either way is known


def test_a_number_that_changes_at_every_call_is_no_reason_to_try_again(traces):
    converted, x = fxamp.convert(Watched(), dtype="bfloat16"), torch.randn(2, 8)
    converted(x)
    traces.clear()
    for _ in range(3):
        converted.calls += 1
        converted(x)
    assert not traces


def test_state_that_changes_at_every_call_has_a_few_calls_tried(traces):
    converted, x = fxamp.convert(Watched(), dtype="bfloat16"), torch.randn(2, 8)
    for number in range(Refusals.most_trials):
        converted.mode = type("Name", (str,), {})("careful") if number % 2 else "careful"
        converted(x)
    traces.clear()
    for _ in range(3):
        converted.mode = "careful" + ""
        converted(x)
        converted.mode = type("Name", (str,), {})("careful")
        converted(x)
    assert not traces


class Captioned(Watched):
    def forward(self, x, caption=""):
        return super().forward(x)


def test_arguments_that_differ_at_every_call_have_a_few_calls_tried(traces):
    converted, x = fxamp.convert(Captioned(), dtype="bfloat16"), torch.randn(2, 8)
    for number in range(Refusals.most_kinds):
        converted(x, caption=str(number))
    traces.clear()
    for number in range(3):
        converted(x, caption=f"another {number}")
    assert not traces
    converted.debug = False
    converted(x, caption="without the decision")
    assert "symbolic" in methods(converted)
    converted.eval()(x, caption="in another mode")
    assert len(traces) == 2
    assert len(engine_of(converted).variants) == 2  # of calls that have no graph nothing is kept here


def test_a_copy_is_tried_by_its_own_state(traces):
    converted, x = fxamp.convert(Watched(), dtype="bfloat16"), torch.randn(2, 8)
    converted(x)
    twin = copy.deepcopy(converted)
    traces.clear()
    twin(x)
    assert not traces
    twin.debug = False
    twin(x)
    assert len(traces) == 1
    converted(x)
    assert len(traces) == 1


class Printing(nn.Module):
    """Says what it computes."""

    def __init__(self, say):
        super().__init__()
        self.inner, self.say = nn.Linear(8, 8), say

    def forward(self, x):
        y = self.inner(x)
        self.say(y)
        return y


@pytest.mark.parametrize(
    "say", [print, str, "{}".format, lambda y: f"{y:}"], ids=["print", "str", "format", "f-string"]
)
@pytest.mark.parametrize("example", [True, False])
def test_the_text_of_a_traced_value_is_an_error_that_says_so(say, example):
    inputs = (torch.randn(2, 8),) if example else None
    with pytest.raises(CaptureError, match=r"test_unfollowable\.py.*format\(\) of a traced value"):
        fxamp.convert(Printing(say), capture="symbolic", example_inputs=inputs)


def test_what_forward_prints_is_printed_at_each_call(capsys):
    converted = fxamp.convert(Printing(print), dtype="bfloat16")
    for _ in range(2):
        converted(torch.randn(2, 8))
        assert "tensor([" in capsys.readouterr().out


class Catching(nn.Module):
    """Goes on with another number where asking for one fails, which it never does."""

    def __init__(self, ask) -> None:
        super().__init__()
        self.inner, self.ask = nn.Linear(8, 8), ask

    def forward(self, x):
        try:
            number = self.ask(self.inner(x))
        except Exception:
            number = -100
        return self.inner(x) + number


@pytest.mark.parametrize(
    "ask", [lambda x: 1 if x.erf().sum() > 0 else 2, lambda x: float(x.sum()), lambda x: len(x[x > 0])]
)
def test_a_model_that_catches_every_error_has_eagers_numbers(ask):
    model, x = Catching(ask), torch.ones(2, 8)
    converted = fxamp.convert(model, dtype="bfloat16")
    torch.testing.assert_close(converted(x), model(x), atol=0.1, rtol=0)
    with pytest.raises(CaptureError, match="which a graph cannot hold"):
        fxamp.convert(Catching(ask), dtype="bfloat16", capture="symbolic", example_inputs=(x,))
