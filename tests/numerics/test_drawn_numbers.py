"""Numbers that a forward draws outside of torch: each run of a look draws the same, and the caller's are untouched."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import fxamp
from fxamp.randomness import generator_states, moved_since, set_generators

X = torch.randn(4, 16)
DRAWS = {
    "random": random.random,
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: float(torch.rand(())),
}


class Drawing(nn.Module):
    """Its control flow hangs on a layer's result: Dynamo's at O1, and as it is written at O2."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.last, self.draw = nn.Linear(16, 16), nn.Linear(16, 16), draw

    def forward(self, x):
        h = self.first(x)
        if h.sum() > -1e9:
            h = h * (1 + self.draw())
        return self.last(h)


@pytest.fixture(params=DRAWS, ids=str)
def draw(request):
    return DRAWS[request.param]


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_both_runs_of_a_comparison_draw_the_same(draw, opt_level):
    model = Drawing(draw)
    converted = fxamp.convert(copy.deepcopy(model), torch.float16, opt_level=opt_level)
    errors = {fxamp.compare(model, converted, (X,)).output for _ in range(3)}
    assert len(errors) == 1 and errors.pop() < 2e-3


LOOKS = {
    "compare": lambda model, converted: fxamp.compare(model, converted, (X,)),
    "find_nan": lambda model, converted: fxamp.find_nan(converted, (X,)),
    "profile": lambda model, converted: fxamp.profile(model, [X], progress=False),
    "find_deny": lambda model, converted: fxamp.find_deny(model, converted, (X,), tolerance=1e-9),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_draws_none_of_the_callers_numbers(draw, look):
    model = Drawing(draw)
    converted = fxamp.convert(model, torch.float16)
    converted(X)
    before = generator_states()
    LOOKS[look](model, converted)
    assert moved_since(before) == set()


class Overflowing(Drawing):
    """Past fp16's range where what it draws is above a half."""

    def forward(self, x):
        h = self.first(x)
        if h.sum() > -1e9:
            h = h + (1.0 if self.draw() < 0.5 else 1e4)
        return self.last(h * 10)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_watched_call_is_run_again_with_the_numbers_that_it_drew(draw, opt_level):
    """With others every second run would be finite, and nothing could be said of it."""
    model, told = fxamp.convert(Overflowing(draw), torch.float16, opt_level=opt_level), []
    for seed in range(10):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        with fxamp.watch_nan(model, raises=False) as watch:
            model(X).mean().backward()
        told.append(watch.found)
    assert 1 < told.count(None) < 9
    assert all(found is None or (found.is_bad_in_float32 is False and not found.unknown) for found in told)


def test_generators_are_told_apart_and_set():
    before = generator_states()
    for name, draw_one in {"python": DRAWS["random"], "numpy": DRAWS["numpy"], "cpu": DRAWS["torch"]}.items():
        expected = draw_one()
        assert moved_since(before) == {name}
        set_generators(before)
        assert moved_since(before) == set()
        assert draw_one() == expected
        set_generators(before)
