"""FXAMP_*LIST_* variables."""

import sys
import types
import warnings

import pytest

from fxamp.errors import FxampWarning, OpListError
from fxamp.lists import COLOURS, EnvironmentChange, OpLists
from fxamp.lists.environment import disabled_by

LISTS = OpLists.default()


def applied(**variables: str) -> tuple[OpLists, list[str]]:
    """Lists under these variables, FXAMP_ left out of their names, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lists = LISTS.with_environment({f"FXAMP_{name}": value for name, value in variables.items()})
    assert all(warning.category is FxampWarning for warning in caught)
    return lists, [str(warning.message) for warning in caught]


def moved(lists: OpLists) -> dict[str, str]:
    return {op: lists.colour(op) for op in {*lists, *LISTS} if lists.colour(op) != LISTS.colour(op)}


@pytest.mark.parametrize("colour", COLOURS)
def test_add_moves_an_op_from_its_list(colour):
    op = "exp" if colour != "deny" else "gelu"
    lists, said = applied(**{f"{colour.upper()}LIST_ADD": op})
    assert moved(lists) == {op: colour}
    assert lists.row(op).origin == f"FXAMP_{colour.upper()}LIST_ADD"
    assert said == []


@pytest.mark.parametrize(("colour", "op"), [("ALLOW", "linear"), ("INFER", "gelu"), ("DENY", "exp"), ("CLEAR", "cat")])
def test_remove_leaves_an_op_unlisted(colour, op):
    lists, said = applied(**{f"{colour}LIST_REMOVE": op})
    assert moved(lists) == {op: "unlisted"}
    assert said == []


def test_changes_are_recorded():
    lists, _ = applied(DENYLIST_ADD="gelu,softmax_", INFERLIST_REMOVE="tanh", CLEARLIST_ADD="my.op")
    assert lists.environment == (
        EnvironmentChange(
            "FXAMP_DENYLIST_ADD",
            "gelu,softmax_",
            ("gelu", "softmax"),
            "gelu: infer -> deny; softmax: infer -> deny",
        ),
        EnvironmentChange("FXAMP_CLEARLIST_ADD", "my.op", ("my.op",), "my.op: unlisted -> clear"),
        EnvironmentChange("FXAMP_INFERLIST_REMOVE", "tanh", ("tanh",), "tanh: infer -> unlisted"),
    )
    assert LISTS.environment == ()


@pytest.mark.parametrize(
    "value", ["exp,log", " exp , log ", "exp,log,", ",exp,,log", "exp,log,exp", "torch.exp,aten::log"]
)
def test_spaces_and_commas_are_forgiven(value):
    lists, said = applied(ALLOWLIST_ADD=value)
    assert moved(lists) == {"exp": "allow", "log": "allow"}
    assert said == []


@pytest.mark.parametrize(
    "name",
    "gelu torch.nn.GELU nn.GELU torch.nn.functional.gelu nn.functional.gelu functional.gelu F.gelu aten.gelu "
    "aten::gelu aten.gelu.default aten::gelu.default torch.ops.aten.gelu ops.aten.gelu".split(),
)
def test_an_op_may_be_named_as_torch_names_it(name):
    lists, said = applied(DENYLIST_ADD=name)
    assert moved(lists) == {"gelu": "deny"} and said == []


@pytest.mark.parametrize("name", ["nn.Linear", "torch.nn.Linear", "nn.functional.linear"])
def test_a_module_class_is_its_op(name):
    assert moved(applied(DENYLIST_ADD=name)[0]) == {"linear": "deny"}


def test_a_package_of_the_users_that_is_called_as_one_of_torchs(monkeypatch):
    monkeypatch.setitem(sys.modules, "functional", types.ModuleType("functional"))
    assert moved(applied(DENYLIST_ADD="functional.fused_norm")[0]) == {"functional.fused_norm": "deny"}


@pytest.mark.parametrize("value", ["", " ", ",", " , "])
def test_an_empty_value_is_no_change(value):
    lists, said = applied(ALLOWLIST_ADD=value, DENYLIST_REMOVE=value)
    assert (lists, lists.environment, said) == (LISTS, (), [])


def test_grapplers_way_to_move_an_op_needs_two_variables_and_works():
    lists, said = applied(DENYLIST_REMOVE="exp", INFERLIST_ADD="exp")
    assert moved(lists) == {"exp": "infer"}
    assert said == []


def test_remove_comes_after_add():
    lists, said = applied(ALLOWLIST_ADD="exp", ALLOWLIST_REMOVE="exp")
    assert moved(lists) == {"exp": "unlisted"}
    assert said == []


@pytest.mark.parametrize(("first", "second"), [("DENY", "ALLOW"), ("INFER", "CLEAR")])
@pytest.mark.parametrize("op", ["linear", "exp", "my.op"])
def test_one_op_added_to_two_lists_is_refused(first, second, op):
    with pytest.raises(OpListError, match=f"{op}' is added to two lists, by FXAMP_\\w+LIST_ADD and by FXAMP") as caught:
        applied(**{f"{first}LIST_ADD": op, f"{second}LIST_ADD": op})
    assert f"FXAMP_{first}LIST_ADD" in str(caught.value) and f"FXAMP_{second}LIST_ADD" in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "warning"),
    [
        (
            {"DENYLIST_ADD": "sofmax"},
            "FXAMP_DENYLIST_ADD: 'sofmax' is not an op of torch. Did you mean 'softmax'?",
        ),
        (
            {"DENYLIST_REMOVE": "rsqt"},
            "FXAMP_DENYLIST_REMOVE: 'rsqt' is not an op of torch. Did you mean 'rsqrt'?",
        ),
        (
            {"DENYLIST_REMOVE": "linear"},
            "FXAMP_DENYLIST_REMOVE=linear: 'linear' is not on that list but allow.",
        ),
        (
            {"DENYLIST_REMOVE": "my.op"},
            "FXAMP_DENYLIST_REMOVE=my.op: 'my.op' is not on that list but unlisted.",
        ),
        ({"DENYLIST_ADD": "GELU"}, "FXAMP_DENYLIST_ADD: 'GELU' is not an op of torch. Did you mean 'gelu'?"),
        (
            {"DENYLIST_ADD": "nn.Linaer"},
            "FXAMP_DENYLIST_ADD: 'nn.Linaer' is not an op of torch. Did you mean 'linear'?",
        ),
        (
            {"DENYLIST_ADD": "aten.geluu"},
            "FXAMP_DENYLIST_ADD: 'aten.geluu' is not an op of torch. Did you mean 'gelu'?",
        ),
        ({"DENYLIST_ADD": "torch.nn.init"}, "FXAMP_DENYLIST_ADD: 'torch.nn.init' is not an op of torch."),
        ({"DENYLIST_ADD": "exp"}, "FXAMP_DENYLIST_ADD=exp: 'exp' is on that list already."),
        (
            {"DENY_LIST_ADD": "exp"},
            "FXAMP_DENY_LIST_ADD is not a variable of fxamp. Did you mean 'FXAMP_DENYLIST_ADD'?",
        ),
        ({"DISABEL": "1"}, "FXAMP_DISABEL is not a variable of fxamp. Did you mean 'FXAMP_DISABLE'?"),
    ],
)
def test_what_has_no_effect_warns(variables, warning):
    lists, said = applied(**variables)
    assert len(said) == 1 and said[0].startswith(warning)
    assert moved(lists) == {}
    assert all(change.effect == "nothing" and change.ops == () for change in lists.environment)


def test_a_warning_comes_once_a_process():
    assert len(applied(DENYLIST_ADD="sofmax")[1]) == 1
    assert applied(DENYLIST_ADD="sofmax")[1] == []
    assert len(applied(DENYLIST_ADD="sotfmax")[1]) == 1


def test_other_variables_are_known():
    assert applied(DISABLE="0", LOG_PATH="runs", LOG_LEVEL="INFO")[1] == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LISTS.with_environment({"PATH": "x", "fxamp_disabel": "1"})


def test_a_misspelt_name_does_not_spoil_its_neighbours():
    assert moved(applied(ALLOWLIST_ADD="sofmax,exp")[0]) == {"exp": "allow"}


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("FXAMP_DENYLIST_ADD", "gelu")
    assert LISTS.with_environment()["gelu"] == "deny"
    assert OpLists.default()["gelu"] == "infer"


def test_arguments_are_stronger_than_the_environment():
    lists = applied(DENYLIST_ADD="gelu")[0].override(allow=["gelu"])
    assert lists["gelu"] == "allow" and lists.environment[0].ops == ("gelu",)


@pytest.mark.parametrize("value", ["1", "true", "True", "YES", "on", " 1 "])
def test_disable_is_on(value):
    assert disabled_by({"FXAMP_DISABLE": value}) == f"FXAMP_DISABLE={value.strip()}"


@pytest.mark.parametrize("value", ["", "0", "false", "False", "NO", "off", " "])
def test_disable_is_off(value):
    assert disabled_by({"FXAMP_DISABLE": value}) is None
    assert disabled_by({}) is None


def test_any_other_value_of_disable_warns_and_says_how_it_is_read():
    with pytest.warns(
        UserWarning, match=r"FXAMP_DISABLE=offf is neither on .*nor off.* Did you mean 'off'\? It is read as on"
    ):
        assert disabled_by({"FXAMP_DISABLE": "offf"}) == "FXAMP_DISABLE=offf"


def test_a_warning_points_at_the_users_line(monkeypatch):
    monkeypatch.setenv("FXAMP_DENYLIST_ADD", "sofmax")
    with pytest.warns(UserWarning, match="sofmax") as caught:
        LISTS.with_environment()
    assert caught[0].filename == __file__
