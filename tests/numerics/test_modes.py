"""The tools inside a caller's autocast region or inference mode: their answers are those of outside."""

import contextlib
import dataclasses

import pytest
import torch
from torch import nn

import fxamp

FP16, BF16 = torch.float16, torch.bfloat16
X = torch.linspace(-1, 1, 128).reshape(8, 16)
CAPTURES = ("symbolic", "dynamo")


class Factor(nn.Module):
    """Two layers with a factor between them that float16 holds, or not."""

    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.factor = nn.Linear(16, 16), nn.Linear(16, 16), factor

    def forward(self, x):
        return self.b(self.a(x) * self.factor * self.factor)


def pair(factor=3.0, dtype=FP16, **more):
    model = Factor(factor)
    return model, fxamp.convert(Factor(factor), dtype, (X,), **more)


def autocast(dtype):
    return lambda: torch.autocast("cpu", dtype)


MODES = {"autocast fp16": autocast(FP16), "autocast bf16": autocast(BF16), "inference mode": torch.inference_mode}


def plain(result):
    return dataclasses.asdict(result) if dataclasses.is_dataclass(result) else result


def same_in(mode, ask):
    expected = plain(ask())
    torch._dynamo.reset()
    with MODES[mode]():
        found = plain(ask())
    assert found == expected
    return expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("capture", CAPTURES)
def test_compare(mode, capture, fresh_dynamo):
    model, converted = pair(capture=capture)
    expected = same_in(mode, lambda: fxamp.compare(model, converted, (X.clone(),), lambda output: output.pow(2).mean()))
    assert expected["output"] > 0 and expected["loss"][0] != expected["loss"][1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", (FP16, BF16))
def test_find_deny(mode, dtype):
    model, converted = pair(dtype=dtype)
    tolerance = fxamp.compare(model, converted, (X,)).output / 3

    def ask():
        # the loss multiplies matrices, which autocast would do low
        return fxamp.find_deny(
            model, converted, (X,), tolerance, lambda out: (out @ out.T).pow(2).mean(), progress=False
        )

    assert same_in(mode, ask)["nodes"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("capture", CAPTURES)
def test_find_nan_in_forward(mode, capture, fresh_dynamo):
    _, converted = pair(1e4, capture=capture)
    found = same_in(mode, lambda: fxamp.find_nan(converted, (X.clone(),)))
    assert found["overrides"] and not found["is_bad_in_float32"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("capture", CAPTURES)
def test_find_nan_in_backward(mode, capture, fresh_dynamo):
    _, converted = pair(capture=capture)
    found = same_in(mode, lambda: fxamp.find_nan(converted, (X.clone(),), lambda output: output.sum() * 2.0**20))
    assert found["phase"] != "forward"


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        return (self.fc(x) * 0).sqrt()


def test_anomaly_mode_does_not_stop_the_search_for_what_it_stops_at():
    converted = fxamp.convert(Root(), FP16, (X,))
    expected = fxamp.find_nan(converted, (X,), torch.sum)
    with torch.autograd.set_detect_anomaly(True):
        assert fxamp.find_nan(converted, (X,), torch.sum) == expected
        assert torch.is_anomaly_enabled()
    assert (expected.op, expected.phase, expected.is_bad_in_float32) == ("sqrt", "backward", True)


@pytest.mark.parametrize("mode", MODES)
def test_profile_of_a_converted_model(mode):
    _, converted = pair(1e4)
    batches = [(X.clone(), torch.ones(8, 16))]
    loss = nn.MSELoss()
    same_in(mode, lambda: fxamp.profile(converted, batches, loss, progress=False).as_dict())
    with MODES[mode]():  # tensors that were made there
        made = [(X.clone(), torch.ones(8, 16))]
    assert fxamp.profile(converted, made, loss, progress=False).deny()


def test_inference_mode_keeps_no_tool_from_a_plain_model():
    model = Factor(1e4)
    same_in("inference mode", lambda: fxamp.profile(model, [X.clone()], progress=False).as_dict())
    assert same_in("inference mode", lambda: str(fxamp.audit(model, (X.clone(),))))


@pytest.mark.parametrize("level", ("O1", "O2"))
def test_inference_mode_keeps_nobody_from_trying_changes(level):
    _, converted = pair(opt_level=level)
    same_in("inference mode", lambda: fxamp.what_if(converted, deny="mul").summary())
    same_in("inference mode", lambda: [str(move) for move in fxamp.report(converted).suggest()])


@pytest.mark.parametrize("mode", MODES)
def test_the_callers_mode_is_on_again(mode):
    model, converted = pair()
    with MODES[mode](), contextlib.suppress(fxamp.FxampError):
        before = torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        fxamp.compare(model, converted, (X,), lambda output: output.sum())
        now = torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    assert now == before


def test_a_loss_that_holds_tensors_of_inference_mode_is_refused():
    _, converted = pair()
    with torch.inference_mode():
        target = torch.ones(8, 16)
        with pytest.raises(fxamp.FxampError, match=r"loss_fn.*inference_mode.*clone"):
            fxamp.find_nan(converted, (X,), lambda output: (output * target).sum())


@pytest.mark.parametrize("mode", MODES)
def test_compare_of_a_model_that_is_left_as_it_is(mode, monkeypatch):
    monkeypatch.setenv("FXAMP_DISABLE", "1")
    model, left = Factor(3.0), fxamp.convert(Factor(3.0), FP16, (X,))
    expected = same_in(mode, lambda: fxamp.compare(model, left, (X.clone(),), lambda out: (out @ out.T).mean()))
    assert expected["output"] == 0.0 and expected["loss"][0] != 0.0
