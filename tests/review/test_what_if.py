"""fxamp.what_if and report.suggest: the numbers a conversion with that change really gives."""

import pytest
import torch
from review_cases import FP16, Language, Two, tokens

import fxamp
from fxamp.errors import OptionError
from fxamp.lists import OpLists
from fxamp.review.report import report
from fxamp.review.what_if import suggest, what_if

X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.fixture(scope="module")
def language():
    return fxamp.convert(Language().eval(), FP16, (tokens(),), level="strict")


def totals(built):
    return built.low_precision_nodes, built.casts_to_low, built.casts_to_high, built.weight_casts, built.cast_bytes


@pytest.mark.parametrize(
    "move, conversion",
    [
        ({"infer": "softmax"}, {"lists": OpLists.default().override(infer=["softmax"])}),
        ({"deny": ["linear"]}, {"lists": OpLists.default().override(deny=["linear"])}),
        ({"deny": ["blocks.0"]}, {"overrides": {"blocks.0": "deny"}}),
        ({"allow": ["add_1"]}, {"overrides": {"add_1": "allow"}}),
        ({"deny": ["blocks.*.qkv"]}, {"overrides": {"blocks.*.qkv": "deny"}}),
    ],
)
def test_it_is_the_report_of_a_model_converted_so(language, move, conversion):
    before = totals(report(language))
    expected = fxamp.convert(Language().eval(), FP16, (tokens(),), level="strict", **conversion)
    assert totals(what_if(language, **move)) == totals(report(expected)) != before
    assert totals(report(language)) == before, "the model itself is as it was"


def test_the_training_flags_of_the_graph_are_kept():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8))
    converted = fxamp.convert(model, FP16, (X,))
    converted.eval()
    assert what_if(converted, deny=["0"]).titles == report(converted).titles
    assert all(not module.training for module in (converted, *model.children()))


def test_suggestions_are_tried_and_ranked(language):
    found = suggest(report(language))
    assert len(found) > 1
    assert [move.worth for move in found] == sorted((move.worth for move in found), reverse=True)
    best = next(move for move in found if move.move == "infer=['softmax']")
    after = what_if(language, infer="softmax")
    assert best.casts == report(language).casts - after.casts > 0
    assert best.launches == report(language).launches - after.launches


def test_nothing_to_gain_gives_no_suggestion():
    assert report(fxamp.convert(Two(lambda m, x: m.b(m.a(x).relu())), FP16, (X,))).suggest() == []


@pytest.mark.parametrize("name, hint", [("blocks.0.qvk", "'blocks.0.qkv'"), ("sofmax", "'softmax'")])
def test_an_unknown_name_gets_the_nearest(language, name, hint):
    with pytest.raises(OptionError, match=f"what_if: '{name}' is no node.*Did you mean {hint}"):
        what_if(language, deny=[name])


def test_a_model_without_example_inputs_can_be_asked_too():
    converted = fxamp.convert(Two(lambda m, x: m.a(x).exp()), FP16)
    assert what_if(converted, infer="exp").low_precision_nodes == report(converted).low_precision_nodes + 1


@pytest.mark.parametrize("name", ["F.gelu", "nn.GELU", "GELU", "aten.gelu"])
def test_an_op_may_be_named_as_torch_names_it(language, name):
    assert what_if(language, deny=[name]).summary() == what_if(language, deny=["gelu"]).summary()
    assert what_if(language, deny=[name]).summary() != report(language).summary()


@pytest.mark.parametrize("name", ["LayerNorm", "layernorm"])
def test_a_module_class_means_its_nodes(language, name):
    after = what_if(language, deny=[name])
    assert {row.precision for row in after.rows if row.op == "layer_norm"} == {"high"}


def test_a_source_line_means_its_nodes(language):
    line = next(row.line for row in report(language).rows if row.op == "gelu")
    after = what_if(language, deny=line)
    assert {row.precision for row in after.rows if row.line == line and not row.role} == {"high"}


def test_a_module_is_no_name(language):
    with pytest.raises(OptionError, match=r"Linear is no name\. Give a string: a node, a module path"):
        fxamp.explain(language, torch.nn.Linear(2, 2))


def test_a_name_in_two_lists_is_refused(language):
    with pytest.raises(OptionError, match="what_if: 'gelu' stands in infer and in deny: give it one of them"):
        what_if(language, infer=["gelu"], deny=["gelu"])
