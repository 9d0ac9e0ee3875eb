"""Operands, kernels, containers and outputs."""

import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.lists import OpLists
from fxamp.passes.verify import types_hold
from tests.language import (
    BF16,
    FP16,
    FP32,
    NORMALISE,
    PIPELINE,
    assert_precision,
    assert_rewrites,
    decided,
    policy,
    rewritten,
    run_graph,
)

X, W = torch.rand(8, 8), torch.rand(8, 8)


# --------------------------------------------------------------------------------------- kernels and operands


# Float32 results that no floating-point operand decides: of masks, integers and Python numbers.
DEFAULT_DTYPE = {
    "where": lambda mask, counts: torch.where(mask, 0.5, 0.0),
    "where of counts": lambda mask, counts: torch.where(mask, 1.0, counts),
    "clamp": lambda mask, counts: counts.clamp(0.5),
    "clamp_min": lambda mask, counts: torch.clamp_min(counts, 0.5),
    "div": lambda mask, counts: counts / 3,
    "true division of masks": lambda mask, counts: mask / 2,
    "rtruediv": lambda mask, counts: 2 / counts,
    "mul": lambda mask, counts: counts * 0.5,
    "add": lambda mask, counts: 0.5 + mask,
    "pow": lambda mask, counts: counts**0.5,
    "sqrt": lambda mask, counts: counts.sqrt(),
    "exp": lambda mask, counts: torch.exp(counts),
    "tanh": lambda mask, counts: counts.tanh(),
    "sigmoid": lambda mask, counts: mask.sigmoid(),
    "atan2": lambda mask, counts: torch.atan2(counts, counts),
    "copysign": lambda mask, counts: torch.copysign(counts, counts),
    "ldexp": lambda mask, counts: torch.ldexp(counts, counts),
    "deg2rad": lambda mask, counts: torch.deg2rad(counts),
    "softsign": lambda mask, counts: F.softsign(counts),
    "full": lambda mask, counts: torch.full((8, 8), 0.5),
    "fill": lambda mask, counts: torch.empty(8, 8).fill_(0.5),
    "arange": lambda mask, counts: torch.arange(0.0, 8.0),
    "tensor": lambda mask, counts: torch.tensor([0.5] * 8),
    "view": lambda mask, counts: torch.where(mask, 0.5, 0.0).t().contiguous(),
    "masked_fill": lambda mask, counts: torch.where(mask, 0.5, 0.0).masked_fill(mask, 2.0),
    "setitem": lambda mask, counts: operator.setitem(made := torch.where(mask, 0.5, 0.0), 0, 1.0) or made,
}
OF_NUMBERS = {
    "balanced": lambda op: {},
    "strict": lambda op: {"level": "strict"},
    "aggressive": lambda op: {"level": "aggressive"},
    "allow": lambda op: {"lists": OpLists.default().override(allow=[op])},
    "infer": lambda op: {"lists": OpLists.default().override(infer=[op])},
    "clear": lambda op: {"lists": OpLists.default().override(clear=[op]), "level": "aggressive"},
    "O3": lambda op: {"everything_low": True},
}


@pytest.mark.parametrize("low", [FP16, BF16])
@pytest.mark.parametrize("way", OF_NUMBERS)
@pytest.mark.parametrize("name", DEFAULT_DTYPE)
def test_what_no_floating_operand_decides_has_the_default_dtype(name, way, low):
    def model(x, w, mask, counts):
        return F.linear(F.linear(x, w) * DEFAULT_DTYPE[name](mask, counts), w)

    given = (X, W, X > 0.5, torch.arange(1, 9).expand(8, 8))
    op = next((op for op in (name, "where") if op in OpLists.default()), name)
    setting = rewritten(model, *given, chosen=policy(low, **OF_NUMBERS[way](op)))
    types_hold(setting.fakes, setting.captured.example)(setting.graph)
    found, expected = run_graph(setting, *given)[0], model(*given)
    assert found.dtype == FP32 and torch.isfinite(found).all()
    # Each of two products of 8 rounds its operands (2 * eps/2 a product) and its result; the factor in between rounds.
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(low).eps, atol=0)


@pytest.mark.parametrize("level", ["strict", "balanced", "aggressive"])
def test_a_mask_of_numbers_is_cast_where_it_is_read_low(level):
    def model(x, w, keep):
        query = F.linear(x, w)[None]
        return F.scaled_dot_product_attention(query, query, query, torch.where(keep, 0.0, -1e4))

    given = (X, W, (X > 0.5)[None])
    setting = rewritten(model, *given, chosen=policy(BF16, level=level))
    types_hold(setting.fakes, setting.captured.example)(setting.graph)
    assert_precision(setting, {"where": "high", "scaled_dot_product_attention": "low"})
    run_graph(setting, *given)


def test_ops_without_promotion_get_operands_of_one_dtype():
    def model(x, w, grid, weight):
        y = F.linear(x, w)
        mixed = torch.lerp(y, x, weight)
        sampled = F.grid_sample(y[None, None], grid, align_corners=False)
        summed = torch.zeros(8, 8).index_add(0, torch.arange(8), y)
        put = torch.zeros(8, 8).index_put((torch.arange(8),), y)
        return mixed, sampled, summed, F.prelu(y, weight[:1]), put

    given = (X, W, torch.rand(1, 4, 4, 2), torch.rand(8))
    setting = rewritten(model, *given)
    for found, expected in zip(run_graph(setting, *given)[0], model(*given), strict=True):
        assert torch.allclose(found, expected, rtol=3e-2, atol=3e-2)  # values below 4: bfloat16 spacing is 1.6e-2


def test_batch_norm_keeps_its_weights_and_statistics():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x):
            return F.relu(self.bn(self.conv(x)))

    module = Normed()
    setting = rewritten(lambda m, x: m(x), torch.rand(2, 3, 4, 4), module=module)
    assert_precision(setting, {"conv2d": "low", "batch_norm": "low", "relu": "low"})
    run_graph(setting, torch.rand(2, 3, 4, 4))
    assert {value.dtype for value in module.bn.state_dict().values()} == {FP32, torch.int64}


def test_an_op_without_a_cpu_kernel_is_high_on_the_cpu_alone():
    def model(x, w):
        return F.avg_pool3d(F.conv3d(x, w), 2)

    given = (torch.rand(1, 1, 4, 4, 4), torch.rand(1, 1, 1, 1, 1))
    assert_precision(decided(model, *given), {"avg_pool3d": "high type"})
    assert_precision(decided(model, *given, chosen=policy(device="cuda")), {"avg_pool3d": "low"})


# ---------------------------------------------------------------------------------------------- containers


def test_values_inside_lists_slices_and_keywords_are_cast():
    def model(x, w):
        y = F.linear(x, w)
        joined = torch.cat([y, torch.stack(tensors=[x, x])[0]], dim=0)
        return F.linear(input=joined, weight=w)[1 : y.size(0), ..., None]

    setting = rewritten(model, X, W)
    assert run_graph(setting, X, W)[0].shape == (7, 8, 1)


def test_outputs_in_nested_containers_come_back_in_float32():
    def model(x, w):
        y = F.linear(x, w)
        return {"logits": y, "more": (y.relu(), [x, None, 3]), "max": y.max(1)}

    setting = rewritten(model, X, W)
    found, _, _ = run_graph(setting, X, W)
    assert found["logits"].dtype == found["more"][0].dtype == found["max"][0].dtype == FP32
    assert found["more"][1][1:] == [None, 3] and found["max"][1].dtype == torch.int64


def test_a_value_that_is_an_output_and_read_low_is_cast_once():
    def model(x, w):
        y = F.linear(x, w)
        return y, y, F.linear(y, w)

    def expected(x, w):
        small = w.to(BF16)
        y = F.linear(x.to(BF16), small)
        wide = y.to(FP32)
        return wide, wide, F.linear(y, small).to(FP32)

    assert_rewrites(PIPELINE, model, expected, X, W)


@pytest.mark.parametrize("output_dtype", [None, FP32, BF16, FP16])
def test_output_dtypes(output_dtype):
    mode = "any" if output_dtype is None else "low" if output_dtype == BF16 else "high"
    setting = rewritten(
        lambda x, w: (F.linear(x, w), x.exp()), X, W, chosen=policy(output_mode=mode), output_dtype=output_dtype
    )
    first, second = run_graph(setting, X, W)[0]
    assert (first.dtype, second.dtype) == ((BF16, FP32) if output_dtype is None else (output_dtype, output_dtype))


def test_a_recurrent_module_s_nested_output_is_cast_leaf_by_leaf():
    setting = rewritten(lambda m, x: m(x), X, module=nn.LSTM(8, 8), chosen=policy(output_mode="low"), output_dtype=BF16)
    out, (hidden, cell) = run_graph(setting, X)[0]
    assert out.dtype == hidden.dtype == cell.dtype == BF16


def test_keyword_operands_are_put_in_their_places():
    assert_rewrites(
        NORMALISE,
        lambda x, w: torch.add(input=x, other=w, alpha=2),
        lambda x, w: torch.add(x, w, alpha=2),
        X,
        W,
    )


def test_what_nobody_reads_is_not_computed_unless_it_acts():
    def model(x, w):
        F.linear(x, w)
        unread = x.exp()
        operator.add(unread, 1)
        F.dropout(x, 0.5, True)
        x.add_(1)
        return x.relu()

    def expected(x, w):
        F.dropout(x, 0.5, True)
        x.add_(1)
        return x.relu()

    assert_rewrites(NORMALISE, model, expected, X, W)


# ------------------------------------------------------------------------------------------------- powers


class Signs(nn.Module):
    """Haar wavelets, and checkerboards, are made with (-1) ** positions."""

    def __init__(self, base, in_vmap=False):
        super().__init__()
        self.fc, self.base, self.in_vmap = nn.Linear(4, 4), base, in_vmap
        self.register_buffer("places", torch.arange(4))

    def forward(self, x):
        powers = torch.vmap(self.power)(self.places) if self.in_vmap else self.power(self.places)
        return self.fc(x) * powers * self.base ** x.shape[0]

    def power(self, places):
        return self.base**places


@pytest.mark.parametrize("base, capture", [(-1, "symbolic"), (-2.0, "symbolic"), (2, "symbolic"), (-1, "dynamo")])
def test_a_power_of_a_negative_number_is_not_the_negative_of_a_power(base, capture):
    """torch.fx writes -1 ** x, which Python reads as -(1 ** x)."""
    torch.manual_seed(0)
    model, x = Signs(base), torch.randn(3, 4)
    converted = fxamp.convert(model, torch.bfloat16, capture=capture)
    assert (converted(x) / model(x) - 1).abs().max() < 0.1  # a sign that is wrong would make it 2


def test_a_power_of_a_negative_number_in_a_vmap():
    torch.manual_seed(0)
    model, x = Signs(-1, in_vmap=True), torch.randn(3, 4)
    converted = fxamp.convert(model, torch.bfloat16, (x,))
    assert (converted(x) / model(x) - 1).abs().max() < 0.1


def test_a_power_of_a_negative_number_under_torch_compile():
    torch.manual_seed(0)
    model, x = Signs(-1), torch.randn(3, 4)
    compiled = torch.compile(fxamp.convert(model, torch.bfloat16, (x,)), backend="aot_eager", fullgraph=True)
    assert (compiled(x) / model(x) - 1).abs().max() < 0.1
