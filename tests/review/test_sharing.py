"""Where Dynamo runs one graph for several equal modules, the report, explain and overrides say so."""

import logging
from collections import Counter

import pytest
import torch
from torch import nn

import fxamp
from fxamp.model.engine import engine_of

X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """Two graphs: one before the break, one behind it."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        y = self.a(x)
        torch._dynamo.graph_break()
        return self.norm(y) + x


class Stack(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def called(**more):
    torch.manual_seed(0)
    converted = fxamp.convert(Stack(), torch.float16, capture="dynamo", **more)
    converted(X)
    return converted


def linears(converted):
    return {row.module: row.precision for row in fxamp.report(converted).rows if row.op == "linear"}


class Held:
    def __init__(self, value):
        self.value = value


class Product(nn.Module):
    """Keeps its weight in an object, too, and reads it there, as keras does."""

    def __init__(self):
        super().__init__()
        self.held = Held(nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8)))
        self.weights = nn.ParameterDict({"the/kernel": self.held.value})

    def forward(self, x):
        return x @ self.held.value


def test_a_weight_that_an_object_holds_is_no_other_modules():
    model = nn.Sequential(Product(), nn.ReLU(), Product())
    built = {}
    for capture in ("dynamo", "symbolic"):
        converted = fxamp.convert(model, torch.float16, capture=capture)
        converted(X)
        built[capture] = fxamp.report(converted)
    by_dynamo, by_symbols = built["dynamo"], built["symbolic"]
    assert set(by_dynamo.runs) == {1} and not any("for" in text and "too:" in text for text in by_dynamo.advice)
    assert (by_dynamo.casts, by_dynamo.weight_casts) == (by_symbols.casts, by_symbols.weight_casts)
    assert fxamp.explain(converted, "0").startswith("module 0")


def test_the_report_names_whom_a_graph_serves():
    told = [text for text in fxamp.report(called()).advice if "Dynamo runs the graph of" in text]
    assert told and all("blocks.1" in text and "blocks.2" in text and "blocks.3" in text for text in told)


def test_a_shared_graph_counts_as_often_as_it_runs():
    converted, ran = called(), Counter()
    dynamo = engine_of(converted).otherwise
    dynamo.watch = lambda variant, inputs: ran.update([id(variant)]) or variant.compiled.run(None, *inputs)
    converted(X)
    built = fxamp.report(converted)
    assert built.runs == tuple(ran[id(variant)] for variant in dynamo.variants)
    assert sum(row.runs for row in built.rows if row.op == "linear") == 4 and 1 in built.runs
    assert built.launches == sum(row.runs * row.launches for row in built.rows)


def test_explain_answers_for_a_module_that_runs_anothers_graph():
    converted = called()
    assert set(linears(converted)) == {"blocks.0.a", "blocks.1.a"}
    said = fxamp.explain(converted, "blocks.3.a")
    assert said.startswith("blocks.3.a is run by the graph that was made for blocks.1.a: what is said of it holds")
    assert "overrides= name each by its own path" in said
    assert "module blocks.1.a: 1 of 1 node in float16" in said
    assert fxamp.explain(converted, "blocks.1.a").startswith("module blocks.1.a")
    with pytest.raises(fxamp.OptionError, match=r"'blocks\.9' is no node"):
        fxamp.explain(converted, "blocks.9")


@pytest.mark.parametrize("key", ["blocks.0", "blocks.0.a", "blocks.[0]"])
def test_an_override_of_a_module_behind_a_graph_break_holds_below_it(key):
    assert linears(called(overrides={key: "deny"})) == {"blocks.0.a": "high", "blocks.1.a": "low"}


@pytest.mark.parametrize("overrides", [{"blocks.2": "deny"}, {"blocks.1": "deny"}, {"blocks.3.*": "deny"}])
def test_an_override_that_a_shared_graph_cannot_follow_is_a_warning_once(overrides, caplog):
    with caplog.at_level(logging.WARNING, "fxamp"):
        converted = called(overrides=overrides)
        converted(X)
    told = [record.getMessage() for record in caplog.records if "for both, as decided for" in record.getMessage()]
    assert told and len(set(told)) == len(told)
    assert all("boundaries=" in text for text in told)


@pytest.mark.parametrize("overrides", [{"blocks": "deny"}, {"blocks.*": "deny"}, {}])
def test_an_override_that_holds_for_all_is_none(overrides, caplog):
    with caplog.at_level(logging.WARNING, "fxamp"):
        converted = called(overrides=overrides)
    assert "as decided for" not in caplog.text
    assert set(linears(converted).values()) == ({"high"} if overrides else {"low"})


def product(x, weight):
    torch._dynamo.graph_break()
    return x @ weight


class HandedOn(nn.Module):
    """Its weights come to the graph as arguments of a function, under a name that is no path."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.eye(8) for _ in range(3))

    def forward(self, x):
        for weight in self.weights:
            x = product(x, weight)
        return x


def test_a_weight_that_is_handed_to_a_function_has_its_path_in_the_model():
    """The first product is of inputs without a gradient, and has a graph of its own."""
    converted = fxamp.convert(HandedOn(), torch.float16, capture="dynamo")
    converted(X)
    assert engine_of(converted).way.shared == {"weights.2": "weights.1"}
    told = [text for text in fxamp.report(converted).advice if "Dynamo runs the graph of" in text]
    assert len(told) == 1 and "the graph of weights.1 for weights.2 too" in told[0]
