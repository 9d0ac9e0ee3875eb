"""TF32 is switched by one call, reported, and otherwise left alone."""

import logging

import pytest
import torch

from fxamp.errors import OptionError
from fxamp.runtime.tf32 import set_tf32, tf32_state


@pytest.fixture(autouse=True)
def restored():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


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


@pytest.mark.parametrize("wrong", [5, "off", None, 1])
def test_what_is_no_state_is_refused_and_changes_nothing(wrong):
    before = tf32_state()
    with pytest.raises(OptionError, match=r"enabled=.*True, False or what set_tf32"):
        set_tf32(wrong)
    assert tf32_state() == before
