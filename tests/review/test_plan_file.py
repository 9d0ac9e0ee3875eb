"""Plans that were edited by hand: what they may say, and what is said where they say something else."""

import json

import pytest
import torch
from review_cases import FP16, Two

import fxamp
from fxamp.errors import OptionError
from fxamp.options import OPT_LEVELS
from fxamp.passes.policy import LEVELS
from fxamp.review.match import Place
from fxamp.review.plan import Plan, load_plan, plan_of, plan_text
from fxamp.review.report import report

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def convert(**more):
    return fxamp.convert(Two(lambda m, x: m.b(m.a(x).exp())), FP16, (X,), **more)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("graphs", [1], "graphs is a list, not a table of graphs by title"),
        ("graphs", None, "graphs is None, not a table of graphs by title"),
        ("graphs", {"t": [1]}, "graphs: t is a list, not a table of nodes"),
        ("graphs", {"t": None}, "graphs: t is None, not a table of nodes"),
        ("graphs", {"t": {":exp#0": 1}}, r"t: :exp#0 is 1\. Allowed: low, high"),
        ("graphs", {"t": {":exp#0": "low | text"}}, r"t: :exp#0 is 'low \| text'\. Allowed: low, high"),
        ("level", None, "level is None. Allowed: strict, balanced, aggressive"),
        ("level", "Strict", r"level is 'Strict'\. Did you mean 'strict'\? Allowed: strict"),
        ("level", ["strict"], "level is a list. Allowed: strict"),
        ("opt_level", 1, "opt_level is 1. Allowed: O0, O1, O2, O3"),
        ("low_dtype", "fp16", "low_dtype is 'fp16'. Allowed: float16, bfloat16"),
        ("model", 3, "model is 3, not a text"),
        ("casts", "four", "casts is 'four', not a number"),
        ("casts", -1, "casts is -1, not a number"),
        ("weight_casts", True, "weight_casts is True, not a number"),
    ],
)
def test_a_field_of_another_kind_is_named_with_the_file_and_a_remedy(field, value, said, tmp_path):
    path = report(convert()).save_plan(tmp_path / "plan.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(OptionError, match=said) as told:
        convert(plan=path)
    assert str(path) in str(told.value) and "Mend it, or save the plan again" in str(told.value)


@pytest.mark.parametrize("fxamp_plan", [None, [2], "2"])
def test_a_format_that_is_none_is_refused(fxamp_plan, tmp_path):
    path = report(convert()).save_plan(tmp_path / "plan.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "fxamp_plan": fxamp_plan}))
    with pytest.raises(OptionError, match="is a plan of format"):
        load_plan(path)


def test_a_path_that_no_file_can_have_is_refused():
    with pytest.raises(OptionError, match=r"the plan cannot be written: path='a\\x00b' holds a NUL character"):
        report(convert()).save_plan("a\0b")
    with pytest.raises(OptionError, match=r"the plan cannot be read: path='a\\x00b' holds a NUL character"):
        load_plan("a\0b")


@pytest.mark.parametrize("text", ["z = x |", "|", "| y", "z = x | # either |", "", "a || b"])
@pytest.mark.parametrize(("reads", "shape"), [("relu, parameter", "4x8"), ("", ""), ("relu", "")])
def test_every_line_survives_the_file(text, reads, shape, tmp_path):
    place = Place("enc", "add", text.replace(" | ", " "), reads, shape)
    plan = Plan("Net", "float16", "O1", "balanced", 0, 0, {"t": {"enc:add#0": "low"}}, {"t": {"enc:add#0": place}})
    (tmp_path / "plan.json").write_text(plan_text(plan))
    assert load_plan(tmp_path / "plan.json") == plan


def test_a_line_that_ends_in_a_bar_is_found_again(tmp_path):
    def lines(m, x):
        return m.b(m.a(x).exp())  # either |

    built = report(fxamp.convert(Two(lines), FP16, (X,)))
    assert load_plan(built.save_plan(tmp_path / "plan.json")) == plan_of(built)


@pytest.mark.parametrize("opt_level", OPT_LEVELS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_plan_of_every_kind_of_conversion_is_read(opt_level, level, tmp_path):
    plan = Plan("Net", "bfloat16", opt_level, level, 0, 0, {})
    (tmp_path / "plan.json").write_text(plan_text(plan))
    assert load_plan(tmp_path / "plan.json") == plan
