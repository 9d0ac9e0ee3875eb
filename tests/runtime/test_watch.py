"""What the host is told about the scale: one INFO line, one warning, a history."""

import logging

import pytest
import torch

from fxamp.runtime import watch
from fxamp.runtime.step_result import HostCopy
from fxamp.runtime.watch import ScaleWatch


def told(history, floor=0.0, settled_after=watch.SETTLED_AFTER):
    """A watch that saw a history of "+" (good) and "!" (skipped), the scale halving at each "!"."""
    seen, scale = ScaleWatch(floor, settled_after), 2.0**16
    for event in history:
        seen.observe([HostCopy(torch.tensor([float(event == "!"), scale]))])
        scale *= 0.5 if event == "!" else 1.0
    return seen


def messages(caplog, level):
    return [record.message for record in caplog.records if record.levelno == level]


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ("!!!" + "+" * 100, "loss scale settled at 8192 after 3 skipped steps"),
        ("+" * 100, "loss scale settled at 65536 after 0 skipped steps"),
        ("!" + "+" * 99 + "!" + "+" * 99, None),
        ("!" + "+" * 100 + "!" + "+" * 300, "loss scale settled at 32768 after 1 skipped steps"),
    ],
)
def test_one_line_when_the_scale_has_settled(history, expected, caplog):
    with caplog.at_level(logging.INFO, "fxamp"):
        told(history)
    found = messages(caplog, logging.INFO)
    assert len(found) == (expected is not None)
    assert expected is None or found[0].startswith(expected)


@pytest.mark.parametrize(("skips", "warns"), [(5, False), (10, False), (11, True)])
def test_warning_above_five_percent_of_200_steps(skips, warns, caplog):
    every = ["!" if number < skips else "+" for number in range(200)]
    told("+" * 100 + "".join(every) + "+" * 50)
    found = messages(caplog, logging.WARNING)
    assert len(found) == warns
    assert not warns or "of the last 200 steps were skipped" in found[0]


def test_skips_at_the_floor_count_in_a_row():
    assert told("!!!!", floor=2.0**14).skips_at_floor == 2
    assert told("!!!!+", floor=2.0**14).skips_at_floor == 0
    assert told("!!!!+!", floor=2.0**14).skips_at_floor == 1


def test_history_and_counters():
    seen = told("+!+")
    assert [(r.step, r.scale, r.skipped) for r in seen.history] == [
        (1, 2.0**16, False),
        (2, 2.0**16, True),
        (3, 2.0**15, False),
    ]
    assert seen.counters() == {"steps": 3, "skipped_steps": 1, "skips_at_floor": 0, "good_steps": 1}


def test_a_step_of_two_optimizers_is_skipped_if_either_is():
    seen = ScaleWatch(0.0)
    seen.observe([HostCopy(torch.tensor([0.0, 8.0])), HostCopy(torch.tensor([1.0, 8.0]))])
    assert seen.skipped_steps == 1 and len(seen.history) == 1


def test_outcomes_of_a_gpu_are_read_two_steps_late(monkeypatch):
    """So that no step waits for itself, and all ranks read the same ones."""
    monkeypatch.setattr(HostCopy, "is_remote", True)
    seen = told("!!!!")
    assert seen.steps == 2
    seen.drain()
    assert seen.steps == 4


def test_resumed_run_does_not_settle_twice(caplog):
    first = told("+" * 100)
    second = ScaleWatch(0.0)
    second.restore(first.counters())
    with caplog.at_level(logging.INFO, "fxamp"):
        for _ in range(150):
            second.observe([HostCopy(torch.tensor([0.0, 8.0]))])
    assert second.steps == 250 and not messages(caplog, logging.INFO)


def test_least_scale_counts_backoffs_that_have_not_arrived(monkeypatch):
    """As far as the host knows: the scale known last, and each update since may have halved it."""
    seen = ScaleWatch(0.0)
    seen.note_scale(8.0)
    assert seen.least_scale(0.5) == 8.0
    monkeypatch.setattr(HostCopy, "is_remote", True)
    for least in (4.0, 2.0):
        seen.observe([HostCopy(torch.tensor([0.0, 8.0]))])
        assert seen.least_scale(0.5) == least
    seen.observe([HostCopy(torch.tensor([0.0, 8.0]))])  # the first has arrived: 8, and 3 updates from there
    assert seen.least_scale(0.5) == 1.0
    seen.note_scale(64.0)
    seen.observe([HostCopy(torch.tensor([0.0, 64.0]))])  # what arrives is older than the 64
    assert seen.least_scale(0.5) == 32.0
    seen.drain()
    assert seen.least_scale(0.5) == 32.0
