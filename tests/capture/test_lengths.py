"""How many items unbind, split and chunk give is asked again in a call of other sizes."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import fxamp
from fxamp.model.engine import engine_of


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.cell, self.layer, self.function = nn.GRUCell(4, 4), nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self, x)


def _cells(m, parts):
    state = None
    for part in parts:
        state = m.cell(part, state)
    return state


def _first_and_others(m, x):
    first, *others = m.layer(x).unbind(1)
    return first + sum(others)


COUNTED = {
    "unbind": lambda m, x: _cells(m, x.unbind(1)),
    "torch.unbind": lambda m, x: _cells(m, torch.unbind(x, dim=1)),
    "split": lambda m, x: sum(part.mean(1) for part in m.layer(x).split(1, 1)),
    "split along keys": lambda m, x: sum(part.tanh() for part in (m.layer(x) @ x.mT).split(1, dim=-1)),
    "split by a size": lambda m, x: [part.tanh() for part in m.layer(x).split(x.shape[1], dim=-1)],
    "split behind others": lambda m, x: [part.tanh() for part in m.layer(x).cumprod(0).split(x.shape[1], dim=-1)],
    "split of two": lambda m, x: sum(part.sum(1) for part in torch.split(m.layer(x), 2, dim=1)),
    "chunk": lambda m, x: [part.tanh() for part in m.layer(x).chunk(x.shape[1], 1)],
    "chunk along steps": lambda m, x: [part.tanh() for part in m.layer(x).chunk(3, 1)],
    "len": lambda m, x: m.layer(x) * len(x.unbind(1)),
    "reversed": lambda m, x: _cells(m, x.unbind(1)[::-1]),
    "reversed()": lambda m, x: _cells(m, reversed(x.unbind(1))),
    "from the second": lambda m, x: _cells(m, x.unbind(1)[1:]),
    "enumerate": lambda m, x: sum(i * part for i, part in enumerate(m.layer(x).unbind(1))),
    "zip": lambda m, x: [a * b for a, b in zip(m.layer(x).unbind(1), x.unbind(1), strict=True)],
    "list": lambda m, x: torch.stack(list(m.layer(x).unbind(1)), 1),
    "star": _first_and_others,
    "stack": lambda m, x: torch.stack(m.layer(x).unbind(1)),
    "cat": lambda m, x: torch.cat(m.layer(x).split(1, 1), 0),
    "pad_sequence": lambda m, x: pad_sequence(m.layer(x).unbind(1)),
    "returned": lambda m, x: m.layer(x).unbind(1),
    "returned in a dict": lambda m, x: {"parts": m.layer(x).split(1, 1)},
    "repeated": lambda m, x: torch.cat([m.layer(x).mean(1)] * x.shape[1], 1),
}


@pytest.mark.parametrize("example", [False, True], ids=["at the first call", "example"])
@pytest.mark.parametrize("name", COUNTED)
def test_other_sizes_have_other_numbers_of_items(name, example):
    torch.manual_seed(0)
    model = Net(COUNTED[name])
    given = {"example_inputs": (torch.randn(2, 3, 4),)} if example else {}
    converted = fxamp.convert(model, torch.bfloat16, overrides={"*": "deny"}, **given)
    for steps in (3, 5, 2, 3):
        x = torch.randn(2, steps, 4)
        torch.testing.assert_close(converted(x), model(x), rtol=0, atol=0)
    assert set(fxamp.report(converted).captures) == {"symbolic"}


@pytest.mark.parametrize("name", COUNTED)
def test_one_graph_is_for_all_other_sizes_with_as_many_items(name):
    torch.manual_seed(0)
    model = Net(COUNTED[name])
    converted = fxamp.convert(model, torch.bfloat16, overrides={"*": "deny"})
    for rows in (2, 3, 5, 4, 7, 2):
        x = torch.randn(rows, 3, 4)
        torch.testing.assert_close(converted(x), model(x), rtol=0, atol=0)
    assert len(engine_of(converted).all_variants()) <= 2  # the first is for one size, if it counts at all


FIXED = {
    "split features": lambda m, x: sum(part.tanh() for part in m.layer(x).split(2, dim=-1)),
    "unpacked": lambda m, x: _sum_of_two(*m.layer(x).chunk(2, -1)),
    "indexed": lambda m, x: m.layer(x).unbind(-1)[0] + m.layer(x).split(2, -1)[-1].sum(-1),
    "sizes": lambda m, x: sum(part.sum() for part in m.layer(x).split([1, 3], -1)),
    "chunked features": lambda m, x: sum(map(torch.tanh, m.layer(x).chunk(2, dim=-1))),
    "a weight": lambda m, x: m.layer(x) + sum(m.layer.weight.unbind(0)),
    "a pair": lambda m, x: sum(m.layer(x).max(-1)[:1]),
}


def _sum_of_two(a, b):
    return a + b


@pytest.mark.parametrize("name", FIXED)
def test_what_is_not_counted_or_always_the_same_needs_one_graph(name):
    torch.manual_seed(0)
    model = Net(FIXED[name])
    converted = fxamp.convert(model, torch.bfloat16, overrides={"*": "deny"})
    for steps in (3, 5, 2):
        x = torch.randn(2, steps, 4)
        torch.testing.assert_close(converted(x), model(x), rtol=0, atol=0)
    assert len(engine_of(converted).all_variants()) == 1


def test_a_list_of_values_whose_sizes_depend_on_data_is_followed():
    class Kept(nn.Linear):
        def forward(self, x):
            kept = x[x[:, 0] > 0]
            return super().forward(torch.cat([kept, kept]))

    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    model = Kept(8, 8)
    converted = fxamp.convert(model, torch.bfloat16, (x,), capture="symbolic")
    for given in (x, -x):
        assert torch.allclose(converted(given), model(given), atol=2**-5)  # sums of eight products below 1
