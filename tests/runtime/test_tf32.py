"""TF32 is switched by one call, reported, and otherwise left alone."""

import logging

import pytest
import torch

import fxamp
from fxamp.errors import OptionError
from fxamp.runtime.tf32 import set_tf32, tf32_state

MATMUL, CONV, RNN = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn


@pytest.fixture(autouse=True)
def restored():
    """torch's own state: as in a new process."""
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    MATMUL.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
    assert torch.get_float32_matmul_precision() == "highest"


def test_asking_changes_nothing():
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
    assert (tf32_state().matmul, tf32_state().convolution) == (False, True)
    assert str(tf32_state()).startswith("TF32: matmul off, convolution on")
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (False, True)


@pytest.mark.parametrize("enabled", [True, False])
def test_switching_reports_and_returns_the_state_before(enabled, caplog):
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = not enabled, enabled
    with caplog.at_level(logging.INFO, "fxamp"):
        before = set_tf32(enabled)
    assert (before.matmul, before.convolution) == (not enabled, enabled)
    assert (tf32_state().matmul, tf32_state().convolution) == (enabled, enabled)
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is enabled
    word = "on" if enabled else "off"
    assert f"TF32: matmul {word}, convolution {word}" in caplog.text


def test_torchs_own_switch_is_seen():
    torch.set_float32_matmul_precision("high")
    assert tf32_state().matmul
    torch.set_float32_matmul_precision("highest")
    assert not tf32_state().matmul


@pytest.mark.parametrize("matmul", [True, False])
@pytest.mark.parametrize("convolution", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_every_state_is_come_back_to(matmul, convolution, enabled):
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, convolution
    before = set_tf32(enabled)
    assert set_tf32(before).matmul is enabled
    assert tf32_state() == before
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (matmul, convolution)


def newer(precision):
    torch.backends.fp32_precision = precision


def one_of_cudnn(switch, precision):
    switch.fp32_precision = precision


STATES = {  # by torch's newer switches, beside which the older ones raise or do not reach everything
    "all tf32": lambda: newer("tf32"),
    "all ieee": lambda: newer("ieee"),
    "conv ieee": lambda: one_of_cudnn(CONV, "ieee"),
    "rnn ieee": lambda: one_of_cudnn(RNN, "ieee"),
    "rnn none": lambda: one_of_cudnn(RNN, "none"),
    "matmul tf32": lambda: one_of_cudnn(MATMUL, "tf32"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
}


def asked(get):
    try:
        return get()
    except RuntimeError:
        return "refused"


def everything():
    """What each switch says, the older ones where they do not refuse."""
    return (
        *(switch.fp32_precision for switch in (torch.backends, MATMUL, torch.backends.cudnn, CONV, RNN)),
        torch.backends.mkldnn.matmul.fp32_precision,
        asked(torch.get_float32_matmul_precision),
    )


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("state", STATES)
def test_a_state_of_the_newer_switches_is_switched_and_come_back_to(state, enabled):
    STATES[state]()
    began = everything()
    before = set_tf32(enabled)
    for switch in (MATMUL, CONV, RNN):
        assert (switch.fp32_precision == "tf32") is enabled
    assert asked(torch.get_float32_matmul_precision) != "refused" or began[-1] == "refused"
    set_tf32(before)
    now = everything()
    assert now[:-1] == began[:-1]
    assert began[-1] in (now[-1], "refused")


def test_medium_is_kept_where_tf32_is_only_switched_on():
    torch.set_float32_matmul_precision("medium")
    set_tf32(True)
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("wrong", [5, "off", None, 1])
def test_what_is_no_state_is_refused_and_changes_nothing(wrong):
    before = tf32_state()
    with pytest.raises(OptionError, match=r"enabled=.*True, False or what set_tf32"):
        set_tf32(wrong)
    assert tf32_state() == before


@pytest.mark.parametrize("is_on", [True, False])
def test_converting_and_training_change_nothing(is_on):
    MATMUL.allow_tf32, torch.backends.cudnn.allow_tf32 = is_on, is_on
    states = [tf32_state()]
    for level in ("O1", "O2", "O3"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
        model = fxamp.convert(model, dtype=torch.float16, opt_level=level, example_inputs=(torch.ones(2, 4),))
        optimizer, scaler = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.1)), fxamp.LossScaler()
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer, max_grad_norm=1.0)
        scaler.update()
        fxamp.report(model).summary()
        states.append(tf32_state())
    assert len(set(map(str, states))) == 1
    assert MATMUL.allow_tf32 is torch.backends.cudnn.allow_tf32 is is_on
