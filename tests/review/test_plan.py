"""Saved plans: replayed exactly, compared, and honest about what no longer matches."""

import json
import warnings

import pytest
import torch
from review_cases import FP16, Language, Two, tokens
from torch import nn

import fxamp
from fxamp.cli import main
from fxamp.dtypes import dtype_name
from fxamp.errors import OptionError
from fxamp.review.plan import load_plan, plan_of
from fxamp.review.plan_diff import diff_plans
from fxamp.review.report import report
from fxamp.review.what_if import what_if

BF16 = torch.bfloat16
X = torch.linspace(-1, 1, 32).reshape(4, 8)


def convert(**more):
    return fxamp.convert(Language().eval(), FP16, (tokens(),), **more)


def precisions(model):
    return {row.name: row.precision for row in report(model).rows if not row.role}


def test_a_plan_replays_on_a_model_converted_otherwise(tmp_path):
    strict = convert(level="strict", overrides={"blocks.1.ff": "deny"})
    plan = report(strict).save_plan(tmp_path / "plan.json")
    with pytest.warns(UserWarning) as said:
        again = convert(plan=plan)
    (text,) = (str(each.message) for each in said)
    assert "the plan of Language was saved at level='strict', this conversion is at level='balanced'" in text
    assert precisions(again) == precisions(strict) != precisions(convert())
    kinds = {row.reason_kind for row in report(again).rows if row.op in ("linear", "gelu", "softmax")}
    assert kinds <= {"plan", "absorbed"}
    assert torch.equal(again(tokens()).isfinite(), torch.ones_like(again(tokens()), dtype=torch.bool))


def overflows(m, x):
    return m.b((m.a(x) * 1e6).relu() * 1e-6)


@pytest.mark.parametrize("low, other", [(BF16, FP16), (FP16, BF16)])
def test_a_plan_of_the_other_low_dtype_is_refused(low, other, tmp_path):
    """What bfloat16 holds may be inf in float16, and what float16 tells apart may be equal in bfloat16."""
    plan = report(fxamp.convert(Two(overflows), low, (X,))).save_plan(tmp_path / "plan.json")
    names = dtype_name(low), dtype_name(other)
    said = rf"the plan of Two was saved in {names[0]}, .* in {names[1]}.*dtype='{names[0]}'"
    for given in (plan, load_plan(plan)):
        for example in ((X,), None):
            with pytest.raises(OptionError, match=said):
                fxamp.convert(Two(overflows), other, example, plan=given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bool(fxamp.convert(Two(overflows), low, (X,), plan=plan)(X).isfinite().all())


def test_a_plan_of_another_opt_level_and_level_says_so_once(tmp_path):
    def model():
        return Two(lambda m, x: m.b(m.a(x)).softmax(-1))

    plan = report(fxamp.convert(model(), FP16, (X,))).save_plan(tmp_path / "plan.json")
    with pytest.warns(UserWarning) as said:
        again = fxamp.convert(model(), FP16, (X,), opt_level="O2", level="strict", plan=plan)
        again(X[None])
    (text,) = (str(each.message) for each in said)
    assert "saved at opt_level='O1', level='balanced', this conversion is at opt_level='O2', level='strict'" in text
    assert "decides about parameters (at O3 about everything) and nodes that are not in the plan. Give" in text
    assert "Give opt_level='O1', level='balanced', or save a plan at opt_level='O2', level='strict'." in text
    assert [row.runs_in for row in report(again).rows if row.name == "a_weight"] == ["float16"] * 2


def test_overrides_are_stronger_than_a_plan(tmp_path):
    plan = report(convert()).save_plan(tmp_path / "plan.json")
    assert precisions(convert(plan=plan, overrides={"blocks.0.qkv": "deny"}))["linear"] == "high"


def test_masks_stay_finite_under_a_plan(tmp_path):
    def masked(m, x):
        return m.b((m.a(x) + torch.zeros(8).masked_fill(x[0] > 0, torch.finfo(torch.float32).min)).softmax(-1))

    first = fxamp.convert(Two(masked), FP16, (X,))
    second = fxamp.convert(Two(masked), FP16, (X,), plan=report(first).save_plan(tmp_path / "plan.json"))
    assert bool(second(X).isfinite().all())


def test_what_no_longer_matches_is_said(tmp_path):
    plan = report(fxamp.convert(Two(lambda m, x: m.a(x).exp()), FP16, (X,))).save_plan(tmp_path / "plan.json")
    with pytest.warns(UserWarning) as said:
        fxamp.convert(Two(lambda m, x: m.a(x).sin()), FP16, (X,), plan=plan)
    text = str(said[0].message)
    assert ":exp#0 is in the plan and not in the model" in text
    assert ":sin#0 is in the model and not in the plan" in text
    assert "does not fit this model in 2 places" in text


def test_what_reads_other_values_is_not_told_to_be_gone_and_new(tmp_path):
    saved = fxamp.convert(Two(lambda m, x: (h := m.a(x)).exp() + h), FP16, (X,))
    plan = report(saved).save_plan(tmp_path / "plan.json")
    with pytest.warns(UserWarning) as said:
        fxamp.convert(Two(lambda m, x: (h := m.a(x)).sin() + h), FP16, (X,), plan=plan)
    text = str(said[0].message)
    assert ":add#0 reads other values in the model than in the plan" in text and text.count(":add#0") == 1
    assert "does not fit this model in 3 places" in text


def test_a_plan_of_another_model_says_what_differs(tmp_path):
    plan = report(convert()).save_plan(tmp_path / "plan.json")
    with pytest.warns(UserWarning, match=r"the plan of Language does not fit this model in \d+ places"):
        fxamp.convert(Two(lambda m, x: m.a(x)), FP16, (X,), plan=plan)


def test_a_plan_is_a_line_for_a_node(tmp_path):
    path = report(convert()).save_plan(tmp_path / "plan.json")
    lines = [line.strip().rstrip(",") for line in path.read_text().splitlines()]
    line = next(line for line in lines if line.startswith('"blocks.1.qkv:linear#0": '))
    assert line == (
        '"blocks.1.qkv:linear#0": "low | q, k, v = self.qkv(self.norm(x)).chunk(3, -1) | '
        'layer_norm@norm, parameter, parameter | 2x8x48"'
    )
    assert load_plan(path) == plan_of(report(convert()))


def test_differences_name_the_nodes():
    model = convert()
    old, new = plan_of(report(model)), plan_of(what_if(model, deny=["blocks.0.qkv"]))
    changes = {change.node: (change.before, change.after) for change in diff_plans(old, new)}
    assert changes["blocks.0.qkv:linear#0"] == ("low", "high")
    assert not any(node.startswith("blocks.1") for node in changes)
    assert diff_plans(old, old) == []


def test_diff_on_the_command_line(tmp_path, capsys):
    model = convert()
    old = str(report(model).save_plan(tmp_path / "old.json"))
    new = str(what_if(model, deny=["head"]).save_plan(tmp_path / "new.json"))
    assert main(["diff", old, old]) == 0
    assert "equal" in capsys.readouterr().out
    assert main(["diff", old, new]) == 1
    assert "head:linear#0: low -> float32" in capsys.readouterr().out
    assert main(["diff", old, new, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert {"before": "low", "after": "high", "node": "head:linear#0"}.items() <= told["changes"][0].items()
    assert not told["equal"] and told["fields"]["weight_casts"][0] > told["fields"]["weight_casts"][1]


def test_a_difference_in_the_totals_alone_is_told_as_data_too(tmp_path, capsys):
    """`equal` is false and no node has changed: CI must see what has."""
    path = report(convert()).save_plan(tmp_path / "old.json")
    content = json.loads(path.read_text())
    (tmp_path / "new.json").write_text(json.dumps({**content, "casts": content["casts"] + 1}))
    assert main(["diff", str(path), str(tmp_path / "new.json"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told == {"equal": False, "fields": {"casts": [content["casts"], content["casts"] + 1]}, "changes": []}


class Sized(torch.nn.Module):
    """Of another graph for more than three rows, whose title is the same."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        if x.shape[0] > 3:
            y = y.cumsum(-1).exp() + 1
        return self.b(y)


def sized(*lengths, **more):
    model = fxamp.convert(Sized(), FP16, **more)
    for length in lengths:
        model(torch.randn(length, 8))
    return model


def test_graphs_of_one_title_are_compared_with_those_that_fit_them_best(tmp_path, capsys):
    old = str(report(sized(2, 5)).save_plan(tmp_path / "old.json"))
    new = str(report(sized(5, 2)).save_plan(tmp_path / "new.json"))
    assert main(["diff", old, new]) == 0 == main(["diff", new, old])
    assert "equal" in capsys.readouterr().out
    moved = str(report(sized(5, 2, overrides={"exp": "allow"})).save_plan(tmp_path / "moved.json"))
    assert main(["diff", old, moved, "--json"]) == 1
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert {change["node"] for change in changes} == {":exp#0", ":add#0"}
    assert {(change["before"], change["after"]) for change in changes} == {("high", "low")}


def test_a_graph_that_one_plan_alone_has_is_told_as_a_whole(tmp_path):
    both, small = plan_of(report(sized(2, 5))), plan_of(report(sized(2)))
    gone = diff_plans(both, small)
    assert {change.after for change in gone} == {None} and {change.before for change in gone} == {"low", "high"}
    assert {change.node for change in gone} == {"a:linear#0", "b:linear#0", ":cumsum#0", ":exp#0", ":add#0"}
    assert {(change.node, change.before) for change in diff_plans(small, both)} == {(each.node, None) for each in gone}


def test_a_graph_is_converted_by_the_one_that_fits_it_best_in_any_order(tmp_path):
    plan = report(sized(2, 5)).save_plan(tmp_path / "plan.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = sized(5, 2, plan=plan)
    assert main(["diff", str(plan), str(report(again).save_plan(tmp_path / "again.json"))]) == 0


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "cannot be read: No such file"),
        ("nonsense", "is not a plan: it is not JSON"),
        ("{}", r"is not a plan\. Write one with"),
        ('{"fxamp_plan": 99}', "a plan of format 99"),
        ('{"fxamp_plan": 1}', "lacks casts, graphs, level"),
    ],
)
def test_what_is_no_plan_is_refused(content, said, tmp_path):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(OptionError, match=said):
        fxamp.convert(Two(lambda m, x: m.a(x)), FP16, (X,), plan=path)


def test_a_wrong_precision_is_named(tmp_path):
    path = report(convert()).save_plan(tmp_path / "plan.json")
    path.write_text(path.read_text().replace('"head:linear#0": "low |', '"head:linear#0": "lwo |'))
    with pytest.raises(OptionError, match=r"head:linear#0 is 'lwo \|.*'\. Allowed: low, high"):
        load_plan(path)


def test_a_plan_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(OptionError, match=r"the plan cannot be written to .*nowhere"):
        report(convert()).save_plan(tmp_path / "nowhere" / "plan.json")
    (tmp_path / "taken").mkdir()
    with pytest.raises(OptionError, match=r"the plan cannot be written to .*taken"):
        report(convert()).save_plan(tmp_path / "taken")
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


def test_something_else_is_refused():
    with pytest.raises(OptionError, match="plan is a int"):
        fxamp.convert(Two(lambda m, x: m.a(x)), FP16, (X,), plan=3)
    with pytest.raises(OptionError, match="ranges is a int"):
        fxamp.convert(Two(lambda m, x: m.a(x)), FP16, (X,), ranges=3)


@pytest.mark.parametrize("is_training", [True, False])
def test_a_preview_whose_types_are_assumed_gives_no_false_alarm(is_training, tmp_path):
    """Which ops attention is made of, a call tells; its modules are those of the plan."""

    def encoder():
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(is_training)

    first, x = fxamp.convert(encoder(), FP16), torch.randn(2, 6, 16)
    first(x)
    plan = report(first).save_plan(tmp_path / "plan.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = fxamp.convert(encoder(), FP16, plan=plan)
        again(x)
    assert precisions(again) == precisions(first)
    other = torch.nn.Sequential(encoder(), torch.nn.Linear(16, 3))
    with pytest.warns(UserWarning, match="is in the plan and not in the model"):
        fxamp.convert(other, FP16, plan=plan)


class Norm(nn.Module):
    """An RMS norm and a gelu written out, each of which is one op where nothing speaks of its parts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        norm = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return norm * 0.5 * (1 + torch.tanh(0.7978845608028654 * (norm + 0.044715 * norm.pow(3))))


NO_POWERS = fxamp.OpLists.default().override(deny=["pow"])


@pytest.mark.parametrize("options", [{"overrides": {"0.1": "deny"}}, {"level": "strict"}, {"lists": NO_POWERS}])
def test_an_op_that_was_left_written_out_stays_so(options, tmp_path):
    def convert(**more):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), Norm(), nn.Linear(8, 8)) for _ in range(2)]
        return fxamp.convert(nn.Sequential(*blocks), BF16, (X,), **more)

    first = convert(**options)
    plan = report(first).save_plan(tmp_path / "plan.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if "level" in options:
            warnings.filterwarnings("ignore", ".*was saved at level='strict'")
        again = convert(plan=plan)
    assert precisions(again) == precisions(first) != precisions(convert())
    is_fused = "rms_norm" in {row.op for row in report(again).rows}
    assert is_fused == ("overrides" in options)  # the other block's is one op still
    assert torch.equal(again(X), first(X))
