"""Changing lists from Python."""

import dataclasses
import pickle
import warnings

import pytest
import torch
from torch import fx, nn

from fxamp.errors import OpListError
from fxamp.lists import COLOURS, OpLists, Row

LISTS = OpLists.default()


def my_gemm(a, b):
    return a @ b


def my_wrapped_gemm(a, b):
    return a @ b


fx.wrap("my_wrapped_gemm")


class MyLinear(nn.Linear):
    pass


class MyFunction(torch.autograd.Function):
    pass


@pytest.mark.parametrize("colour", COLOURS)
def test_override_moves_an_op(colour):
    lists = LISTS.override(**{colour: ["softmax"]})
    assert lists["softmax"] == colour
    assert len(lists) == len(LISTS)
    assert LISTS["softmax"] == "infer"
    assert {op for op in lists if lists[op] != LISTS[op]} == ({"softmax"} if colour != "infer" else set())


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("exp", "exp"),
        ("exp_", "exp"),
        ("concat", "cat"),
        ("torch.exp", "exp"),
        ("torch.nn.functional.gelu", "gelu"),
        ("torch.ops.aten.exp.default", "exp"),
        ("aten::exp", "exp"),
        ("torch.nn.LayerNorm", "layer_norm"),
        ("my_project.layers.fused", "my_project.layers.fused"),
        ("torchvision::roi_align", "torchvision::roi_align"),
        (torch.exp, "exp"),
        (torch.Tensor.exp_, "exp"),
        (torch.ops.aten.exp.default, "exp"),
        (nn.Softmax, "softmax"),
        (nn.SyncBatchNorm, "batch_norm"),
        (my_gemm, f"{__name__}.my_gemm"),
        (MyLinear, f"{__name__}.MyLinear"),
        (MyFunction, f"{__name__}.MyFunction"),
        (MyFunction.apply, f"{__name__}.MyFunction"),
    ],
)
def test_ways_to_name_an_op(op, name):
    assert LISTS.override(clear=[op])[name] == "clear"
    assert LISTS.override(clear=op)[name] == "clear"


def test_a_users_subclass_does_not_move_its_base():
    lists = LISTS.override(deny=[MyLinear])
    assert lists["linear"] == "allow"
    assert lists[f"{__name__}.MyLinear"] == "deny"


def test_moved_rows_keep_their_operands_and_say_who_moved_them():
    row = LISTS.override(deny=["batch_norm"]).row("batch_norm")
    assert row == Row("batch_norm", "deny", "moved from infer by lists=", ((0, "input"),), "lists=")
    assert LISTS.override(allow=[my_gemm]).row(f"{__name__}.my_gemm").reason == "added by lists="


def test_an_op_named_for_its_own_list_is_the_callers_wish():
    row = LISTS.override(infer=["softmax"]).row("softmax")
    assert (row.origin, row.reason) == ("lists=", LISTS.row("softmax").reason)


def test_one_op_for_two_lists_is_refused():
    with pytest.raises(OpListError, match="'exp' is named for infer and for deny; keep one"):
        LISTS.override(infer=["exp"], deny=[torch.exp])


@pytest.mark.parametrize(
    ("misspelt", "hint"),
    [
        ("sofmax", "Did you mean 'softmax'"),
        ("torch.nn.functional.gelo", "is not an op of torch"),
        ("xyzzy", "'xyzzy'"),
    ],
)
def test_a_misspelt_op_is_refused(misspelt, hint):
    with pytest.raises(OpListError, match=hint) as caught:
        LISTS.override(allow=[misspelt])
    assert f"override(allow=...): {misspelt!r} is not an op of torch." in str(caught.value)


def test_unknown_ops_are_unlisted():
    assert LISTS.colour("no_such_op") == "unlisted"
    assert LISTS.row("no_such_op") is None
    with pytest.raises(KeyError, match="no_such_op"):
        LISTS["no_such_op"]


def test_lists_are_frozen():
    with pytest.raises(TypeError, match="does not support item assignment"):
        LISTS["exp"] = "allow"
    with pytest.raises(dataclasses.FrozenInstanceError, match="environment"):
        LISTS.environment = ()
    with pytest.raises(dataclasses.FrozenInstanceError, match="colour"):
        LISTS.row("exp").colour = "allow"


def test_default_is_cached_and_shows_its_counts():
    assert OpLists.default() is LISTS
    assert repr(LISTS).startswith("OpLists(") and " allow, " in repr(LISTS)


def test_digest_follows_colours_and_operands():
    changed = LISTS.override(deny=["softmax"])
    assert changed.digest() == LISTS.override(deny=["softmax"]).digest() != LISTS.digest()
    assert changed.override(infer=["softmax"]).digest() == LISTS.digest()
    assert hash(changed.override(infer=["softmax"])) == hash(LISTS)


def test_lists_are_equal_where_all_of_their_rows_are():
    own = LISTS.override(deny=["pow"])  # where it is: now by the caller's wish, which a written out norm follows
    assert dict(own) == dict(LISTS) and own != LISTS
    assert LISTS.override(deny=["pow"]) == own and own == dict(own)


def test_pickle_keeps_everything():
    lists = LISTS.override(deny=["softmax"]).with_environment({"FXAMP_ALLOWLIST_ADD": "my.gemm"})
    copy = pickle.loads(pickle.dumps(lists))
    assert copy == lists and copy.environment == lists.environment
    assert copy.row("my.gemm") == lists.row("my.gemm")


@pytest.mark.parametrize("given", [my_gemm, f"{__name__}.my_gemm"])
def test_a_python_function_that_capture_enters_is_warned_about_with_what_to_do(given):
    with pytest.warns(UserWarning, match=r"override\(deny=...\): .*my_gemm' is a Python function.*float_function"):
        LISTS.override(deny=[given])
    with pytest.warns(UserWarning, match=r"FXAMP_DENYLIST_ADD: .*my_gemm' is a Python function"):
        LISTS.with_environment({"FXAMP_DENYLIST_ADD": f"{__name__}.my_gemm"})


def test_what_a_graph_holds_as_an_op_is_not_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LISTS.override(deny=[my_wrapped_gemm, MyLinear, MyFunction, MyFunction.apply, f"{__name__}.my_wrapped_gemm"])
        LISTS.override(deny=["torch.nn.functional.gelu", torch.nn.functional.cross_entropy, "not_loaded.fused"])


@pytest.mark.parametrize("bad", [5, None, object(), torch.nn.Linear(2, 2), torch.nn.Sequential()])
@pytest.mark.parametrize("is_one", [True, False])
def test_what_names_no_op_is_refused(bad, is_one):
    with pytest.raises(OpListError, match=r"override\(deny=...\): .* names no op\. Give a name, a function or a class"):
        OpLists.default().override(deny=bad if is_one else [bad])
