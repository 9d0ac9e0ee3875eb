"""Calls of ever other sizes, as networks over graphs are given: none costs a trial of its own."""

import copy

import pytest
import torch
from torch import nn

import fxamp
from fxamp.capture import recomputed, size_guards, sizes
from fxamp.capture.computed import computed
from fxamp.capture.sizes import TRIALS_BEFORE_GUARD, Sizes
from fxamp.model.engine import engine_of

LOW = torch.bfloat16
EXACT = {"overrides": {"*": "deny"}}


class Conv(nn.Module):
    """Takes edges of nodes to themselves away, however many there are, and gives each node one."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, edges):
        y = self.fc(x)
        edges = edges[:, edges[0] != edges[1]]
        own = torch.arange(y.size(0)).repeat(2, 1)
        source, target = torch.cat([edges, own], dim=1)
        if source.size(0) != target.size(0):
            raise ValueError("edges have two ends")
        sent = y[source] * (1 if y.shape[0] > 1 else 2)
        if sent.size(0) == source.view(-1, 1).size(0):  # which no fake tensor tells
            sent = sent / 2
        return torch.zeros_like(y).index_add(0, target, sent)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(Conv() for _ in range(3))
        self.halves = nn.Linear(8, 8)

    def forward(self, x, edges):
        for conv in self.convs:
            x = conv(x, edges).relu()
        rows = edges[0][edges[0] < x.shape[0] // 2 + 1]  # half of a size, rounded down
        return self.halves(x) + x[rows].sum(0)


def graph(step, nodes=None):
    generator = torch.Generator().manual_seed(step)
    nodes = nodes or 3 + step % 29
    many = 5 + 7 * step % 41
    return torch.randn(nodes, 8, generator=generator), torch.randint(nodes, (2, many), generator=generator)


def converted_pair(**options):
    torch.manual_seed(0)
    plain = Net()
    return plain, fxamp.convert(copy.deepcopy(plain), LOW, capture="symbolic", example_inputs=graph(0), **options)


@pytest.fixture
def trials(monkeypatch):
    """How often anything was run on fake tensors of a call's sizes; a busy machine has the time that a guard takes."""
    monkeypatch.setattr(sizes, "MOST_TRIALS", 10_000)
    found, of = [], Sizes.of

    def counted(self, *given):
        found.append(self)
        return of(self, *given)

    monkeypatch.setattr(Sizes, "of", counted)
    return found


def test_sizes_are_tried_for_the_first_calls_alone(trials):
    plain, converted = converted_pair(**EXACT)
    for step in range(TRIALS_BEFORE_GUARD + 4):
        assert torch.equal(converted(*graph(step)), plain(*graph(step)))
    trials.clear()
    for step in range(100, 140):
        found, expected = converted(*graph(step)), plain(*graph(step))
        assert torch.equal(found, expected)
        found.square().mean().backward()
        expected.square().mean().backward()
    assert not trials
    assert len(engine_of(converted).all_variants()) <= 2
    for weight, its in zip(converted.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, its.grad)


def test_sizes_that_were_equal_by_chance_may_differ(trials):
    plain, converted = converted_pair(**EXACT)
    for step in range(TRIALS_BEFORE_GUARD + 4):
        x, edges = graph(step)
        edges = torch.stack([torch.arange(len(x)), torch.randperm(len(x))])  # as many as there are nodes
        assert torch.equal(converted(x, edges), plain(x, edges))
    trials.clear()
    for step in range(100, 120):
        assert torch.equal(converted(*graph(step)), plain(*graph(step)))
    assert not trials


def test_sizes_that_do_not_meet_the_condition_are_tried(trials):
    plain, converted = converted_pair(**EXACT)
    for step in range(TRIALS_BEFORE_GUARD + 4):
        converted(*graph(step))
    trials.clear()
    for step in range(100, 104):
        assert torch.equal(converted(*graph(step, nodes=1)), plain(*graph(step, nodes=1)))
    assert trials


def test_a_wrong_formula_is_not_taken(monkeypatch):
    look = recomputed.size_formulas

    def wrong(*given):
        found = look(*given)
        return found and found._replace(formulas={place: 7 for place in found.formulas})

    monkeypatch.setattr(recomputed, "size_formulas", wrong)
    plain, converted = converted_pair(**EXACT)
    for step in range(TRIALS_BEFORE_GUARD + 8):
        assert torch.equal(converted(*graph(step)), plain(*graph(step)))


def test_what_runs_before_a_graph_is_computed_once_for_a_call(monkeypatch):
    """Of a length that the data decides, each layer asks."""
    compared = []
    plain, converted = converted_pair(**EXACT)
    for step in range(TRIALS_BEFORE_GUARD + 4):
        converted(*graph(step))
    monkeypatch.setattr(
        recomputed,
        "computed",
        lambda node, known: (compared.append(node) if node not in known else None, computed(node, known))[1],
    )
    assert torch.equal(converted(*graph(99)), plain(*graph(99)))
    assert compared
    assert len(compared) == len(set(compared))


def test_a_graph_for_one_size_asks_nothing_of_calls_of_other_sizes():
    """Its functions would run for nothing."""
    _, converted = converted_pair(**EXACT)
    converted(*graph(0))
    (first,) = engine_of(converted).all_variants()
    assert first.captured.is_for_one_size
    assert first.captured.further is not None
    assert first.captured.inputs_for(converted, list(graph(0))) is not None
    assert first.captured.inputs_for(converted, list(graph(1))) is None


def test_equal_sizes_are_two_symbols():
    given = list(map(size_guards.of_any_size, [torch.ones(4), torch.ones(4)]))
    made = size_guards.symbolically(lambda mode, inputs: inputs[0].shape[0] + inputs[1].shape[0], given)
    assert made is not None
    assert len(made[1].node.expr.free_symbols) == 2
