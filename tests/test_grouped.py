"""Grouped products: sizes as the kernels give them, low where these take it, and under compilers in any dtype."""

import copy

import pytest
import torch
from torch import nn

import fxamp
from fxamp.grouped import grouped_mm, like_grouped

ENDS = torch.tensor([3, 8], dtype=torch.int32)
FORMS = {
    "rows": lambda: (torch.randn(8, 16), torch.randn(2, 16, 24), ENDS),
    "columns": lambda: (torch.randn(2, 16, 24), torch.randn(24, 8), ENDS),
    "shared": lambda: (torch.randn(8, 16).mT, torch.randn(8, 24), ENDS),
    "batch": lambda: (torch.randn(2, 8, 16), torch.randn(2, 16, 24), None),
}


def operands(form, dtype, requires_grad=True):
    torch.manual_seed(0)
    mat_a, mat_b, ends = FORMS[form]()
    return (*(each.to(dtype).requires_grad_(requires_grad) for each in (mat_a, mat_b)), ends)


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_the_kind_is_that_of_a_run(form, dtype, requires_grad):
    given = operands(form, dtype, requires_grad)
    fake, real = like_grouped(*given), torch._grouped_mm(*given)
    assert (fake.shape, fake.dtype, fake.requires_grad, fake.is_leaf) == (
        (real.shape, real.dtype, real.requires_grad, real.is_leaf)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_under_a_compiler_it_is_what_torchs_own_is_and_so_are_its_gradients(form, dtype):
    torch._dynamo.reset()
    results = []
    for function in (torch.compile(grouped_mm, backend="aot_eager", fullgraph=True), torch._grouped_mm):
        mat_a, mat_b, ends = operands(form, dtype)
        result = function(mat_a, mat_b, ends)
        result.square().sum().backward()
        results.append((result, mat_a.grad, mat_b.grad))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)  # the order of sums may differ


class Experts(nn.Module):
    """Two linear layers, one for the first rows and one for the others, between plain ones."""

    def __init__(self, width, inner):
        super().__init__()
        self.before, self.after = nn.Linear(width, width), nn.Linear(inner, 4)
        self.weight = nn.Parameter(torch.randn(2, inner, width) * 0.1)

    def forward(self, x):
        return self.after(torch.nn.functional.grouped_mm(self.before(x), self.weight.mT, offs=ENDS).tanh())


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width, inner, precision", [(16, 24, "low"), (12, 16, "high"), (16, 20, "high")])
def test_experts_run_low_where_the_kernel_takes_their_sizes(low, width, inner, precision):
    """The kernel of 16-bit values refuses rows of 24 or 40 bytes, some of them only in backward."""
    torch.manual_seed(0)
    model, x = Experts(width, inner), torch.randn(8, width)
    plain = copy.deepcopy(model)
    converted = fxamp.convert(model, dtype=low, capture="symbolic", pad_to=1)
    mine, theirs = converted(x), plain(x)
    report = fxamp.report(converted)
    (row,) = [row for row in report.rows if row.op == "_grouped_mm"]
    assert row.precision == precision
    if precision == "high":
        assert "is no multiple of 8" in row.reason
    (gemm,) = [gemm for gemm in report.gemms if gemm.op == "_grouped_mm"]
    assert (gemm.batch, gemm.m, gemm.n, gemm.k, gemm.precision) == (1, 8, inner, width, precision)
    torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)
    mine.sum().backward()
    theirs.sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(converted.get_parameter(name).grad, parameter.grad, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 12])
def test_a_converted_model_compiles_after_a_call(low, width):
    torch._dynamo.reset()
    torch.manual_seed(0)
    converted, x = fxamp.convert(Experts(width, 16), dtype=low, capture="symbolic", pad_to=1), torch.randn(8, width)
    plain = converted(x)
    compiled = torch.compile(converted, backend="aot_eager", fullgraph=True)(x)
    compiled.sum().backward()
    torch.testing.assert_close(compiled, plain, rtol=0.01, atol=0.01)
    assert all(parameter.grad is not None for parameter in converted.parameters())


class Correlates(nn.Module):
    """A product for each group of a shared dimension, whose rows are read at a distance of their number."""

    def __init__(self, rows):
        super().__init__()
        self.left, self.right = nn.Linear(4, rows, bias=False), nn.Linear(4, 8, bias=False)

    def forward(self, x):
        return torch._grouped_mm(self.left(x).mT, self.right(x), offs=ENDS)


@pytest.mark.parametrize("rows, precision", [(8, "low"), (12, "high")])
def test_rows_of_a_shared_dimension_count_too(rows, precision):
    converted = fxamp.convert(Correlates(rows), dtype=torch.bfloat16, capture="symbolic", pad_to=1)
    converted(torch.randn(8, 4)).square().sum().backward()
    assert {row.precision for row in fxamp.report(converted).rows if row.op == "_grouped_mm"} == {precision}


def test_under_a_compiler_a_gradient_that_repeats_one_number_is_taken():
    """As `sum()` gives it; torch's own backward refuses its strides."""
    torch._dynamo.reset()
    mat_a, mat_b, ends = operands("rows", torch.float32)
    torch.compile(grouped_mm, backend="eager", fullgraph=True)(mat_a, mat_b, ends).sum().backward()
    torch.testing.assert_close(mat_b.grad[1], mat_a[3:].sum(0)[:, None].expand(16, 24))
