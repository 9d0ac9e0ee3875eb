"""The counter: what it counts, on the CPU and on fake CUDA tensors, and that the report agrees with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxamp.counting.counts import Counts, SavedTensors, count_step
from fxamp.counting.run import count
from fxamp.counting.table import count_all, main, ratio, ratios_text, worse_than_autocast
from fxamp.counting.zoo import MODELS, Step

ROOT = Path(__file__).resolve().parent.parent
BF16 = torch.bfloat16
# Activation casts and weight casts of the tiny models in one forward, at the default level.
BUDGETS = {
    "resnet50": (2, 23),
    "convnext_tiny": (2, 61),
    "vit_b16": (2, 65),
    "bert_base": (3, 66),
    "gpt2_small": (2, 57),
    "ncf": (3, 15),
}


@pytest.fixture(scope="module")
def on_fake_cuda() -> dict:
    """Counts of some models on fake CUDA tensors, from a process of its own: it opens torch's CUDA doors for good."""
    script = """
import dataclasses, json, torch
from fxamp.counting.table import count_all
models = ("resnet50", "gpt2_small", "lstm_lm", "ncf")
table = count_all(models, ("fp32", "autocast", "O1 balanced", "O2", "half"), torch.float16, "cuda", tiny=True)
print(json.dumps({m: {w: dataclasses.asdict(c) for w, c in row.items()} for m, row in table.items()}))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    return {name: {way: Counts(**counts) for way, counts in row.items()} for name, row in table.items()}


# ---------------------------------------------------------------------------------------------- what is counted


def counted(forward, *parameters) -> Counts:
    return count_step(forward, lambda out: out, parameters)[0]


def test_every_number_of_a_small_step():
    """y = sum(relu(x.view @ w)): one GEMM, relu, sum; backward expands, masks, one GEMM; nothing is cast."""
    x, w = torch.ones(2, 3), nn.Parameter(torch.ones(3, 4))
    found = counted(lambda: torch.relu(x.view(2, 3) @ w).sum(), w)
    forward = (24 + 48 + 32) + (32 + 32) + (32 + 4)
    ones, masked, gemm = (4 + 4), (32 + 32 + 32), (24 + 32 + 48)
    assert found.casts == 0 and found.launches == 3 + 3
    assert found.nbytes == forward + ones + masked + gemm
    assert found.saved_nbytes == 24 + 32


def test_a_cast_counts_once_each_way_and_a_bucket_once():
    x = torch.ones(4, requires_grad=True)
    found = counted(lambda: x.to(BF16).sum())
    assert (found.casts, found.forward_casts, found.tensors_cast, found.cast_nbytes) == (2, 1, 2, 2 * (16 + 8))
    targets = [torch.empty(4, dtype=BF16) for _ in range(3)]

    def bucket():
        torch._foreach_copy_(targets, [x.detach()] * 3)
        return x.sum()

    found = counted(bucket)
    assert (found.casts, found.tensors_cast, found.forward_tensors_cast, found.cast_nbytes) == (1, 3, 3, 3 * 24)


def test_views_allocations_and_same_dtype_copies_are_no_casts():
    x = torch.ones(4, 4, requires_grad=True)
    found = counted(lambda: (x.view(-1).t().clone() + torch.empty(16)).sum())
    assert found.casts == 0 and found.forward_casts == 0
    assert counted(lambda: x.long().sum() * 0 + x.sum()).casts == 0


def test_a_saved_storage_counts_once_and_parameters_do_not():
    x, w = torch.ones(4, 4, requires_grad=True), nn.Parameter(torch.ones(4, 4))
    with SavedTensors([w]) as saved:
        F.gelu(x).sum() + (x.t() @ w).sum()
    assert saved.nbytes == 64


# ----------------------------------------------------------------------------------------------- the zoo, on CPU


@pytest.mark.parametrize("name", BUDGETS)
def test_the_report_agrees_with_what_runs_and_keeps_its_budget(name):
    found = count(name, "O1 balanced", BF16, "cpu", tiny=True)
    activations, weights = BUDGETS[name]
    assert found.report.casts <= activations and found.report.weight_casts <= weights
    assert found.counts.forward_tensors_cast == found.report.casts + found.report.weight_casts
    buckets = sum(row.op == "packed_cast" for row in found.report.rows)
    assert buckets >= 1
    assert found.counts.forward_casts <= found.report.casts + buckets + 3, "at most three tables are cast alone"


def test_float32_has_no_casts_and_every_way_gives_the_same_ops():
    fp32, ours = (count("resnet50", way, BF16, "cpu", tiny=True).counts for way in ("fp32", "O1 balanced"))
    assert fp32.casts == 0
    assert ours.launches - ours.casts == fp32.launches


# ------------------------------------------------------------------------------------------- on fake CUDA tensors


@pytest.mark.parametrize("name", ["resnet50", "gpt2_small", "ncf"])
def test_fake_cuda_and_the_cpu_cast_the_same(name, on_fake_cuda):
    really = count(name, "O1 balanced", BF16, "cpu", tiny=True).counts
    fake = on_fake_cuda[name]["O1 balanced"]
    assert (fake.casts, fake.tensors_cast) == (really.casts, really.tensors_cast)


def test_autocast_casts_every_weight_by_itself(on_fake_cuda):
    gemm_weights = [p for p in MODELS["resnet50"](True).model.parameters() if p.dim() > 1]
    weights_bias_and_output = len(gemm_weights) + 2
    assert on_fake_cuda["resnet50"]["autocast"].tensors_cast == 2 * weights_bias_and_output + 1  # and the image


def test_the_order_of_the_ways(on_fake_cuda):
    for name, row in on_fake_cuda.items():
        assert row["fp32"].casts == 0 and row["half"].casts == 2, name
        assert row["half"].casts <= row["O2"].casts <= row["O1 balanced"].casts < row["autocast"].casts, name
        assert row["half"].launches <= row["O1 balanced"].launches < row["autocast"].launches, name
        assert row["half"].nbytes <= row["O1 balanced"].nbytes, name


def test_an_lstm_is_one_kernel_each_way(on_fake_cuda):
    assert on_fake_cuda["lstm_lm"]["half"].launches < 30


def test_no_model_is_worse_than_autocast(on_fake_cuda):
    assert worse_than_autocast(on_fake_cuda, "O1 balanced") == []


def test_tables(on_fake_cuda):
    text = ratios_text(on_fake_cuda)
    assert "cast launches" in text and str(round(ratio(on_fake_cuda, "casts", "half"), 3)) in text
    worse = {"m": {"autocast": Counts(casts=1, nbytes=4), "O1": Counts(casts=2, nbytes=4)}}
    assert worse_than_autocast(worse, "O1") == ["m: cast launches 2.000"]
    assert ratio(worse, "casts", "O1") == 2.0


def test_the_command_prints_a_table_and_names_what_it_does_not_know(capsys):
    main(["ncf", "--device", "cpu", "--dtype", "bfloat16", "--ways", "fp32,half"])
    printed = capsys.readouterr().out
    assert "CPU tensors, really run" in printed and "ncf" in printed
    with pytest.raises(SystemExit):
        main(["nfc"])
    assert "'nfc' is neither a model nor a way" in capsys.readouterr().err


def test_a_model_of_ones_own():
    def make(tiny: bool) -> Step:
        return Step(nn.Linear(8, 8), (torch.ones(2, 8),), lambda out: out.sum())

    assert count(make, "O1 balanced", BF16, "cpu").report.weight_casts == 2


def test_count_all_is_a_table():
    table = count_all(["ncf"], ["fp32"], BF16, "cpu", tiny=True)
    assert table["ncf"]["fp32"].launches > 0
