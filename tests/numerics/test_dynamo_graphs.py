"""Models that Dynamo captured, in one graph or in several, are looked into node by node like any other."""

import copy
import gc
import importlib.util
import weakref

import pytest
import torch
from torch import nn

import fxamp
from fxamp.errors import OptionError

FP16, BF16 = torch.float16, torch.bfloat16
X = torch.linspace(-1, 1, 32).reshape(4, 8)


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Part(nn.Module):
    """Two linear layers with a graph break between them."""

    def __init__(self, planted=False):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.planted = planted

    def forward(self, x):
        y = self.first(x)
        torch._dynamo.graph_break()
        if self.planted:
            y = (self.second(y) + 1000.0) - 1000.0
            return y
        return self.second(y)


class Broken(nn.Module):
    """A deciding model: four graphs, two of which stand in a submodule."""

    def __init__(self, planted=False):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.part = Part(planted)
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        y = torch.tanh(self.inner(x))
        if y.sum() > 1e9:
            y = y * 2
        return self.head(self.part(y).tanh())


class Straight(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def called(model, dtype=FP16, **more):
    """Converted through Dynamo and called once."""
    converted = fxamp.convert(model, dtype, capture="dynamo", **more)
    converted(X)
    return converted


def smooth(m, x):
    return m.b(torch.nn.functional.gelu(m.norm(m.a(x)) + 0.5).softmax(-1))


# -------------------------------------------------------------------------------------------------- what_if


def totals(built):
    return built.low_precision_nodes, built.casts_to_low, built.casts_to_high, built.weight_casts, built.cast_bytes


MOVES = [
    ({"infer": ["exp"]}, {"lists": fxamp.OpLists.default().override(infer=["exp"])}),
    ({"deny": ["b"]}, {"overrides": {"b": "deny"}}),
]


@pytest.mark.parametrize("is_called", [False, True], ids=["preview", "called"])
@pytest.mark.parametrize("move, conversion", MOVES)
def test_what_if_is_the_report_of_a_model_converted_so(move, conversion, is_called):
    function = lambda m, x: m.b(m.a(x).exp().sin() + 1.0).relu()  # noqa: E731
    converted = fxamp.convert(Straight(function), FP16, (X,), capture="dynamo")
    if is_called:
        converted(X)
    before = totals(fxamp.report(converted))
    expected = fxamp.convert(Straight(function), FP16, (X,), capture="dynamo", **conversion)
    assert totals(fxamp.what_if(converted, **move)) == totals(fxamp.report(expected)) != before
    assert totals(fxamp.report(converted)) == before


def test_what_if_on_several_graphs():
    converted = called(Broken())
    after = fxamp.what_if(converted, deny=["part.second"])
    before, after_it = (
        {row.module: row.precision for row in built.rows if row.op == "linear"}
        for built in (fxamp.report(converted), after)
    )
    assert after_it == {**before, "part.second": "high"} and before["part.second"] == "low"
    assert after.captures == ("dynamo",) * 4


def test_suggestions_are_made_for_graphs_of_dynamo():
    found = fxamp.report(called(Straight(lambda m, x: m.b(m.a(x).exp() + 1.0)))).suggest()
    assert any(move.move == "infer=['exp']" and move.casts > 0 for move in found)


# -------------------------------------------------------------------------------------------------- compare


def errors(result):
    return sorted((row.source, row.op, row.error, row.gradient) for row in result.rows)


@pytest.mark.parametrize("loss_fn", [None, lambda output: output.pow(2).sum()])
def test_compare_finds_what_it_finds_in_the_symbolic_graph(loss_fn):
    model = Straight(smooth)
    symbolic = fxamp.compare(model, fxamp.convert(model, FP16, (X,), pad_to=0), (X,), loss_fn)
    dynamo = fxamp.compare(model, called(model, pad_to=0), (X,), loss_fn)
    assert errors(dynamo) == errors(symbolic) and dynamo.output == symbolic.output > 0
    assert dynamo.loss == symbolic.loss


def test_compare_goes_through_every_graph_and_says_which():
    model = Broken()
    converted = called(model)
    result = fxamp.compare(model, converted, (X,))
    rows = {(row.graph, row.module): row for row in result.rows if row.op == "linear"}
    assert sorted(rows) == [(0, "inner"), (1, "part.first"), (2, "part.second"), (3, "head")]
    with torch.no_grad():
        plain = model(X)
        expected = float((converted(X) - plain).norm() / plain.norm())
    assert result.output == pytest.approx(expected, rel=1e-5)
    assert str(result).splitlines()[1].split()[0] == "graph"


def test_compare_reads_the_given_models_weights():
    model, other = Broken(), Broken()
    result = fxamp.compare(other, called(model), (X,))
    assert result.output > 0.1, "two random models are not the same"


def test_looking_leaves_report_graphs_state_and_gradients_alone():
    model = Straight(smooth)
    converted = called(model)
    before, graphs = converted.norm.running_mean.clone(), len(fxamp.report(converted).captures)
    fxamp.compare(model, converted, (X,), lambda output: output.sum())
    fxamp.find_nan(converted, (X,), lambda output: output.sum())
    assert torch.equal(converted.norm.running_mean, before)
    assert len(fxamp.report(converted).captures) == graphs
    assert all(parameter.grad is None for parameter in model.parameters())
    converted(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("example", [None, (X,)], ids=["called", "preview"])
def test_dynamos_caches_keep_no_model_alive(example):
    model = Broken()
    converted = fxamp.convert(model, FP16, example, capture="dynamo")
    converted(X)
    fxamp.find_nan(converted, (X,))
    fxamp.what_if(converted, deny=["inner"])
    weight = weakref.ref(model.inner.weight)
    del model, converted
    gc.collect()
    assert weight() is None


def test_a_copy_is_looked_into_when_the_original_is_gone():
    converted = called(Broken())
    twin = copy.deepcopy(converted)
    expected = fxamp.report(converted).outside, totals(fxamp.what_if(converted, deny=["inner"]))
    del converted
    gc.collect()
    assert (fxamp.report(twin).outside, totals(fxamp.what_if(twin, deny=["inner"]))) == expected
    assert expected[0] == () and fxamp.find_nan(twin, (X,)) is None


# -------------------------------------------------------------------------------------------------- find_nan


NODES = [
    ("div", lambda m, x: (m.a(x) * 0.0) / (m.b(x) * 0.0)),
    ("log", lambda m, x: (m.a(x) * 0.0).log()),
    ("mul", lambda m, x: (m.a(x) + 30000.0).half().float() * 1e38),
]


@pytest.mark.parametrize("op, function", NODES, ids=[op for op, _ in NODES])
def test_the_op_is_named(op, function):
    found = fxamp.find_nan(called(Straight(function)), (X,))
    assert (found.op, found.phase) == (op, "forward") and "test_dynamo_graphs.py:" in found.source


def test_an_overflow_is_mended_by_the_deny_it_names():
    def function(m, x):
        return m.b(m.a(x) * 0.0 + 30000.0) * 0.0 + (m.a(x) * 0.0 + 60000.0) * 2.0 * 1e-3

    found = fxamp.find_nan(called(Straight(function), level="aggressive"), (X,))
    if found is not None:
        mended = called(Straight(function), level="aggressive", overrides=found.overrides)
        assert found.overrides and bool(torch.isfinite(mended(X)).all())


@pytest.mark.parametrize("path, graph", [("inner", 0), ("part.first", 1), ("part.second", 2), ("head", 3)])
def test_of_several_graphs_the_right_one_is_named(path, graph):
    model = Broken()
    with torch.no_grad():
        model.get_submodule(path).weight.fill_(6e4)  # a sum of values times it, one way or the other, overflows fp16
        model.get_submodule(path).weight[::2] *= -1
        model.get_submodule(path).bias.fill_(5e4)
    found = fxamp.find_nan(called(model), (X,))
    assert (found.graph, found.module, found.precision) == (graph, path, "low"), str(found)
    assert not found.is_bad_in_float32 and found.overrides
    assert (f" of graph {graph} " in str(found)) is bool(graph)


def test_a_bad_parameter_and_a_bad_input_are_told_apart():
    model = Broken()
    with torch.no_grad():
        model.part.second.weight[0, 0] = float("nan")
    found = fxamp.find_nan(called(model), (X,))
    assert (found.phase, found.graph) == ("parameter", 2) and "second" in found.name
    found = fxamp.find_nan(called(Broken()), (X.clone().fill_(float("nan")),))
    assert (found.phase, found.graph) == ("input", 0)


class Between(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(outside(self.a(x)))


@torch._dynamo.disable
def outside(y):
    return y / 0.0


def test_code_between_two_graphs_is_named_as_such():
    found = fxamp.find_nan(called(Between()), (X,))
    assert found.phase == "between graphs" and "code between two graphs, after " in str(found)
    assert found.source == found.after == f"{__file__}:{Between.forward.__code__.co_firstlineno + 1}"


def test_a_gradient_that_code_between_two_graphs_makes_is_told_of():
    class Rooted(Between):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return self.b(rooted(self.a(x), self.scale))

    @torch._dynamo.disable
    def rooted(y, scale):
        return y + (scale - scale.detach()).abs().sqrt()

    found = fxamp.find_nan(called(Rooted()), (X,), lambda output: output.sum())
    assert found.phase == "between graphs" and found.value.startswith("scale's gradient: float32 [8]")
    assert found.is_bad_in_float32 and "code between two graphs" in str(found)


def test_a_bad_gradient_in_any_graph_is_named():
    class Net(Broken):
        def forward(self, x):
            y = (self.inner(x) * 0.0).sqrt()
            if y.sum() > 1e9:
                y = y * 2
            return self.head(self.part(y).tanh())

    converted = called(Net())
    assert fxamp.find_nan(converted, (X,)) is None, "the forward is finite"
    found = fxamp.find_nan(converted, (X,), lambda output: output.sum())
    assert (found.op, found.phase, found.graph) == ("sqrt", "backward", 0)


def test_a_training_step_is_watched_and_afterwards_all_is_as_before():
    model = Broken()
    with torch.no_grad():
        model.part.second.weight.fill_(6e4)
        model.part.second.bias.fill_(5e4)
    converted = called(model)
    plain = converted(X)
    with pytest.raises(FloatingPointError, match=r"of graph 2 \(`linear`, allow, low\)"), fxamp.watch_nan(converted):
        converted(X).sum().backward()
    assert torch.equal(converted(X), plain)
    with fxamp.watch_nan(called(Broken())) as watch:
        pass
    assert watch.found is None


# ------------------------------------------------------------------------------------- find_deny, profile, audit


def test_bisection_finds_the_planted_node_behind_a_graph_break():
    model = Broken(planted=True)
    converted = called(model)
    plain = Broken()
    clean = fxamp.compare(plain, called(plain), (X,)).output
    found = fxamp.find_deny(model, converted, (X,), tolerance=3 * clean, progress=False)
    assert found.is_met and found.is_minimal and found.nodes
    again = called(model, overrides=found.overrides)
    assert fxamp.compare(model, again, (X,)).output <= 3 * clean


def test_profile_measures_every_graph_and_convert_uses_it():
    model = Broken()
    with torch.no_grad():
        model.part.second.bias.fill_(7e4)
    ranges = fxamp.profile(model, [X, X], lambda output: output.sum(), progress=False)
    assert {node.module for node in ranges.nodes.values() if node.op == "linear"} == {
        *("inner", "part.first", "part.second", "head"),
    }
    assert all(node.gradients.total for node in ranges.nodes.values() if node.op == "linear")
    evidence = [ranges.nodes[name].module for name in ranges.deny(FP16)]
    assert "part.second" in evidence
    fed = called(model, ranges=ranges)
    rows = {row.module: row for row in fxamp.report(fed).rows if row.op == "linear"}
    assert rows["part.second"].reason_kind == "ranges" and rows["inner"].precision == "low"
    assert bool(fed(X).isfinite().all())


def test_audit_looks_into_every_graph():
    class Net(Broken):
        def forward(self, x):
            y = self.inner(x) * 1e6
            if y.sum() > 1e30:
                y = y * 2
            return self.head(self.part(y)) + 1e-7

    found = fxamp.audit(Net(), (X,))
    assert {finding.pattern for finding in found.findings} >= {"literal", "epsilon"}
    assert all("test_dynamo_graphs.py:" in finding.source for finding in found.findings)


def test_a_model_dynamo_gives_up_on_is_refused_with_the_remedy():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        @torch._dynamo.disable
        def forward(self, x):
            return self.fc(x)

    with pytest.raises(OptionError, match=r"Dynamo made no graph of this call of .*Loop.*Convert the submodules"):
        fxamp.find_nan(fxamp.convert(Loop(), FP16, capture="dynamo"), (X,))


# ---------------------------------------------------------------------------------------------------- the model


class Protected(Broken):
    _keep_in_fp32_modules = ("second",)


def test_what_the_model_protects_stays_protected_when_it_runs():
    rows = {row.module: row for row in fxamp.report(called(Protected())).rows if row.op == "linear"}
    assert rows["part.second"].precision == "high" and "_keep_in_fp32_modules" in rows["part.second"].reason
    assert rows["part.first"].precision == "low"


def test_modules_behind_a_graph_break_are_found_by_their_path():
    converted = fxamp.convert(Broken(), FP16, (X,), capture="dynamo", overrides={"part.*": "deny", "head": "deny"})
    converted(X)
    rows = {row.module: row.precision for row in fxamp.report(converted).rows if row.op == "linear"}
    assert rows == {"inner": "low", "part.first": "high", "part.second": "high", "head": "high"}


def test_a_weight_low_precision_would_destroy_is_seen_behind_a_graph_break():
    class Scaled(Broken):
        def __init__(self):
            super().__init__()
            self.part.scale = nn.Parameter(torch.full((8,), 1e-9))

        def forward(self, x):
            y = self.inner(x)
            if y.sum() > 1e9:
                y = y * 2
            return self.head(y * self.part.scale)

    row = next(row for row in fxamp.report(called(Scaled())).rows if row.op == "mul" and row.graph)
    assert row.precision == "high", row.reason


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("name", ["t5", "mpnet"])
def test_a_model_of_hugging_face(name):
    from tests.zoo.hugging_face import call, make

    model, inputs = make(name), call(name)
    converted = fxamp.convert(model, FP16, inputs, capture="dynamo")
    converted(*inputs[0], **inputs[1])
    assert fxamp.report(converted).captures == ("dynamo",)
    result = fxamp.compare(model, converted, inputs, lambda output: output.loss)
    assert 0 < result.output < 0.1 and any(row.gradient for row in result.rows)
    assert fxamp.what_if(converted, deny=["linear"]).low_precision_nodes < fxamp.report(converted).low_precision_nodes
    assert fxamp.find_nan(converted, inputs, lambda output: output.loss) is None, "a healthy model"
    path = next(path for path, _ in model.named_modules() if path.endswith((".wi", "intermediate.dense")))
    with torch.no_grad():
        weight = model.get_submodule(path).weight
        weight.copy_(6e4 * weight.sign())
    found = fxamp.find_nan(converted, inputs, lambda output: output.loss)
    assert found is not None and (found.module, found.op) == (path, "linear"), str(found)


def test_an_override_of_a_module_behind_data_is_taken_and_a_misspelt_one_is_named():
    """On fake tensors Dynamo stops where the model decides on data: what stands behind is not in the preview."""
    options = {"capture": "dynamo", "example_inputs": (X,)}
    converted = fxamp.convert(Broken(), FP16, overrides={"head": "deny"}, **options)
    converted(X)
    assert {row.module: row.precision for row in fxamp.report(converted).rows if row.op == "linear"}["head"] == "high"
    with pytest.raises(OptionError, match=r"overrides: 'innre' matches no module.*Did you mean 'inner'"):
        fxamp.convert(Broken(), FP16, overrides={"innre": "deny"}, **options)


class Later(nn.Module):
    """Has an op in its second graph only."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        if y.sum() > 1e9:
            y = y * 2
        return self.head(torch.log1p(y.exp()))


def test_an_override_of_a_node_behind_data_is_taken_and_one_that_nothing_has_is_told_at_the_first_call(caplog):
    options = {"capture": "dynamo", "example_inputs": (X,)}
    converted = fxamp.convert(Later(), FP16, overrides={"exp": "allow", "no_such": "deny"}, **options)
    assert warnings_of(caplog) == []
    converted(X)
    converted(X)
    assert [row.precision for row in fxamp.report(converted).rows if row.name == "exp"] == ["low"]
    told = "of the graphs so far: overrides: 'no_such' matches no module and no node."
    assert warnings_of(caplog) == [told]


class Numbered(nn.Module):
    """Its second graph has a node `linear_1`, and the model a module `linear1`."""

    def __init__(self):
        super().__init__()
        self.linear1, self.other, self.head = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        y = self.linear1(x)
        if y.sum() > 1e9:
            y = y * 2
        return self.head(torch.tanh(self.other(y)))


def test_the_number_of_a_node_is_no_misspelling_of_a_module():
    converted = fxamp.convert(Numbered(), FP16, (X,), capture="dynamo", overrides={"linear_1": "deny"})
    converted(X)
    assert [row.precision for row in fxamp.report(converted).rows if row.name == "linear_1"] == ["high"]


def warnings_of(caplog):
    return [record.message for record in caplog.records if record.name == "fxamp" and record.levelname == "WARNING"]
