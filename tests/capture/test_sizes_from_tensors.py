"""Sizes and orders that are elements of tensors: x.permute(*order), x.view(*sizes)."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp

BF16 = torch.bfloat16


class Net(nn.Module):
    """A layer, what asks for sizes, and what reads its result."""

    def __init__(self, asks, reads):
        super().__init__()
        self.asks, self.reads = asks, reads
        self.first, self.second, self.last = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 8, 3, padding=1),
            nn.Linear(8, 8),
        )
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.order = torch.tensor([0, 1, 3, 2])
        self.register_buffer("sizes", torch.tensor([2, 4, 8, 8]))

    def forward(self, x, *more):
        return self.reads(self, self.asks(self, self.first(x), *more))


ASKS = {
    "made in forward": lambda m, x: x.permute(*torch.tensor([0, 1, 3, 2])),
    "computed": lambda m, x: x.permute(*torch.cat([torch.arange(2), torch.tensor([2]) + torch.tensor([1, 0])])),
    "an attribute": lambda m, x: x.permute(*m.order),
    "a buffer": lambda m, x: x.view(*m.sizes),
    "of another tensor": lambda m, x: x.reshape(*torch.tensor(x.shape)),
    "an input": lambda m, x, sizes: x.view(*sizes),
}
READS = {
    "chunk": lambda m, x: sum(part.exp().sum() for part in m.second(x).chunk(2, 1)),
    "split": lambda m, x: sum(part.log_softmax(-1).sum() for part in m.last(x).split([2, 6], -1)),
    "unbind": lambda m, x: sum(part.exp().sum() for part in m.second(x).unbind(1)),
    "var_mean": lambda m, x: sum(part.exp().sum() for part in torch.var_mean(m.second(x), 1)),
    "attention": lambda m, x: sum(
        part.exp().sum() for part in m.attention(*[x.flatten(2).transpose(1, 2).repeat(1, 1, 2)] * 3)
    ),
    "kept together": lambda m, x: F.gelu(m.second(x)).chunk(2, 1),
}


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("asks", ASKS)
def test_what_stands_behind_runs_as_near_as_under_autocast(asks, reads, opt_level):
    torch.manual_seed(0)
    model, given = Net(ASKS[asks], READS[reads]), (torch.randn(2, 3, 8, 8),)
    given += (torch.tensor([2, 4, 8, 8]),) if asks == "an input" else ()

    def numbers(run):
        result = run(*given)
        return torch.cat([part.float().flatten() for part in (result if isinstance(result, tuple) else (result,))])

    exact = numbers(model).detach()
    with torch.autocast("cpu", BF16):
        theirs = numbers(model).detach()
    converted = fxamp.convert(model, dtype=BF16, opt_level=opt_level)
    ours = numbers(converted)
    ours.sum().backward()
    assert (ours.detach() - exact).norm() <= 2 * (theirs - exact).norm() + 1e-3 * exact.norm()
    assert all(part.dtype == torch.float32 for part in (converted(*given) if reads == "kept together" else ()))
    assert all(weight.grad is not None for name, weight in converted.named_parameters() if name.startswith("first"))


@pytest.mark.parametrize("asks", ["made in forward", "an attribute", "a buffer"])
def test_numbers_that_the_model_holds_are_known(asks):
    model = Net(ASKS[asks], READS["chunk"])
    converted = fxamp.convert(model, dtype=BF16, example_inputs=(torch.randn(2, 3, 8, 8),))
    rows = fxamp.report(converted).rows
    assert [row.dtype for row in rows if row.op in ("conv2d", "chunk")] == ["bfloat16", "bfloat16", "float32"]
    assert len([row for row in rows if row.op == "to" and row.dtype == "float32"]) == 1


class Part(nn.Module):
    def __init__(self, asks):
        super().__init__()
        self.asks, self.matrix, self.order = asks, nn.Parameter(torch.randn(4, 4)), torch.tensor([0, 1, 3, 2])
        self.layer = nn.Linear(8, 8)

    def forward(self, x, sizes):
        x = x.permute(*self.order) if self.asks == "order" else x.view(*sizes)
        return torch.matmul(F.softplus(self.matrix), self.layer(x - 0.5).flatten(2))


class Whole(nn.Module):
    """No graph holds it: its part is given low values."""

    def __init__(self, asks):
        super().__init__()
        self.layers, self.part = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)), Part(asks)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x, sizes):
        self.scale.data = self.scale.data * 1.0
        return self.part(self.layers(x), sizes)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("asks", ["order", "sizes"])
def test_a_part_that_is_given_low_values_has_operands_of_one_dtype(asks, dtype, opt_level):
    torch.manual_seed(0)
    model, given = Whole(asks), (torch.randn(2, 3, 8, 8), torch.tensor([2, 4, 8, 8]))
    exact = model(*given).detach()
    converted = fxamp.convert(model, dtype=dtype, opt_level=opt_level)
    for _ in range(2):
        result = converted(*given)
        result.sum().backward()
    torch.testing.assert_close(result, exact, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_low_input_meets_float32_weights(opt_level):
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, sizes):
            return self.layer(x.view(*sizes))

    converted = fxamp.convert(Asking(), dtype=BF16, opt_level=opt_level)
    assert converted(torch.randn(2, 16).to(BF16), torch.tensor([4, 8])).shape == (4, 8)
