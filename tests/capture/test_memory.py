"""Inputs and weights that lie in the same memory: what is written into one is read through the other."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.model.engine import engine_of

CAPTURES = ["symbolic", "dynamo"]
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Views(nn.Module):
    """A buffer that is written, and a view of its first rows, kept in one way or another."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept = kept
        self.register_buffer("table", torch.eye(8))
        self.keep(self.table[:4])

    def keep(self, view) -> None:
        if self.kept == "buffer":
            self.register_buffer("view", view)
        elif self.kept == "parameter":
            self.view = nn.Parameter(view)
        elif self.kept == "list":
            self.views = [view]
        else:
            self.view = view

    def forward(self, x):
        view = self.views[0] if self.kept == "list" else self.view
        before = F.linear(x, view)
        self.table.mul_(0.5).add_(1)
        return before + F.linear(x, view)


class Written(nn.Module):
    """One argument is written between two reads of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, a, b):
        before = self.first(b)
        a.add_(1)
        return before + self.second(b)


def converted(model, capture):
    return fxamp.convert(model, dtype=torch.bfloat16, capture=capture)


def assert_near(given, expected):
    """Within eight roundings to bfloat16 of the largest number: a forgotten write is ten times as far off."""
    torch.testing.assert_close(given, expected, rtol=0, atol=2**-5 * float(expected.abs().max()))


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("kept", ["attribute", "buffer", "parameter", "list"])
@torch.no_grad()
def test_a_write_is_seen_through_a_view_that_is_kept(kept, capture):
    model, run = Views(kept), converted(Views(kept), capture)
    for _ in range(3):
        assert_near(run(X), model(X))


@pytest.mark.parametrize("capture", CAPTURES)
@torch.no_grad()
def test_buffers_that_become_views_of_each_other(capture):
    models = []
    for _ in range(2):
        model = Views("buffer")
        model.view = torch.eye(8)[:4]
        models.append(model)
    plain, run = models[0], converted(models[1], capture)
    for share in (False, True, False):
        for model in models:
            model.view = model.table[:4] if share else model.table[:4].clone()
        assert_near(run(X), plain(X))
        assert_near(run(X), plain(X))


@torch.no_grad()
def test_kept_weights_know_of_the_write():
    plain, run = Views("buffer"), converted(Views("buffer"), "symbolic")
    assert_near(run(X), plain(X))
    run.freeze()
    for _ in range(3):
        assert_near(run(X), plain(X))


SECOND = {"another": lambda a: torch.ones(4, 8), "the same": lambda a: a, "a view": lambda a: a[:]}


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("order", [list(SECOND), list(SECOND)[::-1]], ids=["another first", "another last"])
@torch.no_grad()
def test_arguments_that_share_memory(capture, order):
    torch.manual_seed(0)
    model = Written()
    run = converted(model, capture)
    for how in (*order, *order):
        one, other = X.clone(), X.clone()
        assert_near(run(one, SECOND[how](one)), model(other, SECOND[how](other)))
        assert torch.equal(one, other)


@pytest.mark.parametrize("capture", CAPTURES)
def test_arguments_made_in_inference_mode(capture):
    torch.manual_seed(0)
    model = Written()
    run = converted(model, capture)
    with torch.inference_mode():
        one, other = X.clone(), X.clone()
        assert_near(run(one, one[:]), model(other, other[:]))


@torch.no_grad()
def test_one_graph_for_each_way_of_sharing():
    run = converted(Written(), "symbolic")
    for how in (*SECOND, *SECOND):
        one = X.clone()
        run(one, SECOND[how](one))
    assert len(engine_of(run).all_variants()) == 3, "for one tensor twice, for two in the same memory, for two apart"
