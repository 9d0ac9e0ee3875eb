"""Objects that are linked in many ways (an automaton, a tree that knows its parents): each is looked at once."""

import copy

import torch
from torch import nn

import fxamp
from fxamp.capture import objects
from fxamp.capture.objects import EVERYTHING, Scope, frozen, walk
from fxamp.model.engine import engine_of

ALL = Scope(frozenset({EVERYTHING}), {})
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class State:
    def __init__(self, weight):
        self.weight, self.next = weight, []


def automaton(states=60, links=40):
    found = [State(place / states) for place in range(states)]
    for place, state in enumerate(found):
        state.next = [found[(7 * place + link * link + 1) % states] for link in range(links)]
    return found[0]


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.start = nn.Linear(8, 8), automaton()

    def forward(self, x):
        return self.fc(x) * (1 + self.start.next[0].weight)


def test_each_is_looked_at_once(monkeypatch):
    start, asked = automaton(), []
    plain = objects._parts_of
    monkeypatch.setattr(objects, "_parts_of", lambda value, scope: asked.append(value) or plain(value, scope))
    frozen(start, ALL)
    assert len(asked) <= 2 * 60 * objects.DEPTH  # states and their lists, perhaps once at each depth
    parts = [id(part) for part in walk(start) if not isinstance(part, float)]
    assert len(parts) == len(set(parts)) <= 2 * 60


def test_stand_ins_are_equal_where_objects_are():
    start = automaton()
    before = frozen(start, ALL)
    assert frozen(start, ALL) == before
    start.next[5].next[3].weight += 1
    assert frozen(start, ALL) != before
    one, other = [1.0], [2.0]
    assert frozen([one, one], ALL) != frozen([one, other], ALL)
    assert frozen([one, [one]], ALL) == frozen(copy.deepcopy([one, [one]]), ALL)
    ring = [1.0]
    ring.append(ring)
    assert frozen(ring, ALL) == frozen(ring, ALL)


def test_what_is_met_deep_inside_first_is_looked_into_where_it_is_near():
    inner = [[["x"]]]
    outer = [[[[inner]]], inner]
    before = frozen(outer, ALL)
    inner[0][0][0] = "y"
    assert frozen(outer, ALL) != before


def test_a_change_is_seen_and_others_are_none():
    torch.manual_seed(0)
    model = Reads()
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, overrides={"*": "deny"})
    for _ in range(2):
        assert torch.equal(converted(X), model(X))
    for each in (model, converted):
        each.start.next[0].weight = 5.0
    assert torch.equal(converted(X), model(X))
    assert len(engine_of(converted).all_variants()) == 2
