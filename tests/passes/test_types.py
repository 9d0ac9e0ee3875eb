"""Types without example inputs: a preview decides as the graph that runs, wherever its types are right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp import ir
from fxamp.passes.types import type_of
from tests.language import CAST, DECIDE_IN_UNITS, OPS, assert_precision, captured, count_casts, decided, run_steps
from tests.passes.test_verify import MODELS


class NormedConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.fc = nn.LayerNorm(512), nn.Linear(512, 10)

    def forward(self, x):
        y = F.relu(self.first(x))
        return self.fc(self.norm((F.relu(self.second(y)) + y).flatten(1)))


class Gates(nn.Module):
    """Chunks, splits, unbound rows and tuples with indices, each read by items."""

    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(16, 64), nn.Linear(16, 4)

    def forward(self, x):
        i, f, g, o = self.fc(x).chunk(4, -1)
        values, indices = torch.max(torch.sigmoid(f) * torch.tanh(g), dim=-1)
        a, b = (torch.sigmoid(i) * o).split(8, -1)
        best = torch.cat((a, b), -1).topk(2, -1)[0]
        return self.out(torch.cat((a, b), -1)), values, indices, best, torch.full((2, 2), 0.5) * best


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.fc = nn.Embedding(9, 16), nn.Linear(16, 4)
        self.register_buffer("inverse", torch.rand(8))

    def forward(self, ids):
        x = self.table(ids)
        angles = torch.arange(ids.shape[1])[:, None] * self.inverse
        x = x * torch.cat((angles.cos(), angles.sin()), -1)
        keep = (ids != 0).unsqueeze(-1)
        pooled = (x * keep).sum(1) / keep.sum(1).clamp(min=1)
        return self.fc(pooled).softmax(-1).argmax(-1), self.fc(x.mean(1))


PREVIEWED = {
    **MODELS,
    "normed conv net": (NormedConvNet, torch.rand(2, 3, 8, 8)),
    "gates": (Gates, torch.rand(2, 16)),
    "positions": (Positions, torch.randint(0, 9, (2, 5))),
}


def rows(setting):
    return [
        (ir.mark(node).op, ir.mark(node).precision)
        for node in setting.graph.nodes
        if ir.mark(node).role == "" and node.op.startswith("call") and ir.mark(node).precision != "none"
    ]


@pytest.mark.parametrize("name", PREVIEWED)
def test_a_preview_decides_as_the_graph_that_runs(name):
    make, given = PREVIEWED[name]
    module = make().eval()
    known = captured(lambda m, x: m(x), given, module=module)
    preview = captured(lambda m, x: m(x), given, module=module, preview=True)
    for setting in (known, preview):
        run_steps((*DECIDE_IN_UNITS, CAST), setting)
    assert rows(preview) == rows(known)
    assert count_casts(preview) == count_casts(known)


def dtype_in_preview(function, *inputs):
    setting = captured(function, *inputs, preview=True)
    run_steps(DECIDE_IN_UNITS[:1], setting)
    last = next(node for node in setting.graph.nodes if node.op == "output").args[0]
    return ir.mark(last).type


FLOATS = torch.rand(4, 4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x > 0,
        lambda x: x.argmax(-1),
        lambda x: x.long(),
        lambda x: x.double(),
        lambda x: torch.softmax(x, -1, dtype=torch.float64),
        lambda x: torch.arange(4) + x,
        lambda x: torch.arange(4) * 2,
        lambda x: torch.arange(4) * 0.5,
        lambda x: torch.arange(4) / 2,
        lambda x: (x > 0).sum(),
        lambda x: (x > 0).float().mean(),
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x.new_zeros(3),
        lambda x: torch.zeros_like(x, dtype=torch.int64),
        lambda x: torch.full((2,), 0.5),
        lambda x: torch.full((2,), 1),
        lambda x: torch.full((2,), True),
        lambda x: torch.randint(0, 3, (2,)),
        lambda x: torch.randperm(3),
        lambda x: torch.zeros(2, dtype=torch.bool),
        lambda x: x.chunk(2)[0],
        lambda x: x.split([1, 3])[1],
        lambda x: x.unbind(0)[2],
        lambda x: x.max(1)[1],
        lambda x: x.sort()[1],
        lambda x: x.topk(2)[0],
        lambda x: x[x > 0],
        lambda x: F.one_hot(x.long(), 9),
        lambda x: x.type_as(x > 0),
        lambda x: x.to(torch.arange(3).dtype),
        lambda x: torch.complex(x, x),
        lambda x: torch.fft.rfft(x),
        lambda x: x.bool().any(),
        lambda x: (x > 0) & (x < 1),
        lambda x: ~(x > 0),
        lambda x: torch.bitwise_or(x.long(), 1),
        lambda x: x.masked_fill(x > 0, 0.0),
        lambda x: F.embedding(x.long(), torch.rand(5, 3)),
        lambda x: torch.gather(x, 1, x.long()),
        lambda x: x.T,
        lambda x: torch.logsumexp(x, -1),
        lambda x: x.cumsum(0),
        lambda x: (x > 0).cumsum(0),
        lambda x: torch.tensor([1.0, 2.0]),
        lambda x: torch.tensor([1, 2]),
        lambda x: x.abs().amax(),
        lambda x: torch.rsqrt(torch.arange(4)),
        lambda x: torch.stack((x, x)).int(),
        lambda x: x.clamp(min=torch.arange(4)),
        lambda x: torch.histc(x),
        lambda x: torch.tril(torch.ones(3, 3)) == 0,
        lambda x: torch.std_mean(x)[0],
        lambda x: x.shape[0] * x,
        lambda x: x.size(0) / x,
        lambda x: torch.nonzero(x),
    ],
)
def test_the_dtype_a_preview_infers(function):
    """Right, or not known: never wrong."""
    found, real = dtype_in_preview(function, FLOATS), type_of(function(FLOATS))
    assert found is None or found.dtype in (None, real.dtype), f"{found} instead of {real}"


def test_what_a_preview_does_not_know_is_left_alone():
    setting = captured(lambda x: F.linear(torch.fft.rfft(x).real, torch.rand(4, 3)), FLOATS, preview=True)
    run_steps((*DECIDE_IN_UNITS, CAST), setting)
    assert count_casts(setting) == 0


def test_an_unlisted_function_s_result_is_not_known_in_a_preview():
    custom = OPS["custom"]
    assert_precision(decided(lambda x, w: F.linear(custom(x), w), FLOATS, FLOATS), {"linear": "low"})
    preview = captured(lambda x, w: F.linear(custom(x), w), FLOATS, FLOATS, preview=True)
    run_steps((*DECIDE_IN_UNITS, CAST), preview)
    assert_precision(preview, {"linear": "high type"})


class WithSums(nn.Module):
    """Calls a kernel of attention, which gives its sums beside its result."""

    def __init__(self, take: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.qkv, self.out, self.take = nn.Linear(16, 48), nn.Linear(16, 16), take

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y, sums = self.take(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v))
        return self.out(y.transpose(1, 2).flatten(2)), sums


TAKEN = {
    "both": lambda given: given,
    "by number": lambda given: (given[0], given[-1]),
    "a slice": lambda given: given[:2],
    "computed with": lambda given: (given[0] * given[1][..., None].exp().clamp(max=2), given[1] + 1),
    "written": lambda given: (given[0], (given[1].mul_(2), given[1])[1]),
    "written at the end": lambda given: (given[0], (given[-1].mul_(2), given[1])[1]),
    "written in a slice": lambda given: (given[0], (given[:2][1].mul_(2), given[1])[1]),
    "written before a slice": lambda given: ((given[0].neg_(), given[:1][0])[1], (given[1].mul_(2), given[1:][0])[1]),
}


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("taken", TAKEN)
def test_a_kernels_sums_are_float32_beside_its_low_result(taken, opt_level):
    torch.manual_seed(0)
    model, x = WithSums(TAKEN[taken]), torch.randn(2, 8, 16)
    exact, sums = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        autocast, autocasts_sums = model(x)
    converted = fxamp.convert(model, torch.bfloat16, output_dtype=None, opt_level=opt_level)
    low, low_sums = converted(x)
    (row,) = [row for row in fxamp.report(converted).rows if "flash_attention" in row.op]
    is_shared = taken in ("written in a slice", "written before a slice")  # and is float32 as a whole for that
    assert (row.precision, row.dtype) == (("high", "float32") if is_shared else ("low", "bfloat16/float32"))
    assert (low.dtype, low_sums.dtype) == (torch.bfloat16, torch.float32)
    assert (low_sums - sums).norm() <= 1.1 * (autocasts_sums - sums).norm()
    assert (low - exact).norm() <= 1.5 * (autocast - exact).norm()


def test_a_kernels_whole_result_is_given_back_as_it_was():
    class Whole(WithSums):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)

    model, x = Whole(tuple), torch.randn(2, 8, 16)
    for ours, exact in zip(fxamp.convert(model, torch.bfloat16)(x), model(x), strict=True):
        assert ours.dtype == exact.dtype
        assert torch.allclose(ours, exact, atol=0.05)


@pytest.mark.usefixtures("fresh_dynamo")
def test_rows_that_dynamo_takes_without_an_example_have_no_shape():
    """`bounds.tolist()` is read row by row, number by number, where Dynamo captures numbers of tensors."""

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, bounds):
            return torch.cat([self.fc(x[:, start:end]) for start, end in bounds.tolist()], 1)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        model, x = Parts(), torch.randn(2, 10, 8)
        converted = fxamp.convert(model, dtype=torch.bfloat16, capture="dynamo")
        for bounds in ([[0, 4], [4, 10]], [[0, 2], [1, 7]]):
            expected = model(x, torch.tensor(bounds))
            assert (converted(x, torch.tensor(bounds)) - expected).norm() < expected.norm() * 2**-6
    assert not fxamp.report(converted).outside
