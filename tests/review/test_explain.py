"""fxamp.explain: the chain of reasons of every kind, and remedies that do what they say."""

import re
from pathlib import Path

import pytest
import torch
from review_cases import CASES, FP16, Case, Language, Two, tokens
from torch import nn

import fxamp
from fxamp.dtypes import dtype_name
from fxamp.errors import OptionError
from fxamp.lists import OpLists
from fxamp.review.chain import by_name, chain_of
from fxamp.review.explain import explain, reasons_of
from fxamp.review.find import find_rows
from fxamp.review.outcomes import Outcomes
from fxamp.review.remedies import Remedy, remedies_for
from fxamp.review.report import report

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def converted(case: Case, **more):
    return fxamp.convert(case.model(case.function), case.dtype, (X,), **{**case.options, **more})


@pytest.fixture(scope="module")
def language():
    torch.manual_seed(0)
    return fxamp.convert(Language().eval(), FP16, (tokens(),))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_the_chain_ends_where_the_decision_was_made(case):
    model = converted(case)
    chain = reasons_of(model, case.node)[0]
    assert tuple(row.reason_kind for row in chain) == case.chain
    assert chain[0].precision == case.precision
    text = explain(model, case.node)
    assert case.culprit in text
    assert all(row.name in text and row.reason in text for row in chain)
    assert "what would change it:\n  - " in text


def remedies_of(model, node: str) -> list[Remedy]:
    built = report(model)
    row, outcomes = find_rows(built.rows, node)[1][0], Outcomes(model, built)
    rows = by_name(built.rows, row.graph)
    return remedies_for(chain_of(row, rows), rows, model._fxamp_engine.options.lists, outcomes)


SETTINGS = [case for case in CASES if case.kind not in ("no float", "cast", "conversion", "cut, low", "type", "input")]


@pytest.mark.parametrize("case", SETTINGS, ids=lambda case: case.kind)
def test_every_remedy_that_is_a_setting_changes_the_node(case):
    tried = 0
    for remedy in remedies_of(converted(case), case.node):
        options = dict(remedy.options)
        if remedy.overrides:
            options["overrides"] = {**case.options.get("overrides", {}), **remedy.overrides}
        if remedy.environment:
            lists = case.options.get("lists", OpLists.default())
            options["lists"] = lists.with_environment(remedy.environment)
        if options:
            tried += 1
            row = find_rows(report(converted(case, **options)).rows, case.node)[1][0]
            assert (row.dtype == dtype_name(case.dtype)) == (case.precision == "high"), remedy.text
    assert tried or case.kind in ("override", "boundary", "aliasing", "user dtype", "creation"), "nothing was tried"


class Tied(nn.Module):
    """A language model's table is read by rows, in float32, and as the head's weight, low."""

    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(16, 8)

    def forward(self, tokens):
        x = self.e(tokens)
        return torch.nn.functional.linear(x + x.relu(), self.e.weight)


@pytest.mark.parametrize("level", ["strict", "balanced"])
@pytest.mark.parametrize("dtype", [FP16, torch.bfloat16])
@pytest.mark.parametrize("model, inputs", [(Language, tokens), (Tied, tokens)])
def test_every_option_that_is_offered_changes_the_node(model, inputs, dtype, level):
    def made(**more):
        torch.manual_seed(0)
        given = {"level": level, **more}
        return fxamp.convert(model().eval(), dtype, (inputs().clamp(max=15),), **given)

    today = made()
    high = [row.name for row in report(today).rows if row.precision == "high" and row.op != "output"]
    offered = {(name, *each.options.items()) for name in high for each in remedies_of(today, name) if each.options}
    changed = {options: report(made(**dict(options))).rows for _, *options in offered for options in [tuple(options)]}
    for name, *options in offered:
        row = next(row for row in changed[tuple(options)] if row.name == name)
        assert row.dtype == dtype_name(dtype), (name, options)
    assert offered or model is Tied


def test_a_level_that_changes_nothing_is_not_offered():
    """bfloat16 keeps the norms of a residual stream in float32 at 'balanced' too."""
    models = {dtype: fxamp.convert(Language(), dtype, (tokens(),), level="strict") for dtype in (FP16, torch.bfloat16)}
    assert 'convert(..., level="balanced") lets it run low' in explain(models[FP16], "layer_norm")
    text = explain(models[torch.bfloat16], "layer_norm_1")
    assert "balanced" not in text and 'convert(..., level="aggressive") lets it run low' in text
    assert 'convert(..., overrides={"layer_norm_1": "allow"}) runs this one low' in text


def test_o2_is_offered_for_parameters_that_are_only_read_low():
    model = fxamp.convert(Tied(), FP16, (tokens().clamp(max=15),))
    assert "O2" not in explain(model, "e_weight") and "embedding reads it in float32" in explain(model, "e_weight")
    strict = explain(fxamp.convert(Tied(), FP16, (tokens().clamp(max=15),), level="strict"), "add")
    assert "O2" not in strict and 'convert(..., level="balanced") lets it run low' in strict
    assert 'opt_level="O2"' in explain(fxamp.convert(Two(lambda m, x: m.a(x)), FP16, (X,)), "a_weight")


def test_every_kind_of_reason_the_passes_give_has_a_case():
    passes = Path(fxamp.__file__).parent / "passes"
    code = "\n".join(file.read_text() for file in passes.glob("*.py"))
    kinds = {
        *re.findall(r'\.fix\(\s*\w+, "(?:high|low)", "([\w -]+)"', code),
        *re.findall(r'Reason\("([\w -]+)"', code),
    }
    shown = {kind for case in CASES for kind in case.chain}
    assert len(kinds) > 15
    assert "kernel" in kinds  # it depends on the device: see tests/test_capability.py
    assert kinds - shown == {"kernel", "pack", "pad"}, "give each kind a case here and a remedy"


def test_a_module_a_line_a_class_and_an_op_are_found(language):
    rows = report(language).rows
    line = next(row.line for row in rows if row.name == "log_softmax")
    assert {row.module for row in find_rows(rows, "blocks.1.norm")[1]} == {"blocks.1.norm"}
    assert {row.module for row in find_rows(rows, "blocks.*.norm")[1]} == {"blocks.0.norm", "blocks.1.norm"}
    assert "log_softmax" in [row.name for row in find_rows(rows, line)[1]]
    assert find_rows(rows, "LayerNorm")[0] == find_rows(rows, "layernorm")[0] == "module class"
    assert {row.op for row in find_rows(rows, "gelu")[1]} == {"gelu"}


def test_a_module_tells_its_share_and_its_reasons(language):
    text = explain(language, "blocks.0.ff")
    assert text.splitlines()[0] == "module blocks.0.ff: 3 of 3 nodes in float16, 0 in float32, 4 casts"
    assert "2 x `linear` is on the allow list" in text


def test_what_float32_costs_is_told(language):
    text = explain(language, "log_softmax")
    assert "what it costs: 960 B more read and written than in float16, forward; casts beside it: none" in text


def test_what_float32_costs_a_module_is_told_in_all():
    def function(m, x):
        y = m.a(x).exp()
        return m.b((y + 1.0).sin())

    text = explain(
        fxamp.convert(Two(function), FP16, (X,)), "test_explain.py:" + str(function.__code__.co_firstlineno + 2)
    )
    # add and sin: each reads and writes 4 x 8 numbers in two bytes more
    assert "what float32 costs here: 256 B more read and written than in float16, forward; 1 cast beside them" in text
    unknown = explain(fxamp.convert(Two(function), FP16), "exp")
    assert "what it costs: bytes are not known before example_inputs are given" in unknown


@pytest.mark.parametrize(
    "name, hint",
    [("log_sofmax", "'log_softmax'"), ("blocks.1.nrm", "'blocks.1.norm'"), ("LayerNrm", "'LayerNorm'")],
)
def test_an_unknown_name_gets_the_nearest(language, name, hint):
    with pytest.raises(OptionError, match=f"'{name}' is no node.*Did you mean {hint}"):
        explain(language, name)


def test_a_model_that_was_not_converted_is_named():
    with pytest.raises(OptionError, match=r"this Two was not converted: fxamp\.convert"):
        explain(Two(lambda m, x: x), "a")


def test_an_environment_variable_is_the_end_of_a_chain(monkeypatch):
    monkeypatch.setenv("FXAMP_DENYLIST_ADD", "relu")
    model = fxamp.convert(Two(lambda m, x: m.a(x).relu()), FP16, (X,))
    assert "unset FXAMP_DENYLIST_ADD, which put `relu` on the deny list" in explain(model, "relu")


def test_graphs_with_the_same_answer_give_it_once():
    model = fxamp.convert(Two(lambda m, x: m.a(x).exp()), FP16, (X,))
    model(X[None])
    assert len(report(model).captures) == 2
    assert explain(model, "a_weight").count("a_weight (`parameter`") == 1
    assert explain(model, "linear").count("linear (`linear`") == 2, "their shapes differ"


def test_an_op_of_the_deny_list_is_offered_the_move_to_another_list():
    text = explain(fxamp.convert(Two(lambda m, x: m.a(x).exp() + x), FP16, (X,)), "exp")
    assert "FXAMP_INFERLIST_ADD=exp moves it to infer" in text
    assert 'overrides={"exp": "allow"}) runs this one low and leaves the list alone' in text


def test_a_model_that_is_one_module_itself_is_named_by_its_class():
    converted = fxamp.convert(torch.nn.LayerNorm(8), dtype=torch.bfloat16, example_inputs=(torch.randn(4, 8),))
    assert fxamp.explain(converted, "layer_norm") in fxamp.explain(converted, "LayerNorm")
