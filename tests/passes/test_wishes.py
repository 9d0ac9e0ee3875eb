"""What the user wrote stays: casts, dtypes, autocast regions, overrides."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp import ir
from fxamp.canonical import canonical_text
from fxamp.errors import OptionError
from fxamp.lists import OpLists
from fxamp.passes.overrides import check_overrides, names_kept
from tests.language import (
    BF16,
    FP16,
    FP32,
    PIPELINE,
    assert_precision,
    assert_rewrites,
    assert_same,
    captured,
    count_casts,
    decided,
    node_of,
    policy,
    rewritten,
    run_graph,
    run_steps,
)

X, W = torch.rand(8, 8), torch.rand(8, 8)


# --------------------------------------------------------------------------------------------------- casts


def test_a_value_the_user_cast_to_float32_is_multiplied_in_float32():
    def model(x, w):
        return F.linear(F.linear(x, w).float(), w)

    setting = decided(model, X, W)
    assert_precision(setting, {"linear": "low", "float": "high user cast", "linear 1": "high user operand"})


@pytest.mark.parametrize(
    "cast",
    [lambda y: y.float(), lambda y: y.to(FP32), lambda y: y.to(dtype=FP32), lambda y: y.type(FP32)],
)
def test_every_spelling_of_a_cast_to_float32_is_kept_and_costs_no_cast_of_ours(cast):
    setting = rewritten(lambda x, w: cast(F.linear(x, w)).exp(), X, W)
    assert count_casts(setting) == 2  # the two inputs'
    result, _, _ = run_graph(setting, X, W)
    assert result.dtype == FP32


def test_a_user_cast_through_views_still_counts():
    assert_precision(
        decided(lambda x, w: F.linear(F.linear(x, w).float().view(8, 8).t(), w), X, W),
        {"linear 1": "high user operand"},
    )


def test_a_user_cast_holds_for_the_product_that_reads_it_and_not_for_those_after_it():
    def model(x, w):
        y = F.linear(F.linear(x, w).float(), w)
        return F.linear(F.relu(F.linear(F.relu(y), w)), w)

    setting = decided(model, X, W)
    assert_precision(setting, {"linear 1": "high user operand", "linear 2": "low", "linear 3": "low"})


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_a_cast_of_an_input_that_is_float32_is_no_wish(capture):
    """Many a forward begins with x = x.float(): nothing has been computed that it could keep."""

    class Guarded(torch.nn.Sequential):
        def forward(self, x):
            return super().forward(x.float())

    model = fxamp.convert(
        Guarded(*[layer for _ in range(4) for layer in (torch.nn.Linear(8, 8), torch.nn.ReLU())]), FP16, capture=capture
    )
    model(X)
    found = [row.precision for row in fxamp.report(model).rows if row.op == "linear"]
    # One of Dynamo's graphs may begin with what another has computed, so there the first product is kept.
    assert found == ["low" if capture == "auto" else "high", "low", "low", "low"]


def test_a_user_cast_behind_an_infer_node_does_not():
    assert_precision(decided(lambda x, w: F.linear(x.float() + 1.0, w), X, W), {"linear": "low"})


@pytest.mark.parametrize(
    "cast, dtype", [(lambda y: y.half(), FP16), (lambda y: y.to(BF16), BF16), (lambda y: y.double(), torch.float64)]
)
def test_a_cast_to_another_dtype_stays_and_what_reads_it_is_untouched(cast, dtype):
    def model(x, w):
        return cast(F.linear(x, w)) * 2

    setting = rewritten(model, X, W)
    assert ir.mark(node_of(setting, "mul")).type.dtype == dtype
    assert run_graph(setting, X, W)[0].dtype == dtype


def test_conversions_relative_to_another_value_see_what_fp32_would_have_seen():
    def model(x, w):
        y = F.linear(x, w)
        return x.type_as(y).exp() + y.to(x.dtype).exp() + x.to(y).exp()

    def plain(x, w):
        y = F.linear(x, w)
        return x.exp() + y.exp() + x.exp()

    assert_rewrites(PIPELINE, model, lambda x, w: low_plain(plain, x, w), X, W)


def low_plain(plain, x, w):
    y = F.linear(x.to(BF16), w.to(BF16)).to(FP32)
    return x.exp() + y.exp() + x.exp()


@pytest.mark.parametrize(
    "back",
    [
        lambda y, x: y.type(x.dtype),
        lambda y, x: y.type(dtype=x.dtype),
        lambda y, x: y.type(y.sin().dtype),
        lambda y, x: y.type(x.type()),
        lambda y, x: y.to(x.dtype),
    ],
)
def test_a_conversion_to_the_dtype_of_a_value_is_no_wish_in_any_spelling(back):
    def model(x, w):
        return F.linear(back(F.linear(x, w).softmax(-1, dtype=FP32), x), w)

    def plain(x, w):
        return F.linear(F.linear(x, w).softmax(-1, dtype=FP32), w)

    setting = rewritten(model, X, W)
    assert_precision(setting, {"linear": "low", "linear 1": "low"})
    assert canonical_text(setting.graph) == canonical_text(rewritten(plain, X, W).graph)


@pytest.mark.parametrize("kind", ["torch.FloatTensor", FP32])
def test_a_type_that_the_user_names_stays_a_wish(kind):
    setting = rewritten(lambda x, w: F.linear(F.linear(x, w).type(kind), w), X, W)
    assert_precision(setting, {"linear": "low", "linear 1": "high user operand"})


def test_the_name_of_a_type_is_no_conversion():
    setting = rewritten(lambda x, w: F.linear(F.linear(x, w) if x.type() else x, w), X, W, preview=False)
    assert_precision(setting, {"linear": "low", "linear 1": "low"})


def test_a_mask_of_a_value_s_type_has_the_dtype_that_it_has_in_fp32():
    setting = rewritten(lambda x, w: F.linear(x, w) * (x > 0).type(F.linear(x, w).dtype), X, W)
    assert ir.mark(node_of(setting, "mul")).type.dtype in (BF16, FP32)
    assert run_graph(setting, X, W)[0].dtype == FP32


@pytest.mark.parametrize(
    "model",
    [
        lambda x, w: F.linear(x, w) * (x > 0).to(F.linear(x, w)),
        lambda x, w: F.linear(x, w) * (x > 0).type_as(F.linear(x, w)),
        lambda x, w: F.linear(x, w) * (x > 0).type(F.linear(x, w).type()),
        lambda x, w: F.linear(x, w) * torch.ones(8, dtype=torch.float64).to(F.linear(x, w)),
        lambda x, w: F.linear(x, w) * torch.arange(8).to(F.linear(x, w), non_blocking=True),
    ],
)
@pytest.mark.parametrize("preview", [False, True])
def test_a_conversion_to_a_low_value_s_dtype_gives_what_fp32_would_have_given(model, preview):
    setting = rewritten(model, X, W, preview=preview)
    dtypes = {ir.mark(node).type.dtype for node in setting.graph.nodes if ir.mark(node).op in ("mul", "to", "linear")}
    assert dtypes <= {BF16, FP32}
    found, expected = run_graph(setting, X, W)[0], model(X, W)
    assert found.dtype == FP32
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)


def test_a_conversion_to_an_integer_input_s_dtype_stays():
    def model(x, w, ids):
        return F.linear(x, w).to(ids.dtype), ids.to(x.dtype) + 1.0

    setting = rewritten(model, X, W, torch.arange(8))
    first, second = run_graph(setting, X, W, torch.arange(8))[0]
    assert first.dtype == torch.int64 and second.dtype == FP32


def test_reads_of_dtype_are_resolved():
    def model(x, w):
        y = F.linear(x, w)
        return torch.zeros(8, dtype=y.dtype) + torch.ones(8).to(y.dtype) + y.exp()

    setting = rewritten(model, X, W)
    assert not any(node.target is getattr for node in setting.graph.nodes)
    assert run_graph(setting, X, W)[0].dtype == FP32


@pytest.mark.parametrize("op", ["softmax", "sum", "mean"])
def test_a_named_dtype_stays(op):
    call = {
        "softmax": lambda y: torch.softmax(y, -1, dtype=FP32),
        "sum": lambda y: y.sum(-1, dtype=FP32),
        "mean": lambda y: y.mean(-1, dtype=torch.float64),
    }[op]
    setting = rewritten(lambda x, w: call(F.linear(x, w)), X, W)
    wanted = torch.float64 if op == "mean" else FP32
    assert ir.mark(node_of(setting, op)).type.dtype == wanted
    assert run_graph(setting, X, W)[0].dtype == wanted


def test_reading_the_bits_of_a_float_reads_float32():
    def model(x, w):
        return F.linear(x, w).view(torch.int32)

    setting = rewritten(model, X, W)
    assert run_graph(setting, X, W)[0].shape == (8, 8)


# ------------------------------------------------------------------------------------------- other dtypes


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float64])
def test_values_of_other_dtypes_are_never_touched(dtype):
    given = torch.ones(8, 8).to(dtype)

    def model(x, w, other):
        return F.linear(x, w), other.view(64), torch.cat((other, other)), other[0]

    setting = rewritten(model, X, W, given)
    results = run_graph(setting, X, W, given)[0]
    assert [r.dtype for r in results[1:]] == [dtype] * 3
    for node in setting.graph.nodes:
        if ir.mark(node).role:
            assert ir.mark(node.args[0]).type.dtype in (FP32, BF16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_gemm_in_another_dtype_stays(dtype):
    setting = rewritten(lambda a, b: a @ b, X.to(dtype), W.to(dtype))
    assert count_casts(setting) == 0
    assert_same(run_graph(setting, X.to(dtype), W.to(dtype))[0], X.to(dtype) @ W.to(dtype))


def test_a_float64_operand_keeps_the_arithmetic_it_had():
    def model(x, w, d):
        return F.linear(x, w) * d

    wide = torch.rand(8, 8, dtype=torch.float64)
    setting = rewritten(model, X, W, wide)
    assert_precision(setting, {"mul": "high type"})
    assert run_graph(setting, X, W, wide)[0].dtype == torch.float64


def test_zero_dimensional_tensors_promote_as_in_fp32():
    def model(x, w, scale):
        return torch.exp(F.linear(x, w) * scale), scale * 2.0

    scale = torch.tensor(0.3)
    setting = rewritten(model, X, W, scale)
    expected = torch.exp(F.linear(X, W) * scale)
    found, doubled = run_graph(setting, X, W, scale)[0]
    assert torch.allclose(found, expected, rtol=5e-2)  # exp magnifies bfloat16's 4e-3 by its argument, below 3
    assert doubled.dtype == FP32 and doubled == scale * 2.0


def test_embedding_indices_and_lengths_are_left_alone():
    def model(ids, w, table):
        return F.linear(F.embedding(ids, table), w)

    ids = torch.arange(8)
    setting = rewritten(model, ids, W, W)
    assert [ir.mark(n).role for n in node_of(setting, "input").users] == [""]


# ------------------------------------------------------------------------------------------------- regions


def test_a_region_without_autocast_stays_float32_and_its_end_is_not_low_born():
    def model(x, w):
        y = F.linear(x, w)
        with torch.autocast("cpu", enabled=False):
            z = F.linear(y.float(), w) + 1.0
        return F.linear(F.gelu(z), w)

    setting = decided(model, X, W)
    assert_precision(setting, {"linear": "low", "linear 1": "high user region", "add": "high user region"})
    assert_precision(setting, {"gelu": "high not low-born", "linear 2": "low"})


# ----------------------------------------------------------------------------------------------- overrides


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return self.head(torch.exp(self.inner(x)))


class Stack(nn.Module):
    _keep_in_fp32_modules: tuple = ()

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def stacked(**options):
    return decided(lambda m, x: m(x), X, module=Stack(), chosen=policy(**options))


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ({"module.blocks.0.inner": "deny"}, {"linear": "high override", "linear 1": "low", "linear 2": "low"}),
        ({"module.blocks.1": "deny"}, {"linear": "low", "linear 2": "high override", "linear 3": "high override"}),
        ({"*.head": "deny"}, {"linear": "low", "linear 1": "high override", "linear 3": "high override"}),
        ({"exp": "allow"}, {"exp": "low override", "exp 1": "high list"}),
        ({"exp": "clear"}, {"exp": "low"}),
        ({"*": "deny", "module.blocks.0.head": "allow"}, {"linear": "high", "linear 1": "low override"}),
        ({"module.blocks.0": "deny", "module.blocks.0.head": "allow"}, {"linear": "high", "linear 1": "low"}),
    ],
)
def test_overrides_by_path_glob_and_name(overrides, expected):
    assert_precision(stacked(overrides=overrides), expected)


def test_an_override_undoes_a_user_cast_and_a_region():
    class Protected(nn.Module):
        def forward(self, x, w):
            with torch.autocast("cpu", enabled=False):
                return F.linear(F.linear(x, w).float(), w)

    def precision(**options):
        setting = captured(lambda m, x, w: m(x, w), X, W, module=Protected(), chosen=policy(**options))
        run_steps(PIPELINE, setting)
        run_graph(setting, X, W)
        return [ir.mark(node_of(setting, "linear", number)).precision for number in (0, 1)]

    assert precision() == ["high", "high"]
    assert precision(overrides={"module": "allow"}) == ["low", "low"]


def test_no_override_makes_low_what_cannot_be():
    class Mixed(nn.Module):
        def forward(self, x, w, wide):
            return (x * wide) @ wide, torch.softmax(F.linear(x, w), -1, dtype=FP32)

    given = (X, W, W.double())
    setting = rewritten(lambda m, *a: m(*a), *given, module=Mixed(), chosen=policy(overrides={"module": "allow"}))
    assert_precision(setting, {"linear": "low override", "mul": "high type", "softmax": "high"})
    assert [value.dtype for value in run_graph(setting, *given)[0]] == [torch.float64, FP32]


def test_keep_in_fp32_modules_unless_overridden():
    assert_precision(stacked(protected=("head",)), {"linear": "low", "linear 1": "high override"})
    both = stacked(protected=("head",), overrides={"module.blocks.0.head": "allow"})
    assert_precision(both, {"linear 1": "low override", "linear 3": "high override"})


class Keeps(nn.Module):
    """As models of transformers say it: for float16 alone, and for both dtypes."""

    _keep_in_fp32_modules = ("head",)
    _keep_in_fp32_modules_strict = frozenset({"shift"})

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.head(self.body(x)) + self.shift


def test_what_a_model_of_diffusers_keeps_holds_for_both_dtypes():
    base = type("ModelMixin", (nn.Module,), {"__module__": "diffusers.models.modeling_utils"})
    model = type("Keeps", (base,), {"_keep_in_fp32_modules": ["head"]})
    assert names_kept(model, BF16) == names_kept(model(), BF16) == names_kept(model, FP16) == ("head",)
    assert names_kept(Keeps, BF16) == ("shift",)


class Wraps(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = Keeps(), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.inner(x))


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("model", [Keeps, Wraps])
@pytest.mark.parametrize("low", [FP16, BF16])
def test_what_a_model_of_transformers_keeps(low, model, capture):
    torch._dynamo.reset()
    converted = fxamp.convert(model(), low, example_inputs=(X,), capture=capture)
    rows = {f"{row.module} {row.op}".strip(): row for row in fxamp.report(converted).rows}
    inner = "inner" if model is Wraps else ""
    assert rows[f"{inner}.body linear".removeprefix(".")].precision == "low"
    head = rows[f"{inner}.head linear".removeprefix(".")]
    assert head.precision == ("high" if low == FP16 else "low")
    assert ("_keep_in_fp32_modules names 'head'" in head.reason) == (low == FP16)
    assert "_keep_in_fp32_modules names 'shift'" in rows[f"{inner} add".strip()].reason
    if model is Wraps:
        assert rows["head linear"].precision == "low", "it is not the inner model's"


def test_names_are_looked_for_below_the_model_that_says_them():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = Keeps()

        def forward(self, x):
            return self.head(x)

    converted = fxamp.convert(Outer(), FP16, example_inputs=(X,))
    found = {row.module: row.precision for row in fxamp.report(converted).rows if row.op == "linear"}
    assert found == {"head.body": "low", "head.head": "high"}


def test_a_protected_model_in_a_compiled_one_stays_protected():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), Keeps())
    compiled = torch.compile(model, backend="fxamp", options={"dtype": FP16, "inner": "eager"})
    with torch.no_grad():
        model[1].head.weight.fill_(70000.0)  # past float16's range
    assert compiled(X).isfinite().all() and not torch.equal(compiled(X), model(X))


def test_an_override_that_matches_nothing_names_the_nearest():
    setting = stacked()
    with pytest.raises(OptionError, match=r"blocks\.0\.haed.*module\.blocks\.0\.head"):
        check_overrides(setting.graph, {"module.blocks.0.haed": "deny"})
    check_overrides(setting.graph, {"module.blocks.0.head": "deny", "exp_1": "allow", "*.inner": "infer"})


def test_lists_move_an_op():
    lists = OpLists.default().override(deny=["linear"], allow=["exp"])
    setting = stacked(lists=lists)
    assert_precision(setting, {"linear": "high list", "exp": "low list"})
    assert "lists=" in ir.mark(node_of(setting, "exp")).reason.text


EMPTY = {
    "tensor": lambda y: torch.tensor([], dtype=y.dtype, device=y.device),
    "default dtype": lambda y: torch.tensor([]),
    "empty": lambda y: torch.empty(0, dtype=FP32),
    "zeros": lambda y: torch.zeros((0,)),
}


@pytest.mark.parametrize("empty", EMPTY.values(), ids=EMPTY)
def test_an_empty_tensor_that_cat_skips_has_no_dtype_to_give(empty):
    """A cache of keys begins with one: each key would be made float32 for it, and low again for attention."""

    def model(x, w):
        y = F.linear(x, w)
        return F.linear(torch.cat([empty(y), y], dim=-1), w)

    setting = rewritten(model, X, W)
    assert_precision(setting, {"linear": "low", "cat": "low", "linear 1": "low"})
    assert count_casts(setting) == count_casts(rewritten(lambda x, w: F.linear(torch.cat([F.linear(x, w)]), w), X, W))
    with torch.autocast("cpu", BF16):
        expected = model(X, W).float()
    assert_same(run_graph(setting, X, W)[0], expected)


@pytest.mark.parametrize(
    "model",
    [
        lambda x, w: torch.cat([torch.tensor([], dtype=torch.float64), F.linear(x, w)], -1),  # the result is float64
        lambda x, w: torch.cat([torch.empty(0, 8), F.linear(x, w)]),
        lambda x, w: torch.cat([torch.tensor([0.5]), F.linear(x, w).flatten()]),
        lambda x, w: torch.cat([torch.zeros(3), F.linear(x, w).flatten()]),
        lambda x, w: torch.cat([torch.tensor([]), torch.empty(0)]) + F.linear(x, w).sum(),
    ],
)
def test_other_operands_of_cat_stay(model):
    operands = node_of(rewritten(model, X, W), "cat").args[0]
    assert len(operands) == 2
