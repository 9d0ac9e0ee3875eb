"""The data files: one line an op, sorted, with reasons, operands that exist, and no op twice."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from known_ops import ONLY_IN_LATER, float32_samples, in_dtype, op_infos, op_of

from fxamp.errors import OpListError
from fxamp.lists import COLOURS, HERE, TRAITS, OpLists, Row
from fxamp.lists.rows import read_list, read_lists
from fxamp.opnames import canonical_name, is_qualified, is_torch_op

LISTS = OpLists.default()


def ops_in(text: str) -> list[str]:
    return [line.split(" = ")[0].strip('"') for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("colour", COLOURS)
def test_one_sorted_line_an_op(colour):
    ops = ops_in((HERE / f"{colour}.toml").read_text())
    assert ops == sorted(ops)
    assert set(ops) == {op for op in LISTS if LISTS[op] == colour}


def test_no_op_in_two_files():
    ops = [op for colour in COLOURS for op in ops_in((HERE / f"{colour}.toml").read_text())]
    assert len(ops) == len(set(ops)) == len(LISTS)


def test_every_op_exists():
    assert {op for op in LISTS if not is_qualified(op) and not is_torch_op(op)} <= ONLY_IN_LATER


def test_names_are_canonical():
    assert [op for op in LISTS if "::" not in op and canonical_name(op) != op] == []


def test_reasons_are_sentences_not_placeholders():
    for op in LISTS:
        reason = LISTS.row(op).reason
        assert len(reason) > 12 and reason == reason.strip() and not reason.endswith("."), op


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("batch_norm", F.batch_norm),
        ("batch_norm", torch.ops.aten.batch_norm.default),
        ("embedding", F.embedding),
        ("embedding", torch.ops.aten.embedding.default),
        ("group_norm", F.group_norm),
        ("instance_norm", F.instance_norm),
        ("instance_norm", torch.ops.aten.instance_norm.default),
        ("layer_norm", F.layer_norm),
        ("native_batch_norm", torch.ops.aten.native_batch_norm.default),
        ("native_group_norm", torch.ops.aten.native_group_norm.default),
        ("native_layer_norm", torch.ops.aten.native_layer_norm.default),
        ("rms_norm", F.rms_norm),
        ("_scaled_mm", torch.ops.aten._scaled_mm.default),
    ],
)
def test_operands_stand_where_the_row_says(op, function):
    if isinstance(function, torch._ops.OpOverload):
        names = [argument.name for argument in function._schema.arguments]
    else:
        names = list(inspect.signature(function).parameters)
    stated = {keyword for _, keyword in LISTS.row(op).operands}
    found = {keyword for position, keyword in LISTS.row(op).operands if names[position : position + 1] == [keyword]}
    assert found and {name for name in names if name in stated} == found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", ["batch_norm", "instance_norm"])
def test_only_the_input_of_a_norm_with_statistics_is_cast(op, dtype):
    features = torch.randn(2, 3, 4).to(dtype)
    mean, variance, weight, bias = torch.zeros(3), torch.ones(3), torch.ones(3), torch.zeros(3)
    assert LISTS.row(op).operands == ((0, "input"),)
    assert getattr(F, op)(features, mean, variance, weight, bias).dtype == dtype
    assert mean.dtype == torch.float32


NOT_OF_ITS_SAMPLE = {"as_strided", "resize"}
"""Their samples describe the storage of the tensor that comes with them, not of a converted copy."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ops_that_may_run_low_have_a_low_kernel(dtype):
    failed = set()
    for info in op_infos():
        if LISTS[op_of(info)] != "deny" and op_of(info) not in NOT_OF_ITS_SAMPLE:
            for arguments in float32_samples(info, 3):
                tensor, args, kwargs = (in_dtype(argument, dtype) for argument in arguments)
                try:
                    info.op(tensor, *args, **kwargs)
                except (RuntimeError, NotImplementedError) as error:
                    assert "not implemented for" in str(error), f"{info.name}: {error}"
                    failed.add(op_of(info))
    assert failed <= TRAITS["no_low_kernel_cpu"]
    assert "avg_pool3d" in failed


MALFORMED = {
    "[denny]\nexp = 'x'": r"\[denny\] is not a list\. Did you mean 'deny'\? Allowed: allow, infer,",
    "deny = 'exp'": r"deny is 'exp', allowed is a table \[deny\]",
    "[deny]\nexp = 3": r"deny: exp is 3\. Allowed:",
    "[deny]\nexp = ''": r"deny: exp has no reason",
    "[deny]\nexp = { operands = ['0:input'] }": r"deny: exp has no reason",
    "[deny]\nexp = { reason = 'x', operand = [] }": r"deny: exp has the key 'operand'\. Did you mean",
    "[deny]\nexp = { reason = 'x', operands = '0:input' }": r"operands = '0:input'\. Allowed: a list",
    "[deny]\nexp = { reason = 'x', operands = ['input'] }": r"the operand 'input'\. Allowed: \"position:key",
    "[deny]\nexp = { reason = 'x', operands = [0] }": r"the operand 0\. Allowed:",
    "[deny]\nexp = 'x'\nexp = 'y'": r"not valid TOML, or an op stands twice",
    "[deny]\nexp": r"not valid TOML",
    "[deny]\nsofmax = 'x'": r"deny: 'sofmax' is not an op of torch\. Did you mean 'softmax'\?",
    "[deny]\nexp = 'x'\n[allow]\nexp_ = 'y'": r"'exp' stands in allow and in deny",
}


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_file_is_refused(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(OpListError, match=MALFORMED[text]) as caught:
        OpLists.from_toml(path)
    assert str(path) in str(caught.value)


def test_file_over_the_defaults(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[deny]\nsoftmax = "big logits"\n[allow]\n"my.fused" = { reason = "mine", operands = ["1:w"] }\n')
    lists = OpLists.from_toml(path)
    assert lists.row("softmax") == Row("softmax", "deny", "big logits", None, f"lists={path}")
    assert lists.row("my.fused").operands == ((1, "w"),)
    assert lists["linear"] == "allow" and LISTS["softmax"] == "infer"


@pytest.mark.parametrize("colour", COLOURS)
def test_lists_survive_a_round_trip_through_a_file(tmp_path, colour):
    text = (HERE / f"{colour}.toml").read_text()
    path = tmp_path / "all.toml"
    path.write_text(f"[{colour}]\n{text}")
    as_default = [(row.op, row.colour, row.reason, row.operands) for row in read_list(HERE / f"{colour}.toml", colour)]
    assert [(row.op, row.colour, row.reason, row.operands) for row in read_lists(path)] == as_default
