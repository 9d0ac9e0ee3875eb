"""How far low precision spreads: low-born values, the three levels, deny, domains."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.lists import OpLists
from tests.language import FP16, assert_colours, assert_precision, decided, policy

X, W = torch.rand(8, 8), torch.rand(8, 8)


# -------------------------------------------------------------------------------------------------- levels


@pytest.mark.parametrize(
    "program, strict, balanced, aggressive",
    [
        # autocast's widest operand decides; a parameter is low-born only above strict
        ("a=linear b=add(a,p) linear(b)", "low high low", "low low low", "low low low"),
        # a graph input is float32 by origin; grappler looks at the neighbours alone
        ("a=linear b=add(a,x) linear(b)", "low high low", "low high low", "low low low"),
        # softmax is autocast's deny
        ("linear softmax linear", "low high low", "low low low", "low low low"),
        # an infer node at the end does not stand between two allow nodes
        ("linear gelu", "low low", "low low", "low high"),
        ("gelu linear", "high low", "high low", "high low"),
        # tanh may not round its float32 input, but its bounded result is low-born whatever it was made of
        ("a=tanh(x) b=double(a) linear(b)", "high high low", "high ? low", "high high low"),
        ("linear relu linear", "low low low", "low low low", "low low low"),
        ("linear exp gelu linear", "low high high low", "low high high low", "low high high low"),
    ],
)
def test_levels(program, strict, balanced, aggressive):
    for level, colours in (("strict", strict), ("balanced", balanced), ("aggressive", aggressive)):
        assert_colours(program, colours, chosen=policy(level=level))


@pytest.mark.parametrize(
    "program, expected",
    [
        ("linear softmax norm linear", "low high high low"),
        ("linear softmax view norm linear", "low high high high low"),  # moved on its way
        ("linear softmax softmax norm linear", "low high high high low"),
        ("linear softmax linear norm linear", "low low low low low"),  # a product is made of rounded numbers anyway
        ("linear norm softmax linear", "low low low low"),
        ("linear sigmoid norm linear", "low low low low"),  # as under autocast
    ],
)
def test_a_softmax_that_a_norm_centres_is_float32(program, expected):
    for low in (FP16, torch.bfloat16):
        assert_colours(program, expected, chosen=policy(low))
    own = OpLists.default().override(infer=["softmax"])
    assert_colours("linear softmax norm linear", "low low low low", chosen=policy(lists=own))


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_probabilities_that_differ_little_are_not_rounded_before_they_are_normed(low):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.norm = nn.Linear(64, 64), nn.InstanceNorm1d(1)

        def forward(self, x):
            return self.norm((0.1 * self.fc(x)).softmax(-1).unsqueeze(1))

    model, x = Normed(), torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    exact, found = model(x), fxamp.convert(model, low)(x)
    assert (found - exact).norm() / exact.norm() < 2 * torch.finfo(low).eps


@pytest.mark.parametrize("op", ["layer_norm", "softmax", "group_norm"])
def test_strict_denies_what_autocast_keeps_in_fp32_unless_the_user_says_otherwise(op):
    def model(x, w):
        y = F.linear(x, w)
        normed = {
            "layer_norm": lambda: F.layer_norm(y, (8,)),
            "softmax": lambda: torch.softmax(y, -1),
            "group_norm": lambda: F.group_norm(y, 2),
        }[op]()
        return F.linear(normed, w)

    strict = policy(level="strict")
    assert_precision(decided(model, X, W, chosen=strict), {op: "high list"})
    own = policy(level="strict", lists=OpLists.default().override(infer=[op]))
    assert_precision(decided(model, X, W, chosen=own), {op: "low"})


# ------------------------------------------------------------------------------------------------ low-born


class Scaled(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.gamma = nn.Parameter(value)

    def forward(self, x, w):
        return F.linear(F.linear(x, w) * self.gamma, w)


def scaled(value, low=torch.bfloat16):
    return decided(lambda m, x, w: m(x, w), X, W, module=Scaled(value), chosen=policy(low))


def test_a_parameter_of_normal_numbers_is_low_born():
    assert_precision(scaled(torch.randn(8) * 0.02), {"mul": "low"})


def test_a_layer_scale_of_small_numbers_is_not():
    assert_precision(scaled(torch.full((8,), 1e-6), FP16), {"mul": "high not low-born"})
    assert_precision(scaled(torch.full((8,), 1e-6)), {"mul": "low"})  # bfloat16 has fp32's exponents
    assert_precision(scaled(torch.full((8,), 1e-39)), {"mul": "high not low-born"})


def test_zeros_and_infinities_of_a_parameter_are_exact():
    assert_precision(scaled(torch.zeros(8)), {"mul": "low"})
    mask = torch.zeros(8)
    mask[3] = -torch.inf
    assert_precision(scaled(mask), {"mul": "low"})


def test_a_parameter_beyond_range_is_not_low_born():
    assert_precision(scaled(torch.full((8,), 1e5), FP16), {"mul": "high taint"})
    assert_precision(scaled(torch.full((8,), 1e5)), {"mul": "low"})


MEAN = torch.tensor([0.45, 0.44, 0.41, 0.4, 0.3, 0.2, 0.1, 0.6])


@pytest.mark.parametrize(
    ("ends_in", "precision"),
    [
        (lambda m, h, w: h * 0.1 + m.gamma, {"mul": "low", "add": "high not low-born"}),
        (lambda m, h, w: (h / 2 - m.gamma).view(-1), {"div": "low", "sub": "high not low-born"}),
        (lambda m, h, w: (h + m.gamma.view(1, -1)) * 255.0, {"add": "high not low-born", "mul": "high not low-born"}),
        (lambda m, h, w: {"a": h * m.gamma, "b": h}, {"mul": "high not low-born"}),
        (lambda m, h, w: F.linear(h + m.gamma, w), {"add": "low"}),  # somebody reads it low anyway
        (lambda m, h, w: (y := h + m.gamma, F.linear(y, w)), {"add": "low"}),
        (lambda m, h, w: h.relu() + h, {"add": "low"}),  # nothing in it is float32
    ],
)
@pytest.mark.parametrize("low", [FP16, torch.bfloat16])
def test_what_a_float32_parameter_adds_to_the_output_is_not_rounded(ends_in, precision, low):
    """autocast promotes it, and so does the kernel: it costs no cast."""
    model = Scaled(MEAN)
    body = lambda m, x, w: ends_in(m, F.linear(x, w), w)  # noqa: E731
    assert_precision(decided(body, X, W, module=model, chosen=policy(low)), precision)


def test_outputs_as_computed_stay_low():
    body = lambda m, x, w: F.linear(x, w) + m.gamma  # noqa: E731
    setting = decided(body, X, W, module=Scaled(MEAN), chosen=policy(output_mode="any"))
    assert_precision(setting, {"add": "low"})


def test_exact_constants_are_low_born():
    assert_precision(decided(lambda x, w: F.linear(F.linear(x, w) + torch.ones(8), w), X, W), {"add": "low"})
    assert_precision(decided(lambda x, w: F.linear(F.linear(x, w) + torch.rand(8), w), X, W), {"add": "high"})


def test_a_factory_makes_torch_s_default_dtype_whatever_reads_it():
    setting = decided(lambda x, w: F.linear(F.linear(x, w) + torch.ones(8), w), X, W)
    assert_precision(setting, {"ones": "high creation"})
    made_like_a_low_value = decided(lambda x, w: F.linear(F.linear(x, w).new_ones(8, 8), w), X, W)
    assert_precision(made_like_a_low_value, {"new_ones": "low"})


def test_a_mask_made_float_is_low_born():
    def model(x, w, mask):
        return F.linear(F.linear(x, w) * mask.float(), w)

    assert_precision(decided(model, X, W, torch.ones(8, 8, dtype=torch.bool)), {"mul": "low"})
    assert_precision(decided(model, X, W, torch.ones(8, 8, dtype=torch.uint8)), {"mul": "low"})


def test_a_clear_node_of_a_float32_value_is_not_rounded_for_a_float32_reader():
    """cat(input, low): somebody reads it in float32, so the input's digits must survive."""

    def model(x, w):
        joined = torch.cat((x, F.linear(x, w)))
        return F.linear(joined, w), torch.exp(joined)

    assert_precision(decided(model, X, W), {"cat": "high"})

    def only_low_readers(x, w):
        return F.linear(torch.cat((x, F.linear(x, w))), w)

    assert_precision(decided(only_low_readers, X, W), {"cat": "low"})


# ---------------------------------------------------------------------------------------------------- deny


@pytest.mark.parametrize(
    "program, colours",
    [
        ("a=linear b=exp(a) c=view(b) d=add(c,a) linear(d)", "low high high high low"),
        ("a=linear b=exp(a) c=view(b) linear(c)", "low high ? low"),  # a clear node before a GEMM is free
        ("exp linear gelu linear", "high low low low"),  # an allow node ends it
        ("exp custom gelu linear", "high high high low"),  # an unlisted node neither spreads nor is low-born
        ("a=linear b=exp(a) c=tanh(b) d=double(c) linear(d)", "low high high high low"),
    ],
)
@pytest.mark.parametrize("level", ["balanced", "aggressive"])
def test_deny_spreads_through_clear_and_infer_nodes_and_ends_at_allow_nodes(program, colours, level):
    assert_colours(program, colours, chosen=policy(level=level))


def test_the_reason_names_the_deny_node_and_the_way():
    setting = decided(lambda x, w: F.linear(F.linear(x, w).exp().view(8, 8) + 1.0, w), X, W)
    assert_precision(setting, {"add": "high downstream", "exp": "high list"})
    from tests.language import ir, node_of

    reason = ir.mark(node_of(setting, "add")).reason
    assert "`exp`" in reason.text and reason.node == "view"


def test_a_write_into_a_value_spreads_deny():
    """z is a view of y, and exp_ writes into it."""

    def model(x, w):
        y = F.linear(x, w)
        z = y.view(64)
        z.exp_()
        return F.linear(y + 1.0, w)

    assert_precision(decided(model, X, W), {"add": "high downstream"})


# ------------------------------------------------------------------------------------------------- domains


def low_then(tail):
    return lambda x, w: F.linear(tail(F.linear(x, w)), w)


def _squared(y):
    return y * y


def _normed(y):
    return F.batch_norm(y, None, None, training=True)


@pytest.mark.parametrize(
    "tail, protected",
    [
        (lambda y: torch.log(1 - torch.sigmoid(y)), {"sub": "high upstream", "sigmoid": "high upstream"}),
        (lambda y: torch.log(input=1 - torch.sigmoid(y)), {"sub": "high upstream"}),
        (lambda y: torch.rsqrt((y + 1.0).abs()), {"add": "high upstream"}),
        (lambda y: 1 / (1 + torch.sigmoid(y)), {"add": "high upstream", "sigmoid": "high upstream"}),
        (lambda y: torch.div(y, other=torch.tanh(y)), {"tanh": "high upstream"}),
        (lambda y: torch.acos(torch.tanh(y)), {"tanh": "high upstream"}),
        (lambda y: torch.sqrt(1 - torch.tanh(y) ** 2), {"tanh": "high upstream"}),
        (lambda y: torch.sqrt(1 - torch.tanh(y).square()), {"tanh": "high upstream"}),
        (lambda y: torch.sqrt(torch.rsub(torch.tanh(y).square(), 1.0)), {"tanh": "high upstream"}),
        (lambda y: torch.sqrt(1 - 0.5 * torch.tanh(y) ** 2), {"tanh": "high upstream"}),
        (lambda y: torch.log(1 - _squared(torch.tanh(y)) + 1e-6), {"tanh": "high upstream"}),
        (lambda y: torch.sqrt(1 + torch.tanh(y) ** 2), {"tanh": "low"}),  # a sum of squares is positive
        (
            lambda y: torch.log(_normed(torch.tanh(y) ** 2).sigmoid()),
            {"tanh": "low"},
        ),  # a norm is no difference of squares
        (lambda y: torch.tanh(y) / 3.0, {"tanh": "low", "div": "low"}),  # a numerator is not sensitive
        (lambda y: torch.log(F.linear(torch.tanh(y), y)), {"tanh": "low"}),  # an allow node ends it
    ],
)
def test_what_reaches_a_sensitive_argument_is_high(tail, protected):
    assert_precision(decided(low_then(tail), X, W), protected)


def test_log_of_one_minus_sigmoid_is_finite_where_rounding_would_make_it_infinite():
    from tests.language import PIPELINE, captured, run_graph, run_steps

    setting = captured(
        lambda x, w: torch.log(1 - torch.sigmoid(x @ w)), torch.full((1, 8), 1.0), torch.full((8, 1), 1.125)
    )
    run_steps(PIPELINE, setting)
    result, _, _ = run_graph(setting, torch.full((1, 8), 1.0), torch.full((8, 1), 1.125))
    assert torch.isfinite(result).all()
    assert torch.isinf(torch.log(1 - torch.sigmoid(torch.tensor(9.0, dtype=torch.bfloat16))))
