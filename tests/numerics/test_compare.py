"""compare and find_deny: errors node by node, and the planted sensitive nodes found again."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import fxamp
from fxamp.errors import OptionError
from fxamp.numerics.bisect import find_deny
from fxamp.numerics.compare import compare
from fxamp.numerics.distance import error_of, largest_difference
from fxamp.numerics.recording import record
from fxamp.numerics.run import call_of

FP16, BF16 = torch.float16, torch.bfloat16
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Chain(nn.Module):
    """Six linear layers with GELU; after the planted ones a large offset comes and goes, and digits are lost."""

    def __init__(self, planted=(), depth=6):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.planted = planted

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            y = layer(x)
            if number in self.planted:
                y = (y + 1000.0) - 1000.0
            x = nn.functional.gelu(y)
        return x


def pair(planted=(), dtype=FP16, **more):
    model = Chain(planted)
    return model, fxamp.convert(model, dtype, (X,), **more)


def test_errors_are_those_of_the_two_runs():
    model, converted = pair()
    result = compare(model, converted, (X,))
    with torch.no_grad():
        expected = error_of(model(X), converted(X))
    assert result.output == expected > 0
    assert [row.error for row in result.rows] == sorted((row.error for row in result.rows), reverse=True)
    assert result.loss is None and all(row.gradient is None for row in result.rows)


def test_a_model_all_in_float32_has_no_error():
    model, converted = pair(overrides={"*": "deny"})
    result = compare(model, converted, (X,), loss_fn=lambda output: output.sum())
    assert result.output == 0 and all(row.error == 0 and row.gradient == 0 for row in result.rows)
    assert result.loss[0] == result.loss[1]


@pytest.mark.parametrize("planted", [0, 2, 5])
def test_the_planted_node_introduces_most(planted):
    model, converted = pair((planted,))
    result = compare(model, converted, (X,))
    worst = max(result.rows, key=lambda row: row.introduced)
    assert worst.op in ("add", "sub"), worst
    assert "test_compare.py:" in worst.source


def test_gradients_are_compared_and_left_alone():
    model, converted = pair()
    result = compare(model, converted, (X,), loss_fn=lambda output: output.pow(2).mean(), scale=1024.0)
    rows = {row.name: row for row in result.rows}
    assert 0 < rows["linear"].gradient < 0.02
    assert all(parameter.grad is None for parameter in model.parameters())


def test_flushed_values_are_told():
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1e-5)
    converted = fxamp.convert(model, FP16, (X,))
    rows = {row.name: row for row in compare(model, converted, (X * 1e-4,)).rows}
    assert rows["linear"].flushed == 1.0 and rows["linear"].error == 1.0


def test_an_overflow_is_the_worst_error():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].bias.fill_(6e4)
        model[0].weight.fill_(6e4)
    result = compare(model, fxamp.convert(model, FP16, (X,)), (X,))
    assert math.isinf(result.rows[0].error) and math.isinf(result.output)


def test_an_infinite_error_is_still_json():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight.fill_(6e4)
        model[0].bias.fill_(6e4)
    converted = fxamp.convert(model, FP16, (X,))

    def refuse(text):
        raise AssertionError(f"{text} is no JSON")

    read = json.loads(json.dumps(compare(model, converted, (X,)).as_dict()), parse_constant=refuse)
    assert read["output"] == "inf" and read["rows"][0]["error"] == "inf"
    found = find_deny(model, converted, (X,), 1e-2, progress=False)
    read = json.loads(json.dumps(found.as_dict()), parse_constant=refuse)
    assert read["overrides"] == found.overrides and read["is_met"] is found.is_met


def test_padding_is_not_an_error():
    model = nn.Sequential(nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 8))
    converted = fxamp.convert(model, BF16, (X,), pad="always")
    result = compare(model, converted, (X,))
    assert {row.name for row in result.rows} >= {"linear", "relu", "linear_1"}
    assert result.output < 2**-6  # a few roundings of bfloat16, each up to 2**-9


def test_the_table_is_worst_first():
    model, converted = pair((2,))
    lines = str(compare(model, converted, (X,), lambda output: output.sum())).splitlines()
    assert lines[0].startswith("largest relative error of an output: ") and "; loss " in lines[0]
    values, weights = [number for number, line in enumerate(lines) if line.startswith("---")]
    result = compare(model, converted, (X,), lambda output: output.sum())
    assert lines[values + 1].split()[0] == result.rows[0].name
    assert lines[weights - 1].startswith("gradient of") and lines[weights + 1].split()[0] == result.weights[0].name


def test_the_first_node_that_loses_its_values_is_named():
    """Its readers' gradients are products with zeros then, and no finding of their own."""
    model, converted = pair((2,))
    result = compare(model, converted, (X,), lambda output: output.sum())
    assert [(found.name, found.phase, found.lost) for found in result.underflows] == [("sub", "forward", 1.0)]
    assert str(result).splitlines()[1].startswith("underflow: sub (`sub`, low) at ")
    assert compare(*pair(()), (X,), lambda output: output.sum()).underflows == ()


def test_of_weights_that_are_cast_together_the_one_that_is_lost_is_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[1].weight.mul_(1e-8)
    converted = fxamp.convert(model, torch.float16, (X,))
    (found,) = compare(model, converted, (X,), lambda output: output.sum()).underflows
    assert (found.op, found.module, found.phase, found.lost) == ("to", "1", "forward", 1.0)


class Quiet(nn.Module):
    """A product whose gradients are small, read twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        return self.b(y.tanh()) + y


@pytest.mark.parametrize("dtype, exponent, expected", [
    (torch.float16, -31, 1), (torch.float16, -12, 0), (torch.bfloat16, -31, 0),
])  # fmt: skip
def test_gradients_that_become_zero_are_told_and_a_scale_keeps_them(dtype, exponent, expected):
    model = Quiet()
    converted = fxamp.convert(model, dtype, (X,))
    found = compare(model, converted, (X,), lambda output: output.sum() * 2.0**exponent).underflows
    assert len(found) == expected
    assert all(each.phase == "backward" and each.lost > 0.9 for each in found)
    scaled = compare(model, converted, (X,), lambda output: output.sum() * 2.0**exponent, scale=2.0**24)
    assert scaled.underflows == ()


@pytest.mark.parametrize("planted", [(1,), (0, 4), (5,)])
def test_bisection_finds_the_planted_nodes(planted):
    model, converted = pair(planted)
    clean = compare(*pair(), (X,)).output
    found = find_deny(model, converted, (X,), tolerance=3 * clean, progress=False)
    assert found.is_met and found.is_minimal and found.is_smallest
    assert "and fewer nodes are not enough (if none in float32 does harm): overrides=" in str(found)
    rows = {row.name: row for row in fxamp.report(converted).rows}
    feeding = {f"layers.{number}" for number in planted}  # in float32 they take the sum behind them along
    assert found.nodes and all(rows[name].op in ("add", "sub") or rows[name].module in feeding for name in found.nodes)
    again = fxamp.convert(Chain(planted), FP16, (X,), overrides=found.overrides)
    assert compare(model, again, (X,)).output <= 3 * clean
    for name in found.nodes:
        fewer = {key: colour for key, colour in found.overrides.items() if key != name}
        rest = fxamp.convert(Chain(planted), FP16, (X,), overrides=fewer or None)
        assert compare(model, rest, (X,)).output > 3 * clean, f"{name} was not needed"


def test_a_tolerance_that_is_met_needs_no_entry():
    found = find_deny(*pair(), (X,), tolerance=0.5, progress=False)
    assert (found.nodes, found.is_met, found.runs) == ((), True, 1)
    assert "nothing needs to be denied" in str(found)


def test_a_set_of_three_gives_way_to_a_pair(monkeypatch):
    order = []

    def error(search, denied):
        order[:] = order or denied  # after none, all are denied, the worst first
        enough = set(order[:3]), set(order[3:5])
        return 0.0 if order and any(each <= set(denied) for each in enough) else 1.0

    monkeypatch.setattr("fxamp.numerics.bisect._Search._run", error)
    found = find_deny(*pair(), (X,), tolerance=0.5, progress=False)
    assert len(order) >= 5 and set(found.nodes) == set(order[3:5]) and found.is_smallest


def test_what_the_runs_did_not_prove_is_said(monkeypatch):
    """Any three will do: each pair would have to be tried."""
    monkeypatch.setattr("fxamp.numerics.bisect._Search._run", lambda search, denied: float(len(set(denied)) < 3))
    found = find_deny(*pair(), (X,), tolerance=0.5, max_runs=24, progress=False)
    assert len(found.nodes) == 3 and found.is_minimal and not found.is_smallest
    assert "larger without any one of them; other nodes may be fewer (24 runs did not tell)" in str(found)


def test_the_number_of_runs_is_bounded_and_said():
    found = find_deny(*pair((0, 2, 4)), (X,), tolerance=1e-5, max_runs=4, progress=False)
    assert found.runs <= 5 and not found.is_minimal
    assert "runs were too few" in str(found) or not found.is_met


BOUNDS = [({"tolerance": 0}, "tolerance=0"), ({"tolerance": 1, "max_runs": 0}, "max_runs=0")]


@pytest.mark.parametrize("options, said", BOUNDS)
def test_wrong_bounds_are_named(options, said):
    with pytest.raises(OptionError, match=said):
        find_deny(*pair(), (X,), **options)


def test_models_in_the_wrong_order_or_that_do_not_belong_together_are_named():
    model, converted = pair((2,))
    with pytest.raises(OptionError, match=r"the first model is converted.*takes \(model, converted, inputs\)"):
        compare(converted, model, (X,))
    with pytest.raises(OptionError, match=r"differ in 14 parameters, such as 'weight' \(\[2, 8\] and none\)"):
        compare(nn.Linear(8, 2), converted, (X,))
    with pytest.raises(OptionError, match="differ in"):
        find_deny(nn.Linear(8, 2), converted, (X,), 1e-3, progress=False)


def test_outputs_that_are_finite_nowhere_are_no_agreement():
    model, converted = pair()
    with torch.no_grad():
        model.layers[-1].weight.fill_(float("nan"))
    result = compare(model, converted, (X,))
    assert result.not_finite == 1.0
    assert "100.0% of the outputs is finite in neither run and not compared" in str(result).splitlines()[0]
    assert compare(*pair(), (X,)).not_finite == 0.0


def test_of_a_wrapper_the_converted_model_inside_is_named():
    _, converted = pair()
    wrapped = nn.Sequential(converted)
    for look in (
        lambda: fxamp.report(wrapped),
        lambda: fxamp.find_nan(wrapped, (X,)),
        lambda: fxamp.explain(wrapped, "a"),
    ):
        with pytest.raises(OptionError, match=r"this Sequential was not converted, the model inside it was.*model\.0"):
            look()


def test_a_search_without_a_finite_output_is_refused():
    model = nn.Linear(8, 8)
    x = torch.full((4, 8), math.nan)
    converted = fxamp.convert(model, torch.float16, (x,))
    with pytest.raises(OptionError, match=r"no output is finite, in float32 either.*find_nan"):
        fxamp.find_deny(model, converted, (x,), 1e-3, progress=False)


def test_a_padded_model_whose_result_is_a_slice():
    """The slice is the padding's own node, and takes nothing out of a packed cast."""
    torch.manual_seed(0)

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 13)

        def forward(self, x, target):
            logits = self.head(x)
            return nn.functional.cross_entropy(logits, target), logits

    call = torch.randn(6, 8), torch.arange(6)
    model = Words()
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=call, pad="always")
    found = fxamp.compare(model, converted, call, lambda result: result[0])
    assert 0 < found.output < 0.02 and {"linear", "cross_entropy"} <= {row.op for row in found.rows}
    assert fxamp.find_nan(converted, call, lambda result: result[0]) is None


def written(h):
    """Writes of every kind, on values that others made."""
    h.add_(1000.0)
    half = h[:, :4]
    half.mul_(0.5)
    h[:, 4:] = half * 3.0
    return torch.relu_(h - 500.0)


def as_made(h):
    """The same out of place; each value's name in `written`."""
    added = h + 1000.0
    half = added[:, :4] * 0.5
    whole = torch.cat([half, half * 3.0], 1)
    return {"linear": h, "add_": added, "getitem": added[:, :4], "mul_": half, "setitem": whole, "sub": whole - 500.0}


class Writes(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.breaks = breaks

    def forward(self, x):
        h = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
            h.add_(1000.0)
            torch._dynamo.graph_break()
            return self.last(h)
        return self.last(written(h))


@pytest.mark.parametrize("with_loss", [False, True])
def test_a_value_that_is_written_later_is_shown_as_it_was_made(with_loss):
    model = Writes()
    with torch.no_grad():
        first = nn.functional.linear(X, model.first.weight, model.first.bias)
        low = nn.functional.linear(X.half(), model.first.weight.half(), model.first.bias.half())
    loss_fn = (lambda output: output.sum()) if with_loss else None
    rows = {
        row.name: row for row in compare(model, fxamp.convert(model, FP16, (X,), level="strict"), (X,), loss_fn).rows
    }
    mixed = as_made(low)  # what writes into a low value is low
    expected = {name: error_of(value, mixed[name]) for name, value in as_made(first).items()}
    assert {name: rows[name].error for name in expected} == expected


def test_what_a_reader_introduces_is_counted_from_the_last_write():
    class Offset(nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            h.add_(1000.0)
            return h - 1000.0

    torch.manual_seed(0)
    model = Offset(8, 8)
    rows = {row.name: row for row in compare(model, fxamp.convert(model, FP16, (X,), level="aggressive"), (X,)).rows}
    assert rows["linear"].error == rows["linear"].introduced > 10 * rows["add_"].error
    assert rows["sub"].introduced == rows["sub"].error - rows["add_"].error


def test_an_activation_in_place_has_its_own_row():
    torch.manual_seed(0)
    layers = nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Conv1d(8, 4, 3)
    model, x = nn.Sequential(*layers), torch.randn(2, 4, 16)
    apart = nn.Sequential(*layers[:2], nn.ReLU(), layers[3])
    one, other = (
        {
            row.op: (row.error, row.largest, row.flushed)
            for row in compare(each, fxamp.convert(each, FP16, (x,)), (x,)).rows
        }
        for each in (model, apart)
    )
    assert one == other and one["batch_norm"][0] != one["relu"][0]


def test_what_code_between_two_graphs_writes_is_not_what_the_graph_gave():
    model, x = Writes(breaks=True), X.clone()
    rows = compare(model, fxamp.convert(model, FP16, capture="dynamo"), (x,)).rows
    with torch.no_grad():
        first = nn.functional.linear(X, model.first.weight, model.first.bias)
        low = nn.functional.linear(X.half(), model.first.weight.half(), model.first.bias.half())
    assert [row.error for row in rows if row.graph == 0 and row.op == "linear"] == [error_of(first, low)]


def test_only_what_is_written_is_copied():
    class Viewed(nn.Linear):
        def forward(self, x):
            h = x + 1.0
            kept = h.reshape(-1)
            other = (h * 2.0).mul_(3.0)
            return kept.sum() + other.sum()

    call = call_of(fxamp.convert(Viewed(8, 8), FP16, (X,)), (X,))
    values = {key[-1]: tensors[0] for key, tensors in record(call, None, None).values.items()}
    assert values["reshape"].data_ptr() == values["add"].data_ptr()
    assert values["mul"].data_ptr() != values["mul_"].data_ptr()
    assert torch.equal(values["mul"] * 3.0, values["mul_"])


EMPTY = "tensor of shape [0, 8]): nothing can be measured on it"


@pytest.mark.parametrize(
    "measure",
    [
        lambda model, low, inputs: compare(model, low, inputs),
        lambda model, low, inputs: find_deny(model, low, inputs, 1e-3),
        lambda model, low, inputs: fxamp.find_nan(low, inputs),
        lambda model, low, inputs: fxamp.audit(model, inputs),
        lambda model, low, inputs: fxamp.audit(low, inputs),
    ],
    ids=["compare", "find_deny", "find_nan", "audit", "audit converted"],
)
@pytest.mark.parametrize("inputs", [X[:0], (X[:0],), {"x": X[:0]}], ids=["tensor", "tuple", "dict"])
def test_an_empty_batch_is_refused_and_not_measured_in_silence(measure, inputs):
    with pytest.raises(OptionError) as said:
        measure(*pair(), inputs)
    assert "the inputs are empty (" + EMPTY in str(said.value)


@pytest.mark.parametrize("is_converted", [True, False])
def test_an_empty_batch_of_a_profile_is_refused_by_its_number(is_converted):
    model = pair()[is_converted]
    with pytest.raises(OptionError) as said:
        fxamp.profile(model, [(X,), (X[:0],)], progress=False)
    assert "batch 1 is empty (" + EMPTY in str(said.value)


@pytest.mark.parametrize("is_converted", [True, False])
def test_what_is_no_iterable_of_batches_is_refused(is_converted):
    with pytest.raises(OptionError, match=r"batches is a NoneType\. Give an iterable"):
        fxamp.profile(pair()[is_converted], None, progress=False)


def test_an_empty_input_beside_others_is_no_empty_batch():
    """As a cache has it before the first call."""

    class Cached(Chain):
        def forward(self, x, cache):
            return super().forward(torch.cat([cache, x]))

    model = Cached()
    assert compare(model, fxamp.convert(model, FP16, (X, X[:0])), (X, X[:0])).output > 0


def test_models_that_are_left_as_they_are_get_no_empty_batch_either():
    model = Chain()
    with pytest.raises(OptionError, match="the inputs are empty"):
        compare(model, fxamp.convert(model, FP16, opt_level="O0"), X[:0])


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("share", [0.8, 0.5, 0.05])
def test_at_o2_the_error_is_that_of_a_conversion_with_what_is_found(dtype, share):
    """Weights that only denied nodes read are stored in float32 then."""
    model = Chain()
    level = {"opt_level": "O2"}
    converted = fxamp.convert(Chain(), dtype, (X,), **level)
    tolerance = compare(model, converted, (X,)).output * share
    found = find_deny(model, converted, (X,), tolerance, progress=False)
    again = fxamp.convert(Chain(), dtype, (X,), overrides=found.overrides, **level)
    assert found.is_met and found.error == compare(model, again, (X,)).output <= tolerance


class Cancelled(nn.Module):
    """Of six layers one's result is rounded by what reads it; or (`own`) is a result that low precision cannot give."""

    def __init__(self, own=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.own = own
        if own:
            with torch.no_grad():
                self.layers[3].bias += 300.0

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            y = layer(x)
            if number == 3:
                y = y - 300.0 if self.own else (y + 300.0) - 300.0
            x = torch.tanh(y)
        return x


WIDE = torch.linspace(-1, 1, 128).reshape(8, 16)


def test_a_gemm_is_not_denied_where_what_reads_it_loses_its_result():
    model, converted = Cancelled(), fxamp.convert(Cancelled(), FP16, (WIDE,))
    found = find_deny(model, converted, (WIDE,), 1e-3, progress=False)
    assert found.nodes == ("add",) and found.is_met and found.is_smallest
    again = fxamp.convert(Cancelled(), FP16, (WIDE,), overrides=found.overrides)
    assert compare(model, again, (WIDE,)).output == found.error
    assert fxamp.report(again).coverage == 1.0


def test_a_gemm_that_itself_is_too_coarse_is_denied():
    model, converted = Cancelled(own=True), fxamp.convert(Cancelled(own=True), FP16, (WIDE,))
    found = find_deny(model, converted, (WIDE,), 2e-3, progress=False)
    assert "linear_3" in found.nodes and found.is_met and found.is_minimal


@pytest.mark.parametrize("max_runs", range(2, 12))
def test_no_more_runs_than_allowed(max_runs):
    converted = fxamp.convert(Cancelled(), FP16, (WIDE,))
    assert find_deny(Cancelled(), converted, (WIDE,), 1e-3, max_runs=max_runs, progress=False).runs <= max_runs


WRONG = {
    "tolerance=nan": lambda m, c: find_deny(m, c, (X,), math.nan, progress=False),
    "max_runs=1 is too few": lambda m, c: find_deny(m, c, (X,), 1e-3, max_runs=1, progress=False),
    "max_runs=2.5": lambda m, c: find_deny(m, c, (X,), 1e-3, max_runs=2.5, progress=False),
    "tolerance='x'": lambda m, c: find_deny(m, c, (X,), "x", progress=False),
    "scale=0": lambda m, c: compare(m, c, (X,), scale=0),
    "scale=nan": lambda m, c: compare(m, c, (X,), scale=math.nan),
    "scale=-1": lambda m, c: compare(m, c, (X,), scale=-1),
    "scale=inf": lambda m, c: compare(m, c, (X,), scale=math.inf),
    r"^inputs is None\. Give a tensor": lambda m, c: compare(m, c, None),
    r"^inputs is None\. Give": lambda m, c: fxamp.find_nan(c, None),
    "inputs is None": lambda m, c: find_deny(m, c, None, 1e-3, progress=False),
    "example_inputs is a str": lambda m, c: fxamp.convert(m, FP16, "x"),
    "model is a NoneType, not an nn.Module": lambda m, c: compare(None, c, (X,)),
    "converted is a NoneType, not an nn.Module": lambda m, c: compare(m, None, (X,)),
    "model is a NoneType": lambda m, c: fxamp.find_nan(None, (X,)),
    "model is a function": lambda m, c: fxamp.watch_nan(lambda x: x).__enter__(),
}


@pytest.mark.parametrize("said, ask", WRONG.items(), ids=WRONG)
def test_wrong_arguments_are_named(said, ask):
    with pytest.raises(OptionError, match=said):
        ask(*pair())


TAKE_INPUTS = {
    "compare": lambda m, c, given: compare(m, c, given),
    "find_deny": lambda m, c, given: find_deny(m, c, given, 1e-3, progress=False),
    "find_nan": lambda m, c, given: fxamp.find_nan(c, given),
    "audit": lambda m, c, given: fxamp.audit(m, given),
    "audit of a converted model": lambda m, c, given: fxamp.audit(c, given),
    "profile": lambda m, c, given: fxamp.profile(m, [given], progress=False),
    "profile of a converted model": lambda m, c, given: fxamp.profile(c, [X, given], progress=False),
}


@pytest.mark.parametrize("tool", TAKE_INPUTS)
@pytest.mark.parametrize(("given", "kind"), [("x", "a str"), (3.0, "a float"), ({1}, "a set")], ids=str)
def test_what_no_call_can_have_is_named(tool, given, kind):
    with pytest.raises(OptionError, match=rf"^inputs is {kind}\. Give a tensor, a tuple of arguments, .* keywords\.$"):
        TAKE_INPUTS[tool](*pair(), given)


class Moody(nn.Module):
    """Differs between train() and eval()."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.drop, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.drop(self.norm(self.a(x))))


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_both_run_as_the_converted_model_has_it_and_differing_modules_are_named(capture, fresh_dynamo):
    model, converted = Moody().train(), fxamp.convert(Moody().eval(), FP16, capture=capture)
    found = compare(model, converted, (X,))
    assert 0 < found.output < 0.01
    assert found.other_flags == ("", "a", "norm", "drop", "b")
    said = "train() or eval() differs in the model itself, a, norm and 2 more: both ran as the converted model has it"
    assert said in str(found) and model.training and model.norm.training and not converted.norm.training
    same = compare(Moody().eval(), converted, (X,))
    assert same.output == found.output and not same.other_flags and "train()" not in str(same)
    assert find_deny(model, converted, (X,), 0.01, progress=False).nodes == ()


def test_a_set_to_deny_comes_with_the_overrides_that_the_model_has():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    today = fxamp.convert(model, torch.float16, (torch.randn(4, 8),), overrides={"2": "deny"})
    found = find_deny(model, today, (torch.randn(4, 8),), 1e-7, progress=False)
    assert found.nodes and found.overrides == {"2": "deny", **dict.fromkeys(found.nodes, "deny")}
    assert fxamp.report(fxamp.convert(model, torch.float16, (torch.randn(4, 8),), overrides=found.overrides)).casts == 0


def test_what_dynamo_leaves_outside_of_its_graphs_reads_the_weights_of_each_model(fresh_dynamo):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(self.fc(x), lengths, batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]

    torch.manual_seed(0)
    model = Packed()
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, capture="dynamo")
    given = torch.randn(2, 3, 4), torch.tensor([3, 2])
    found = fxamp.compare(model, converted, given, lambda out: out.square().sum())
    assert {row.name for row in found.weights} == {name for name, _ in model.named_parameters()}
    assert all(0 < row.error < 0.05 for row in found.weights)
    with torch.no_grad():
        for weight in model.lstm.parameters():
            weight.zero_()
    assert fxamp.compare(model, converted, given).output == math.inf
    assert converted.lstm.weight_ih_l0 is not model.lstm.weight_ih_l0 and converted.lstm.weight_ih_l0.any()


@pytest.mark.parametrize("make", [nn.BatchNorm1d, nn.LayerNorm])
def test_at_O3_norms_that_are_stored_low_are_tried_in_float32(make):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), make(16), nn.Linear(16, 3)), torch.randn(8, 16)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, opt_level="O3")
    found = fxamp.find_deny(model, converted, (x,), tolerance=1e-9)
    assert not found.is_met and found.error < fxamp.compare(model, converted, (x,)).output


@pytest.mark.parametrize(
    "one, other, expected",
    [
        ([1.0, 2.0], [1.5, 2.0], 0.5),
        ([1.0, 2.0], [math.inf, 2.0], math.inf),
        ([1.0, 2.0], [math.nan, 2.5], math.inf),
        ([math.inf, 2.0], [math.inf, 2.5], 0.5),
        ([math.nan, 2.0], [3.0, 2.5], 0.5),
        ([math.nan], [math.nan], 0.0),
        ([], [], 0.0),
    ],
)
def test_the_largest_difference_is_infinite_where_low_precision_alone_is(one, other, expected):
    assert largest_difference(torch.tensor(one), torch.tensor(other, dtype=torch.float16)) == expected


def test_gradients_that_a_clamp_takes_are_not_said_to_want_a_larger_scale():
    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.b(self.a(x) * 1e6) * 1e-6

    model, x = Clamped(), torch.randn(32, 16)
    converted = fxamp.convert(copy.deepcopy(model), torch.float16, (x,))
    found = fxamp.compare(model, converted, (x,), lambda y: y.float().square().mean(), scale=2.0**30)
    (lost,) = found.underflows
    assert (lost.op, lost.precision, lost.phase) == ("clamp", "cast", "backward")
    assert "is clamped: deny the op that reads it" in str(lost) and "larger loss scale" not in str(lost)
    denied = fxamp.convert(copy.deepcopy(model), torch.float16, (x,), overrides={"b": "deny"})
    assert not fxamp.compare(model, denied, (x,), lambda y: y.float().square().mean(), scale=2.0**30).underflows
