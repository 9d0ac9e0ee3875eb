"""The counter: what it counts, on the CPU and on fake CUDA tensors, and that the report agrees with it."""

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import fxamp
from fxamp.counting import run
from fxamp.counting import table as tables
from fxamp.counting.counts import Counter, Counts, SavedTensors, count_step
from fxamp.counting.run import MORE_WAYS, WAYS, count
from fxamp.counting.table import count_all, main, mean_ratio, ratios_text, worse_than_autocast
from fxamp.counting.zoo import (
    COUNTED,
    MODELS,
    PUBLISHED,
    MissingPackageError,
    Step,
    from_torchvision,
    from_transformers,
)
from fxamp.counting.zoo.waveglow import WaveGlow
from fxamp.errors import CaptureError

ROOT = Path(__file__).resolve().parent.parent
BF16 = torch.bfloat16
# Activation casts and weight casts of the tiny models in one forward, at the default level.
BUDGETS = {
    "resnet50": (2, 23),
    "convnext_tiny": (4, 61),  # float16 does not hold its layer scales of 1e-6
    "vit_b16": (2, 65),
    "bert_base": (3, 66),
    "gpt2_small": (2, 57),
    "ncf": (3, 15),
}


@pytest.fixture(scope="module")
def on_fake_cuda() -> dict:
    """Counts of some models on fake CUDA tensors, from a process of its own: it opens torch's CUDA doors for good."""
    script = """
import json, torch
from fxamp.counting.table import as_json, count_all
models = ("resnet50", "gpt2_small", "lstm_lm", "ncf")
table = count_all(models, ("fp32", "autocast", "O1 balanced", "O2", "half"), torch.float16, "cuda", tiny=True)
published = count_all(("resnet50",), ("fp32", "autocast", "half"), torch.float16)
table["resnet50, published"] = published["resnet50"]
print(json.dumps(as_json(table)))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return tables.from_json(json.loads(done.stdout))


@pytest.fixture(scope="module")
def tiny_on_fake_cuda(on_fake_cuda) -> dict:
    return {name: row for name, row in on_fake_cuda.items() if "published" not in name}


# ---------------------------------------------------------------------------------------------- what is counted


def counted(forward, *parameters) -> Counts:
    return count_step(forward, parameters)


def test_every_number_of_a_small_step():
    """y = sum(relu(x.view @ w)): one GEMM, relu, sum; backward expands, masks, one GEMM; nothing is cast."""
    x, w = torch.ones(2, 3), nn.Parameter(torch.ones(3, 4))
    found = counted(lambda: torch.relu(x.view(2, 3) @ w).sum(), w)
    forward = (24 + 48 + 32) + (32 + 32) + (32 + 4)
    ones, masked, gemm = 4, (32 + 32 + 32), (24 + 32 + 48)
    assert found.casts == 0 and found.launches == 3 + 3
    assert found.nbytes == forward + ones + masked + gemm
    assert found.saved_nbytes == 24 + 32
    assert counted(lambda: (x.clone().requires_grad_() @ w).sum(), w).saved_nbytes == 24, "and w, a parameter"


def test_a_cast_counts_once_each_way_and_a_bucket_once():
    x = torch.ones(4, requires_grad=True)
    found = counted(lambda: x.to(BF16).sum())
    assert (found.casts, found.forward_casts, found.tensors_cast, found.cast_nbytes) == (2, 1, 2, 2 * (16 + 8))
    assert found.forward_tensors_cast == 1
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
    assert counted(lambda: (torch.arange(4).float() * x).sum()).casts == 0
    assert counted(lambda: (torch.empty(4).copy_(1.0) * x).sum()).casts == 0


def test_a_copy_that_converts_is_a_cast_from_what_is_read_to_what_is_written():
    x = torch.ones(4)
    with Counter() as counter:
        torch.empty(4, dtype=BF16).copy_(x)
        torch._foreach_copy_([torch.empty(4, dtype=BF16)] * 2, [x, x])
    assert (counter.counts.casts, counter.counts.tensors_cast, counter.counts.cast_nbytes) == (2, 3, 3 * 24)
    assert ["1 x torch.float32->torch.bfloat16" in line for line in counter.cast_log] == [True, False]
    assert "2 x torch.float32->torch.bfloat16" in counter.cast_log[1]


def test_bytes_of_casts_are_those_of_casts_alone():
    x = torch.ones(4)
    with Counter() as counter:
        (x.to(BF16) + 1).float().exp()
    assert counter.counts.cast_nbytes == 2 * 24 and counter.counts.nbytes == 2 * 24 + (8 + 8) + (16 + 16)


def test_what_is_given_by_name_is_read():
    x, order = torch.ones(8), torch.arange(8)
    with Counter() as counter:
        torch.searchsorted(x, x[:4], sorter=order)
    assert counter.counts.launches == 1 and counter.counts.nbytes == 32 + 16 + 64 + 32


def test_what_fake_tensors_are_asked_for_launches_nothing():
    with FakeTensorMode():
        x = torch.ones(4)
        with Counter() as counter:
            x.to("cpu") + 1
    assert counter.counts == Counts(launches=1, nbytes=32)


def test_an_op_that_only_writes_reads_nothing():
    x = torch.ones(64, 64)
    with Counter() as counter:
        x.new_zeros(8)
        torch.zeros_like(x[:2, :4])
    assert counter.counts.nbytes == 32 + 32


def test_a_saved_storage_counts_once_and_parameters_do_not():
    x, w = torch.ones(4, 4, requires_grad=True), nn.Parameter(torch.ones(4, 4))
    with SavedTensors([w]) as saved:
        F.gelu(x).sum() + (x.t() @ w).sum()
    assert saved.nbytes == 64
    with SavedTensors([]) as saved:
        F.gelu(x[:2])
    assert saved.nbytes == 64, "a view keeps the whole"
    with SavedTensors([]) as saved:
        for _ in range(100):
            F.gelu(x + 1)  # what it keeps is freed, and the next may lie where it was
    assert saved.nbytes == 100 * 64


# ----------------------------------------------------------------------------------------------- the zoo, on CPU


@pytest.mark.parametrize("name", BUDGETS)
def test_the_report_agrees_with_what_runs_and_keeps_its_budget(name):
    found = count(MODELS[name], "O1 balanced", torch.float16, "cpu", tiny=True)
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
    really = count(name, "O1 balanced", torch.float16, "cpu", tiny=True).counts
    fake = on_fake_cuda[name]["O1 balanced"]
    assert (fake.casts, fake.tensors_cast) == (really.casts, really.tensors_cast)


def test_autocast_casts_every_weight_by_itself(on_fake_cuda):
    gemm_weights = [p for p in MODELS["resnet50"](True).model.parameters() if p.dim() > 1]
    weights_bias_and_output = len(gemm_weights) + 2
    assert on_fake_cuda["resnet50"]["autocast"].tensors_cast == 2 * weights_bias_and_output + 1  # and the image


def test_the_order_of_the_ways(tiny_on_fake_cuda):
    for name, row in tiny_on_fake_cuda.items():
        assert row["fp32"].casts == 0 and row["half"].casts == 2, name
        assert row["half"].casts <= row["O2"].casts <= row["O1 balanced"].casts < row["autocast"].casts, name
        assert row["half"].launches <= row["O1 balanced"].launches < row["autocast"].launches, name
        assert row["half"].nbytes <= row["O1 balanced"].nbytes, name


def test_an_lstm_is_one_kernel_each_way(on_fake_cuda):
    assert on_fake_cuda["lstm_lm"]["half"].launches < 30


def test_no_model_is_worse_than_autocast(tiny_on_fake_cuda):
    """But in bytes, where autocast's cross entropy takes its log_softmax in float16: tiny models are half loss."""
    worse = [line for name in ("O1 balanced", "O2") for line in worse_than_autocast(tiny_on_fake_cuda, name)]
    assert [line for line in worse if "bytes moved" not in line] == []
    assert all(line.startswith(("resnet50", "lstm_lm", "gpt2_small")) for line in worse)
    assert all(float(line.split()[-1]) < 1.02 for line in worse)


def test_tables(tiny_on_fake_cuda):
    text = ratios_text(tiny_on_fake_cuda)
    assert "cast launches" in text and str(round(mean_ratio(tiny_on_fake_cuda, "cast launches", "half"), 3)) in text
    worse = {"m": {"autocast": Counts(casts=1, nbytes=4), "O1": Counts(casts=2, nbytes=4)}}
    assert worse_than_autocast(worse, "O1") == ["m: cast launches 2.000"]
    assert mean_ratio(worse, "cast launches", "O1") == 2.0


def test_the_command_prints_a_table(capsys):
    main(["ncf", "--device", "cpu", "--dtype", "bfloat16", "--ways", "fp32,half"])
    printed = capsys.readouterr().out
    assert "CPU tensors, really run" in printed and "ncf" in printed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["ncf", "hf_gpt"], "'hf_gpt' is none of the models. Did you mean 'hf_gpt2'?"),
        (["ncf", "--ways", "fp32,O1 strickt"], "'O1 strickt' is none of the ways. Did you mean 'O1 strict'?"),
        (["ncf", "--ways", ""], "'' is none of the ways."),
    ],
)
def test_a_wrong_name_is_refused_before_the_work_and_the_nearest_is_named(arguments, text, monkeypatch, capsys):
    monkeypatch.setattr(tables, "count_all", lambda *_: pytest.fail("counted"))
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and text in capsys.readouterr().err


FLOAT32 = torch.float32
OPTIONS = ("opt_level", "level", "output_dtype")
CONVERTED = {
    "O1 strict": [("Linear", "O1", "strict", FLOAT32)],
    "O1 balanced": [("Linear", "O1", "balanced", FLOAT32)],
    "O1 aggressive": [("Linear", "O1", "aggressive", FLOAT32)],
    "O1 loss inside": [("_WithLoss", "O1", "balanced", FLOAT32)],
    "O1 loss converted": [("_Loss", "O1", "balanced", FLOAT32), ("Linear", "O1", "balanced", None)],
    "O2": [("Linear", "O2", "balanced", FLOAT32)],
    "O2 loss inside": [("_WithLoss", "O2", "balanced", FLOAT32)],
    "O2 loss converted": [("_Loss", "O1", "balanced", FLOAT32), ("Linear", "O2", "balanced", None)],
}
"""Way -> what is converted, its opt_level, level and output dtype: `fxamp.convert`'s arguments."""
SEEN = {"fp32": (None, FLOAT32, FLOAT32), "autocast": (BF16, BF16, FLOAT32), "half": (None, FLOAT32, BF16)}
"""Way -> the region the loss is computed in, the dtype of what it is given, and that of the weights."""


@pytest.mark.parametrize("way", [*WAYS, *MORE_WAYS])
def test_a_way_is_what_it_is_named_for(way, monkeypatch):
    conversions, losses, convert = [], [], run.convert

    def noted(*args, **kwargs):
        given = inspect.signature(convert).bind(*args, **kwargs)
        given.apply_defaults()
        model, dtype, *others = (given.arguments[name] for name in ("model", "dtype", *OPTIONS))
        conversions.append((type(model).__name__, *others))
        assert dtype == BF16
        return convert(*args, **kwargs)

    def make(tiny: bool) -> Step:
        model = nn.Linear(8, 8)

        def loss_of(outputs):
            if way in SEEN:
                region = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
                losses.append((region, outputs.dtype, model.weight.dtype))
            return outputs.float().sum()

        return Step(model, (torch.ones(2, 8),), loss_of)

    monkeypatch.setattr(run, "convert", noted)
    count(make, way, BF16, "cpu")
    assert conversions == CONVERTED.get(way, [])
    assert set(losses) == ({SEEN[way]} if way in SEEN else set())


def test_a_model_of_ones_own():
    def make(tiny: bool) -> Step:
        return Step(nn.Linear(8, 8), (torch.ones(2, 8),), lambda out: out.sum())

    assert count(make, "O1 balanced", BF16, "cpu").report.weight_casts == 2


def test_arguments_by_name_reach_the_model():
    class Scaled(nn.Linear):
        def forward(self, x, *, scale):
            return super().forward(x) * scale

    def make(tiny: bool) -> Step:
        return Step(Scaled(8, 8), (torch.ones(2, 8),), lambda out: out.sum(), {"scale": torch.tensor(2.0)})

    launches = [count(make, way, BF16, "cpu").counts.launches for way in ("fp32", "autocast", "O1 balanced", "half")]
    assert min(launches) > 5


def test_a_model_that_only_dynamo_follows_is_not_counted_as_float32():
    class Writes(nn.Linear):
        def forward(self, x):
            self.seen["calls"] = self.seen.get("calls", 0) + 1
            return super().forward(x)

    def make(tiny: bool) -> Step:
        model = Writes(8, 8)
        model.seen = {}
        return Step(model, (torch.ones(2, 8),), lambda out: out.sum())

    torch._dynamo.reset()
    with pytest.raises(CaptureError, match="Writes was captured by Dynamo"):
        count(make, "O1 balanced", BF16, "cpu")


# --------------------------------------------------------------------------------------------- the published zoo

NEEDS = {
    **{name: "torchvision" for name in from_torchvision.TORCHVISION},
    **{name: "transformers" for name in from_transformers.TRANSFORMERS},
}


def test_published_sizes_give_the_published_bytes(on_fake_cuda):
    """ResNet-50 at 32 images: 25.3 GB in float32, 13.0 under autocast, 12.7 in half (torch 2.13, counted elsewhere)."""
    row = on_fake_cuda["resnet50, published"]
    assert [round(row[way].nbytes / 1e9, 1) for way in ("fp32", "autocast", "half")] == [25.3, 13.0, 12.7]
    assert [row[way].launches for way in ("fp32", "autocast", "half")] == [408, 521, 410]


def test_thirty_one_models_are_counted_by_default():
    assert len(PUBLISHED) == 31 and set(tables.TRANSFORMERS) < set(PUBLISHED)
    assert set(COUNTED) - set(PUBLISHED) == {"waveglow"}, "in no mean: goals were set for the others"


def test_waveglow_is_invertible_and_gives_the_volume_of_its_flow():
    model = WaveGlow(mels=2, group=4, flows=3, width=4, depth=2, stride=4, early=(2, 2)).double()
    mel, wave = torch.randn(1, 2, 2).double(), torch.randn(1, 8).double()
    _, log_scales, volumes = model(mel, wave)
    jacobian = torch.autograd.functional.jacobian(lambda given: model(mel, given)[0].flatten(), wave)[:, 0]
    volume = sum(scale.sum() for scale in log_scales) + sum(volumes)
    torch.testing.assert_close(torch.linalg.slogdet(jacobian)[1], volume, rtol=1e-6, atol=1e-6)


def counted_as(casts, autocast_casts=10):
    counts = Counts(launches=1, casts=1, forward_casts=1, tensors_cast=1, nbytes=1, cast_nbytes=1, saved_nbytes=1)
    return {
        "autocast": dataclasses.replace(counts, casts=autocast_casts),
        "O1 balanced": dataclasses.replace(counts, casts=casts),
    }


def test_a_model_beside_has_rows_and_is_in_no_mean():
    both = {"ncf": counted_as(5), "waveglow": counted_as(40)}
    lines = [line.split() for line in ratios_text(both).splitlines()]
    assert lines[0][:5] == ["against", "autocast,", "geomean", "of", "1"]
    assert ["cast", "launches", "0.5"] in lines and ["waveglow:", "cast", "launches", "4"] in lines
    assert "O1 balanced is worse than autocast: waveglow: cast launches 4.000" in ratios_text(both)
    alone = ratios_text({"waveglow": both["waveglow"]})
    assert ["cast", "launches", "4"] in [line.split() for line in alone.splitlines()], "then it is the mean"


@pytest.mark.parametrize("name", [name for name in COUNTED if NEEDS.get(name) != "torchvision"])
def test_every_tiny_model_has_a_loss_with_gradients(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    step = COUNTED[name](True)
    loss = step.loss_of(step.model(*step.inputs, **step.keywords))
    loss.backward()
    assert loss.shape == () and any(p.grad is not None for p in step.model.parameters())


@pytest.mark.parametrize("name", ["resnet18", "inception_v3", "fcn_resnet50", "ssd300_vgg16", "r3d_18"])
def test_torchvision_models_have_a_loss_with_gradients(name):
    try:
        step = PUBLISHED[name](True)
    except MissingPackageError as error:
        pytest.skip(str(error))
    step.loss_of(step.model(*step.inputs)).backward()
    assert all(p.grad is not None for p in step.model.parameters())


@pytest.mark.parametrize("package", ["torchvision", "transformers"])
def test_a_missing_package_is_said_in_the_row(package, monkeypatch, capsys):
    from_torchvision.torchvision_models.cache_clear()
    for module in (package, f"{package}.models"):
        monkeypatch.setitem(sys.modules, module, None)
    name = next(name for name, needed in NEEDS.items() if needed == package)
    with pytest.raises(MissingPackageError, match=f"needs {package}"):
        PUBLISHED[name](True)
    main([name, "ncf", "--device", "cpu", "--ways", "fp32,autocast,half"])
    printed = capsys.readouterr().out
    assert f"not counted: {name}: needs {package} (pip install" in printed
    assert "geomean of 1" in printed, "ncf is compared all the same"


def test_a_way_that_fails_leaves_the_model_out_of_the_means_and_says_why(monkeypatch):
    really = run.count

    def counting(model, way, *options):
        if (model, way) == ("unet", "O2"):
            raise CaptureError("O2 needs one graph.\nMore.")
        return really(model, way, *options)

    monkeypatch.setattr(tables, "count", counting)
    table = count_all(["ncf", "unet"], ("fp32", "autocast", "O2"), BF16, "cpu", tiny=True)
    assert list(tables.counted(table)) == ["ncf"]
    assert tables.not_counted(table) == ["unet, O2: O2 needs one graph."]
    assert "geomean of 1 " in ratios_text(table) and "not counted: unet, O2" in tables.counts_text(table)
    assert tables.from_json(json.loads(json.dumps(tables.as_json(table)))) == table


def test_count_all_is_a_table():
    table = count_all(["ncf"], ["fp32"], BF16, "cpu", tiny=True)
    assert table["ncf"]["fp32"].launches > 0


def test_a_loss_inside_the_converted_model_needs_no_casts_of_its_own(on_fake_cuda_with_loss_inside):
    rows = on_fake_cuda_with_loss_inside
    outside, inside, autocast = (rows["lstm_lm"][way] for way in ("O1 balanced", "O1 loss inside", "autocast"))
    assert inside.casts == outside.casts - 2, "of the logits, and of their gradient"
    assert inside.launches < outside.launches < autocast.launches
    assert inside.nbytes < outside.nbytes


@pytest.fixture(scope="module")
def on_fake_cuda_with_loss_inside() -> dict:
    script = """
import json, torch
from fxamp.counting.table import as_json, count_all
ways = ("autocast", "O1 balanced", "O1 loss inside", "O2 loss inside")
print(json.dumps(as_json(count_all(("lstm_lm",), ways, torch.float16, "cuda", tiny=True))))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return tables.from_json(json.loads(done.stdout))


@pytest.mark.parametrize("way", ["O1 loss inside", "O2 loss inside", *MORE_WAYS])
def test_the_loss_inside_is_the_same_loss(way):
    losses = []
    for each in (way, "O1 balanced"):
        torch.manual_seed(0)
        converted, loss = run._prepare(MODELS["ncf"](True), each, BF16, "cpu")
        losses.append(loss())
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    assert not any("cross_entropy" in row.op for row in fxamp.report(converted).rows)


def test_in_bfloat16_a_residual_stream_costs_a_cast_a_norm():
    """The stream is float32 there, and what a norm makes of it is cast for the GEMMs."""
    low, half = (count("gpt2_small", "O1 balanced", dtype, "cpu", tiny=True) for dtype in (BF16, torch.float16))
    norms = sum(row.op == "layer_norm" for row in low.report.rows)
    assert half.report.casts < low.report.casts <= half.report.casts + 2 * norms
    assert low.counts.forward_tensors_cast == low.report.casts + low.report.weight_casts
