"""The test language can fail: each check is shown what it must refuse."""

import pytest
import torch
from torch.nn.functional import linear

from fxamp.passes.base import Pass
from tests.language import (
    CAST,
    DECIDE,
    INFER_TYPES,
    NORMALISE,
    PIPELINE,
    assert_colours,
    assert_precision,
    assert_rewrites,
    assert_same,
    assert_untouched,
    captured,
    decided,
    parse,
    run_steps,
)

X, W = torch.randn(4, 8), torch.randn(8, 8)


def product(x, w):
    return linear(x, w)


def cast_product(x, w):
    return linear(x.to(torch.bfloat16), w.to(torch.bfloat16)).to(torch.float32)


def test_a_rewrite_that_happens():
    assert_rewrites(PIPELINE, product, cast_product, X, W)


def test_numbering_does_not_depend_on_the_order_of_independent_nodes():
    def casts_the_other_way_round(x, w):
        weight = w.to(torch.bfloat16)
        return linear(x.to(torch.bfloat16), weight).to(torch.float32)

    assert_rewrites(PIPELINE, product, casts_the_other_way_round, X, W)


def test_another_graph_is_refused():
    with pytest.raises(AssertionError, match="found:"):
        assert_rewrites(PIPELINE, product, product, X, W)


def test_another_dtype_is_refused():
    def in_half(x, w):
        return linear(x.to(torch.float16), w.to(torch.float16)).to(torch.float32)

    with pytest.raises(AssertionError, match="found:"):
        assert_rewrites(PIPELINE, product, in_half, X, W)


def test_a_rewrite_that_does_not_happen_is_refused():
    with pytest.raises(AssertionError, match="nothing was rewritten"):
        assert_rewrites(DECIDE, torch.exp, torch.exp, X)


def test_untouched_refuses_a_change():
    with pytest.raises(AssertionError, match="was:"):
        assert_untouched(PIPELINE, product, X, W)
    assert_untouched(PIPELINE, torch.exp, X)


class Lies(Pass):
    def apply(self, graph):
        return True


class Silent(Pass):
    def apply(self, graph):
        for node in graph.nodes:
            if node.op == "call_function":
                node.target = torch.tanh
        return False


@pytest.mark.parametrize("a_pass", [Lies(), Silent()])
def test_a_pass_that_lies_about_its_change_is_caught(a_pass):
    with pytest.raises(AssertionError, match="says changed"):
        run_steps((lambda setting: a_pass,), captured(torch.exp, X))


@pytest.mark.parametrize(
    "found, expected, complaint",
    [
        (torch.ones(2), torch.zeros(2), "differs"),
        (torch.ones(2), torch.ones(2).half(), "float16"),
        ((torch.ones(2),), [torch.ones(2)], "is not"),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), "differs"),
        (1, 2, "is 1"),
    ],
)
def test_values_are_compared_exactly(found, expected, complaint):
    with pytest.raises(AssertionError, match=complaint):
        assert_same(found, expected)
    assert_same(found, found)


def test_colours_refuse_a_wrong_colour():
    assert_colours("linear exp linear", "low high low")
    with pytest.raises(AssertionError, match=r"exp .*high .*wanted low"):
        assert_colours("linear exp linear", "low low low")
    with pytest.raises(AssertionError, match="3 statements, 2 colours"):
        assert_colours("linear exp linear", "low high")


def test_precision_refuses_a_wrong_reason():
    setting = decided(torch.exp, X)
    assert_precision(setting, {"exp": "high list"})
    with pytest.raises(AssertionError, match="is not of kind 'literal'"):
        assert_precision(setting, {"exp": "high literal"})
    with pytest.raises(AssertionError, match="no linear among"):
        assert_precision(setting, {"linear": "low"})


def test_programs_are_parsed():
    assert [s.arguments for s in parse("linear a=exp(x) add(a,0)")] == [("x",), ("x",), ("a", "0")]
    with pytest.raises(AssertionError, match="is not a statement"):
        parse("linear +")


def test_steps_may_be_one_or_many():
    assert_untouched(INFER_TYPES, torch.exp, X)
    assert_untouched((INFER_TYPES, NORMALISE), torch.exp, X)
    assert CAST in PIPELINE
