"""Two tensors are compared as they come: no bound is rounded for a comparison."""

import copy

import pytest
import torch
from torch import nn

import fxamp

LOW = (torch.float16, torch.bfloat16)
OPS = ("lt", "le", "gt", "ge", "eq", "ne")


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.function = nn.Linear(64, 64, bias=False), function
        self.register_buffer("grid", torch.arange(-3.0, 9.0) * 0.4 - 1)

    def forward(self, x):
        return self.function(self.a(x).unsqueeze(-1), self.grid)


HALF_OPEN = {
    "&": lambda y, g: ((y >= g[:-1]) & (y < g[1:])).float(),
    "logical_and": lambda y, g: torch.logical_and(y >= g[:-1], y < g[1:]).float(),
    "product": lambda y, g: (y >= g[:-1]).float() * (y < g[1:]).float(),
    "dtype of the value": lambda y, g: ((y >= g[:-1]) & (y < g[1:])).to(y.dtype),
    "where": lambda y, g: torch.where(y >= g[:-1], torch.where(y < g[1:], 1.0, 0.0), 0.0),
    "not": lambda y, g: ((y >= g[:-1]) & ~(y >= g[1:])).float(),
    "functions": lambda y, g: (torch.ge(y, g[:-1]) & torch.lt(input=y, other=g[1:])).float(),
    "the other way round": lambda y, g: ((g[:-1] <= y) & (g[1:] > y)).float(),
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("level", ["strict", "balanced", "aggressive"])
@pytest.mark.parametrize("function", HALF_OPEN.values(), ids=HALF_OPEN)
def test_each_value_is_in_one_half_open_interval_as_under_autocast(function, level, dtype):
    torch.manual_seed(0)
    model, x = Net(function), torch.randn(512, 64)
    with torch.autocast("cpu", dtype):
        expected = model(x)
    found = fxamp.convert(copy.deepcopy(model), dtype, (x,), level=level)(x)
    assert torch.equal(found, expected.float())
    values = model.a(x)
    inside = (values > -2.1) & (values < 2.1)  # the outermost bounds are -2.2 and 2.2
    assert inside.sum() > 30_000 and (found.sum(-1)[inside] == 1).all()


@pytest.mark.parametrize("dtype", LOW)
def test_positions_are_told_apart(dtype):
    model, x = Net(lambda y, g: torch.arange(1000.0) == torch.round(y[:, :1, 0].abs() * 300)), torch.randn(64, 64)
    with torch.autocast("cpu", dtype):
        expected = model(x)
    assert torch.equal(fxamp.convert(model, dtype, (x,))(x), expected)


@pytest.mark.parametrize("op", OPS)
def test_operands_of_two_precisions_need_no_cast(op):
    x = torch.randn(8, 64)
    report = fxamp.report(fxamp.convert(Net(lambda y, g: getattr(torch, op)(y, g)), torch.float16, (x,)))
    assert report.casts == 1  # of x
    (row,) = [row for row in report.rows if row.op == op]
    assert row.precision == "none" and row.reason == "compares its operands as they come"


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("op", OPS)
def test_a_comparison_that_writes_into_a_value_gives_what_it_gave(op, dtype):
    def function(y, g):
        z = y * torch.ones(12)
        getattr(z, op + "_")(g)
        return z

    torch.manual_seed(0)
    model, x = Net(function), torch.randn(32, 64)
    found, expected = fxamp.convert(copy.deepcopy(model), dtype, (x,))(x), model(x)
    assert found.dtype == torch.float32 and (found != expected).float().mean() < 0.01


def test_a_number_is_compared_in_the_precision_of_the_value():
    """1e5 is beyond float16, so the comparison is made in float32."""
    x = torch.randn(8, 64)
    model = fxamp.convert(Net(lambda y, g: (y * 1.5e5).abs() < 1e5), torch.float16, (x,))
    assert model(x).any() and not model(x).all()


@pytest.mark.parametrize("join", ["&", "|", "^", "not"])
def test_words_of_python_write_nothing(join):
    """`operator.and_` ends in an underscore as in-place methods do."""
    joined = {"&": lambda a, b: a & b, "|": lambda a, b: a | b, "^": lambda a, b: a ^ b, "not": lambda a, b: a & ~b}
    function = joined[join]
    x = torch.randn(8, 64)
    converted = fxamp.convert(Net(lambda y, g: function(y > 0, y < 1).float()), torch.float16, (x,))
    rows = fxamp.report(converted).rows
    assert not [row.reason for row in rows if "written in place" in row.reason]
    assert {row.precision for row in rows if row.op in ("gt", "lt")} == {"low"}
    kept = x > 0
    mask = kept.clone()
    fxamp.convert(Masked(function), torch.float16, (x, mask))(x, mask)
    assert torch.equal(mask, kept)


class Masked(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.function = nn.Linear(64, 64), function

    def forward(self, x, mask):
        return self.a(x) * self.function(mask, x < 1)
