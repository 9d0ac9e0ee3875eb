"""Writes that add to what is there are sums, by whatever op: float32, as scatter_add's and index_add's."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fxamp
from fxamp import ir
from fxamp.passes.values import adds_to_what_is_there

Write = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ROWS, WIDTH = 512, 8


def _flat(index: torch.Tensor) -> torch.Tensor:
    return index[:, None] * WIDTH + torch.arange(WIDTH)


def _rows(index: torch.Tensor) -> torch.Tensor:
    return index[:, None].expand(-1, WIDTH)


SUMS: dict[str, Write] = {
    "index_put": lambda h, i: h.new_zeros(4, WIDTH).index_put((i,), h, accumulate=True),
    "index_put, by position": lambda h, i: h.new_zeros(4, WIDTH).index_put((i,), h, True),
    "index_put_": lambda h, i: h.new_zeros(4, WIDTH).index_put_((i,), h, accumulate=True),
    "put": lambda h, i: h.new_zeros(4, WIDTH).put(_flat(i), h, accumulate=True),
    "put_": lambda h, i: h.new_zeros(4, WIDTH).put_(_flat(i), h, accumulate=True),
}
MOVES: dict[str, Write] = {
    "index_put": lambda h, i: h.new_zeros(ROWS, WIDTH).index_put((i.sort().indices,), h),
    "put": lambda h, i: h.new_zeros(ROWS, WIDTH).put(_flat(i.sort().indices), h, accumulate=False),
    "scatter": lambda h, i: h.new_zeros(ROWS, WIDTH).scatter(0, _rows(i.sort().indices), h),
}


class Placed(nn.Module):
    """Layer, write, layer."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.first, self.second, self.write = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), write

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self.second(self.write(self.first(x), index))  # type: ignore[no-any-return]


def _model(write: Write) -> tuple[Placed, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Placed(write), torch.randn(ROWS, WIDTH), torch.randint(0, 4, (ROWS,))


def _precision(converted: nn.Module, op: str) -> str:
    (row,) = [row for row in fxamp.report(converted).rows if row.op == op]
    return str(row.precision)


@pytest.mark.parametrize("level", ["strict", "balanced", "aggressive"])
@pytest.mark.parametrize("name", SUMS)
def test_a_write_that_adds_is_float32(name: str, level: str) -> None:
    model, x, index = _model(SUMS[name])
    converted = fxamp.convert(model, torch.bfloat16, level=level)
    converted(x, index).sum().backward()
    assert _precision(converted, name.split(",")[0].rstrip("_")) == "high"


@pytest.mark.parametrize("reduce", ["add", "multiply"])
def test_a_scatter_that_reduces_is_float32(reduce: str) -> None:
    model, x, index = _model(lambda h, i: h.new_ones(4, WIDTH).scatter_(0, _rows(i), h, reduce=reduce))
    with torch.no_grad():  # torch has no gradient for it
        converted = fxamp.convert(model, torch.bfloat16)
        converted(x, index)
    assert _precision(converted, "scatter") == "high"


@pytest.mark.parametrize("name", MOVES)
def test_a_write_that_only_moves_is_low_where_its_source_is(name: str) -> None:
    model, x, index = _model(MOVES[name])
    converted = fxamp.convert(model, torch.bfloat16)
    converted(x, index).sum().backward()
    assert _precision(converted, name) == "low"


@pytest.mark.parametrize("name", SUMS)
def test_4096_equal_rows_add_up(name: str) -> None:
    """In bfloat16 the sum of ones stays at 256."""
    model = Placed(SUMS[name])
    with torch.no_grad():
        for layer in (model.first, model.second):
            layer.weight.copy_(torch.eye(WIDTH))
            layer.bias.zero_()
    converted = fxamp.convert(model, torch.bfloat16)
    found = converted(torch.ones(4096, WIDTH), torch.zeros(4096, dtype=torch.long))
    torch.testing.assert_close(found[0], torch.full((WIDTH,), 4096.0))


def test_the_reason_says_what_is_added_and_who_asks_gets_it_low() -> None:
    model, x, index = _model(SUMS["index_put"])
    converted = fxamp.convert(model, torch.bfloat16)
    converted(x, index)
    (row,) = [row for row in fxamp.report(converted).rows if row.op == "index_put"]
    assert "adds to what is there" in row.reason
    assert "deny list" not in row.reason
    chosen = fxamp.convert(model, torch.bfloat16, lists=fxamp.OpLists.default().override(allow=["index_put"]))
    chosen(x, index)
    assert _precision(chosen, "index_put") == "low"


def test_the_backend_form_always_adds() -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten._unsafe_masked_index_put_accumulate.default, (graph.placeholder("x"),))
    ir.set_mark(node, op="_unsafe_masked_index_put_accumulate")
    assert adds_to_what_is_there(node)
