"""Our lists beside autocast's and grappler's."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from known_ops import ONLY_IN_EARLIER, ONLY_IN_LATER, autocast_registrations

from fxamp.errors import OptionError
from fxamp.lists import HERE, TRAITS, OpLists
from fxamp.lists.rows import read_toml
from fxamp.review.op_table import Comparison, compare_ops, differences, op_table

LISTS = OpLists.default()
REFERENCE = read_toml(HERE / "reference.toml")
TOOL = Path(__file__).parents[2] / "tools" / "ops"
ONLY_IN_CUDA_BUILDS = {"_cudnn_rnn"}
BESIDE_THE_MACROS = {"linalg_matrix_sqrth"}
"""What autocast_mode.cpp registers for CUDA by itself."""


def takes_named_dimensions(name: str) -> bool:
    """Whether that is an overload for named dimensions, which torch has no more since 2.13."""
    return torch.__version__ < "2.13" and ("dimname" in name.lower() or ".names_" in name)


@pytest.mark.parametrize(("table", "key"), [("autocast_cuda", "AutocastCUDA"), ("autocast_cpu", "AutocastCPU")])
def test_reference_is_what_autocast_registers(table, key):
    names = [name for policy in REFERENCE[table].values() for name in policy]
    assert len(names) == len(set(names))
    found = {name for name in autocast_registrations(key) if not takes_named_dimensions(name)}
    assert set(names) ^ found <= ONLY_IN_CUDA_BUILDS | ONLY_IN_LATER | ONLY_IN_EARLIER


def test_reference_policies_are_the_macros_of_the_header():
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    macros = {
        "lower_precision_fp": "AT_FORALL_LOWER_PRECISION_FP",
        "fp32": "AT_FORALL_FP32",
        "fp32_set_opt_dtype": "AT_FORALL_FP32_SET_OPT_DTYPE",
        "promote": "AT_FORALL_PROMOTE",
    }
    for policy, macro in macros.items():
        body = header.partition(f"#define {macro}(_)")[2].partition("\n\n")[0]
        names = {
            line.partition("(")[2].partition(")")[0].replace(", ", ".") for line in body.splitlines() if "_(" in line
        }
        beside = {name for name in REFERENCE["autocast_cuda"][policy] if "cudnn" in name} | BESIDE_THE_MACROS
        names = {name for name in names if not takes_named_dimensions(name)}
        assert names and names ^ (set(REFERENCE["autocast_cuda"][policy]) - beside) <= ONLY_IN_LATER


def test_autocast_on_cpu_does_what_the_reference_says():
    dtypes = {}
    a, b = torch.rand(2, 2), torch.rand(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        low = a @ b
        dtypes["lower_precision_fp"] = low.dtype
        dtypes["fp32"] = torch.nn.functional.mse_loss(low, low).dtype
        dtypes["promote"] = torch.cat([low, a]).dtype
    assert dtypes == {"lower_precision_fp": torch.bfloat16, "fp32": torch.float32, "promote": torch.float32}
    for op, policy in [("matmul", "lower_precision_fp"), ("mse_loss", "fp32"), ("cat", "promote")]:
        assert op in REFERENCE["autocast_cpu"][policy]


def test_grapplers_lists_are_disjoint_and_named():
    kinds = [kind for colour in REFERENCE["grappler"].values() for kind in colour]
    assert [len(colour) for colour in REFERENCE["grappler"].values()] == [38, 43, 9, 95]
    assert len(kinds) == len(set(kinds))
    assert set(REFERENCE["grappler_names"]) <= set(kinds)
    assert {op for ops in REFERENCE["grappler_names"].values() for op in ops} <= set(LISTS)


def test_every_difference_from_autocast_says_why():
    found = differences(LISTS, "torch")
    assert {comparison.op for comparison in found} >= {"softmax", "layer_norm", "prelu", "dot"}
    words = ("autocast", "full reduction", "sum of products", "coordinates", "CPU")
    assert [comparison.op for comparison in found if not any(word in comparison.reason for word in words)] == []


def test_level_strict_undoes_every_difference_towards_fp32_on_cuda():
    fp32 = {"fp32", "fp32_set_opt_dtype", "fp32_append_dtype", "banned"}
    ours_low = {
        comparison.op for comparison in compare_ops(LISTS) if comparison.cuda in fp32 and comparison.colour != "deny"
    }
    assert ours_low and ours_low <= TRAITS["strict_deny"]


def test_differences_from_grappler():
    found = {comparison.op: comparison.grappler for comparison in differences(LISTS, "tensorflow")}
    assert found["mean"] == "deny" and found["log_softmax"] == "infer"
    assert "softmax" not in found and "exp" not in found


@pytest.mark.parametrize(
    ("colour", "cuda", "cpu", "differs"),
    [
        ("allow", "lower_precision_fp", "-", False),
        ("allow", "-", "-", False),
        ("allow", "promote", "-", True),
        ("infer", "promote", "promote", False),
        ("infer", "-", "fp32", True),
        ("deny", "banned", "fp32", False),
        ("deny", "fp32", "lower_precision_fp", True),
        ("unlisted", "fp32", "-", True),
    ],
)
def test_what_counts_as_a_difference(colour, cuda, cpu, differs):
    assert Comparison("op", colour, cuda, cpu, "-", "").differs_from("torch") is differs


def test_an_override_shows_as_a_difference():
    assert "exp" not in {comparison.op for comparison in differences(LISTS, "torch")}
    assert "exp" in {comparison.op for comparison in differences(LISTS.override(allow=["exp"]), "torch")}


def test_unknown_reference_is_refused():
    with pytest.raises(OptionError, match=r"No reference 'jax'\. Allowed: torch, tensorflow"):
        differences(LISTS, "jax")


def test_table_has_a_line_an_op():
    comparisons = compare_ops(LISTS)
    lines = op_table(comparisons).splitlines()
    assert len(lines) == len(comparisons) + 2
    assert lines[0].split() == ["op", "fxamp", "autocast", "CUDA", "autocast", "CPU", "grappler"]
    assert ["softmax", "infer", "fp32_set_opt_dtype", "-", "infer"] in [line.split() for line in lines]


def test_the_tool_prints_differences_with_reasons():
    command = [sys.executable, str(TOOL), "--diff", "torch", "--colour", "deny"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = {line.split()[0]: line for line in printed.splitlines()[2:]}
    assert set(rows) == {c.op for c in differences(LISTS, "torch") if c.colour == "deny"}
    assert LISTS.row("dot").reason in rows["dot"]
