"""traits.toml against what torch does when the ops run."""

import pytest
import torch
import torch.nn.functional as F
from known_ops import float32_samples, op_infos, op_of

from fxamp.lists import DOMAIN_SENSITIVE, HERE, TRAITS, OpLists

LISTS = OpLists.default()
INDEX_DTYPES = (torch.int64, torch.int32)
SAMPLES = 5


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors(item)] if isinstance(value, (tuple, list)) else []


def results():
    """(op, arguments, result) of each op of torch's database on a few samples."""
    for info in op_infos():
        if torch.float32 in info.dtypes:
            for tensor, args, kwargs in float32_samples(info, SAMPLES):
                yield op_of(info), (tensor, *args), info.op(tensor, *args, **kwargs)


@pytest.fixture(scope="module")
def ran():
    return list(results())


def ops_where(ran, holds) -> set[str]:
    return {op for op, arguments, result in ran if holds(arguments, result)}


@pytest.mark.parametrize("trait", sorted(TRAITS))
def test_sorted_listed_and_explained(trait):
    text = (HERE / "traits.toml").read_text()
    comment, _, body = text.partition(f"\n{trait} = [\n")
    assert comment.rpartition("\n")[2].startswith("# ")
    ops = [line.strip(' ",') for line in body.partition("]")[0].splitlines()]
    assert ops == sorted(TRAITS[trait])
    assert TRAITS[trait] <= set(LISTS)


def test_bool_result(ran):
    found = ops_where(ran, lambda _, result: isinstance(result, torch.Tensor) and result.dtype == torch.bool)
    assert found <= TRAITS["bool_result"]
    seen = {op for op, _, _ in ran}
    assert TRAITS["bool_result"] & seen <= found


def test_integer_result(ran):
    def is_integer(_, result):
        return isinstance(result, torch.Tensor) and result.dtype in INDEX_DTYPES

    seen = {op for op, _, _ in ran}
    found = ops_where(ran, is_integer)
    assert TRAITS["integer_result"] & seen <= found
    # int converts to the dtype in its name
    assert found - TRAITS["integer_result"] - TRAITS["factory"] == {"int"}


def test_shape_result(ran):
    found = ops_where(ran, lambda _, result: not tensors(result))
    assert found <= TRAITS["shape_result"]
    seen = {op for op, _, _ in ran} - {"getattr"}
    assert TRAITS["shape_result"] & seen <= found


def test_values_and_indices(ran):
    def has_both(_, result):
        dtypes = [tensor.dtype for tensor in tensors(result)]
        return isinstance(result, tuple) and dtypes[:1] == [torch.float32] and dtypes[-1] in INDEX_DTYPES

    assert ops_where(ran, has_both) <= TRAITS["values_and_indices"]


IN_PLACE = {"cauchy", "exponential", "geometric", "log_normal", "uniform", "resize", "resize_as", "zero"}
"""torch has these in place only; an in-place op returns its argument, by definition."""


def test_view(ran):
    def shares_storage(arguments, result):
        first = {tensor.untyped_storage().data_ptr() for tensor in tensors(arguments[0]) if is_strided(tensor)}
        return any(is_strided(tensor) and tensor.untyped_storage().data_ptr() in first for tensor in tensors(result))

    def is_strided(tensor):
        return tensor.layout == torch.strided and tensor.numel() > 0

    assert ops_where(ran, shares_storage) - IN_PLACE - {"normal"} <= TRAITS["view"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "op", ["sigmoid", "tanh", "erf", "erfc", "atan", "softmax", "softsign", "hardsigmoid", "relu6"]
)
def test_bounded(op, dtype):
    function = getattr(F, op, None) or getattr(torch, op)
    extremes = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, 0], dtype=dtype)
    assert op in TRAITS["bounded"]
    assert function(extremes, *([-1] if op == "softmax" else [])).abs().max() <= 6


def test_strict_deny_are_default_infer_or_clear():
    assert {LISTS[op] for op in TRAITS["strict_deny"]} == {"infer", "clear"}


@pytest.mark.parametrize("op", sorted(DOMAIN_SENSITIVE))
def test_domain_sensitive_ops_have_those_arguments(op):
    assert list(DOMAIN_SENSITIVE) == sorted(DOMAIN_SENSITIVE)
    assert op in LISTS and all(0 <= position <= 2 for position in DOMAIN_SENSITIVE[op])


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("log", (0.0,)),
        ("log2", (0.0,)),
        ("log10", (0.0,)),
        ("rsqrt", (0.0,)),
        ("reciprocal", (0.0,)),
        ("logit", (1.0,)),
        ("atanh", (1.0,)),
        ("erfinv", (1.0,)),
        ("acos", (1.01,)),
        ("asin", (1.01,)),
        ("acosh", (0.99,)),
        ("div", (1.0, 0.0)),
        ("addcdiv", (1.0, 1.0, 0.0)),
        ("xlogy", (1.0, 0.0)),
    ],
)
def test_a_rounded_argument_leaves_the_domain(op, arguments):
    position = len(arguments) - 1
    assert position in DOMAIN_SENSITIVE[op]
    assert not getattr(torch, op)(*map(torch.tensor, arguments)).isfinite()
