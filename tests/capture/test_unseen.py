"""Dynamo's look at a model whose file speaks of autocast leaves nothing behind: forward's Python runs once a call."""

import collections
import random
import subprocess
import sys

import numpy
import pytest
import torch
from torch import nn

import fxamp
from fxamp.capture.reached import Reached, functions_reached

SPEAKS_OF = "autocast"  # so the lines that are protected from it are looked for, by a run on fake tensors
STATE, LOG, SEEN, RECENT, CALLS = {"calls": 0}, [], set(), collections.deque(maxlen=3), 0


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        global CALLS
        CALLS += 1
        STATE["calls"] += 1
        LOG.append("call")
        SEEN.add(len(LOG))
        RECENT.append(CALLS)
        y = self.fc(x)
        if random.random() < 0.5:
            y = y * 2
        return y * STATE["calls"] + float(numpy.random.rand())


def started_again():
    global CALLS
    CALLS = 0
    STATE["calls"] = 0
    for container in (LOG, SEEN, RECENT):
        container.clear()
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    return Counting()


@pytest.mark.parametrize("example", [None, torch.ones(2, 4)])
def test_side_effects_happen_once_a_call(example):
    expected, model = [], started_again()
    expected = [model(torch.ones(2, 4)) for _ in range(3)]
    state = (dict(STATE), list(LOG), set(SEEN), list(RECENT), CALLS, random.random(), numpy.random.rand())
    model = fxamp.convert(started_again(), torch.bfloat16, example, capture="dynamo")
    for call in expected:
        torch.testing.assert_close(model(torch.ones(2, 4)), call, rtol=2**-6, atol=2**-6)
    assert state == (dict(STATE), list(LOG), set(SEEN), list(RECENT), CALLS, random.random(), numpy.random.rand())


def test_everything_is_put_back_after_an_error():
    model = started_again()
    reached = Reached(functions_reached([Counting.forward], ())[0])
    with pytest.raises(ZeroDivisionError), reached.kept():
        model(torch.ones(2, 4))
        raise ZeroDivisionError
    assert (STATE, LOG, SEEN, list(RECENT), CALLS) == ({"calls": 0}, [], set(), [], 0)


FIRST_CAPTURE = """
import gc, weakref
import torch, fxamp

def converted_once():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    fxamp.convert(model, example_inputs=(torch.randn(2, 8),), capture="symbolic")
    return weakref.ref(model[0])

inner = converted_once()
gc.collect()
assert inner() is None, "the first model is kept alive"
ignored, overridable = torch.overrides.get_ignored_functions(), torch.overrides.get_overridable_functions()
known = {function for functions in overridable.values() for function in functions}
assert {torch.zeros, torch.arange, torch.is_grad_enabled, torch.finfo} <= ignored, "torch's functions are unknown"
ours = [f for f in {*ignored, *known} if "fxamp" in getattr(getattr(f, "__code__", None), "co_filename", "")]
assert not ours, ours
"""


def test_the_first_capture_of_a_process_leaves_torchs_tables_as_they_are():
    done = subprocess.run([sys.executable, "-c", FIRST_CAPTURE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
