"""What resamples by weighted means stays in float32: CUDA adds up its gradients in their own dtype."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

import fxamp
from fxamp import ir
from fxamp.passes.resampling import adds_gradients_low
from fxamp.review.report import report

IMAGES = {1: torch.randn(2, 3, 8), 2: torch.randn(2, 3, 8, 8), 3: torch.randn(2, 3, 8, 8, 8)}


class Resampled(nn.Module):
    def __init__(self, resample, rank):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        self.first, self.last, self.resample = conv(3, 4, 1), conv(4, 3, 1), resample

    def forward(self, x):
        return self.last(torch.relu(self.resample(self.first(x))) + 1)


def precisions(resample, rank=2, dtype=torch.bfloat16, **options):
    model = fxamp.convert(Resampled(resample, rank), dtype, (IMAGES[rank],), **options)
    return {row.name.removesuffix("_1"): row.precision for row in report(model).rows}


def interpolated(mode, factor, **options):
    return lambda x: functional.interpolate(x, scale_factor=factor, mode=mode, **options)


SMOOTH = {
    "linear": (interpolated("linear", 2), 1),
    "bilinear": (interpolated("bilinear", 2, align_corners=False), 2),
    "corners": (interpolated("bilinear", 2, align_corners=True), 2),
    "antialias": (interpolated("bilinear", 2, antialias=True), 2),
    "bicubic": (interpolated("bicubic", 2), 2),
    "trilinear": (interpolated("trilinear", 2), 3),
    "one side": (interpolated("bilinear", (2, 0.5)), 2),
    "size": (lambda x: functional.interpolate(x, (11, 11), None, "bilinear"), 2),
    "aten": (lambda x: torch._C._nn.upsample_bilinear2d(x, (16, 16), False, None, None), 2),
    "by keyword": (lambda x: functional.interpolate(size=x.size(-1) * 2, input=x, mode="bilinear"), 2),
    "linear to fewer": (interpolated("linear", 0.5), 1),
    "bicubic to fewer": (interpolated("bicubic", 0.5), 2),
    "trilinear to fewer": (interpolated("trilinear", 0.5), 3),
    "antialias to fewer": (interpolated("bilinear", 0.5, antialias=True), 2),
    "aten, antialias to fewer": (lambda x: torch._C._nn._upsample_bilinear2d_aa(x, (4, 4), False, None, None), 2),
    "module": (nn.Upsample(scale_factor=2, mode="bilinear"), 2),
    "module of its own": (nn.UpsamplingBilinear2d(scale_factor=2), 2),
}
OTHER = {
    "to fewer": (interpolated("bilinear", 0.5), 2),
    "to as many": (interpolated("bilinear", 1), 2),
    "nearest": (interpolated("nearest", 2), 2),
    "nearest-exact": (interpolated("nearest-exact", 2), 2),
    "area": (interpolated("area", 2), 2),
    "default": (lambda x: functional.interpolate(x, scale_factor=2), 2),
}


def of_resampling(found):
    (name,) = [name for name in found if "interpol" in name or "upsampl" in name]
    return found[name]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["strict", "balanced", "aggressive"])
@pytest.mark.parametrize("kind", SMOOTH)
def test_what_resamples_smoothly_is_float32(kind, level, dtype):
    found = precisions(*SMOOTH[kind], dtype=dtype, level=level)
    assert of_resampling(found) == "high"
    assert found[f"conv{SMOOTH[kind][1]}d"] == "low"


@pytest.mark.parametrize("kind", OTHER)
def test_what_adds_few_or_in_float32_is_free(kind):
    assert of_resampling(precisions(*OTHER[kind])) == "low"


def test_what_follows_may_be_low():
    """A mean of low numbers is as low-born as these."""
    found = precisions(*SMOOTH["bilinear"])
    assert (found["relu"], found["add"]) == ("low", "low")


def test_what_is_made_of_numbers_that_are_not_low_born_is_float32():
    """Beyond float16's range, say."""
    found = precisions(lambda x: functional.interpolate(x * 1e6, scale_factor=2, mode="bilinear"), dtype=torch.float16)
    assert found["add"] == "high"


def test_a_size_that_is_not_known_may_be_larger():
    graph = fx.Graph()
    node = graph.call_function(functional.interpolate, (graph.placeholder("x"), (4, 4)), {"mode": "bilinear"})
    ir.set_mark(node, op="interpolate")
    assert adds_gradients_low(node)


@pytest.mark.parametrize("options", [{"overrides": {"interpolate": "allow"}}, {"overrides": {"interpolate": "infer"}}])
def test_the_user_is_stronger(options):
    assert of_resampling(precisions(*SMOOTH["bilinear"], **options)) == "low"


def test_so_is_the_users_list(monkeypatch):
    monkeypatch.setenv("FXAMP_INFERLIST_ADD", "interpolate")
    assert of_resampling(precisions(*SMOOTH["bilinear"])) == "low"


def test_the_gpu_script_runs_dry():
    script = Path(__file__).parents[2] / "tools" / "gpu_gradient_sums"
    ran = subprocess.run([sys.executable, script, "--dry-run"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    head, _, *rows = ran.stdout.splitlines()
    run = [row for row in rows if not row.endswith("no kernel")]
    assert head.endswith("CPU, a dry run") and len(rows) == 20 * 4 - 5 * 2
    assert {row.split()[0] for row in rows if row not in run} == {"avg_pool3d"}
    assert all(float(error) < 0.05 for row in run for error in row.split()[-2:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, whose kernels add in the gradient's dtype")
@pytest.mark.parametrize("kind", ["linear", "bilinear", "bicubic", "trilinear"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_one_number_that_became_many_are_not_lost(kind, dtype):
    """1 -> 32 along each dimension: as near to float32 as under autocast."""
    rank = SMOOTH[kind][1]
    mode = functional.interpolate
    net = Resampled(
        lambda x: mode(x.mean(tuple(range(2, 2 + rank)), keepdim=True), (32,) * rank, mode=kind), rank
    ).cuda()
    images, distances = IMAGES[rank].cuda(), {}
    wanted = None
    for name in ("fp32", "autocast", "fxamp"):
        net.zero_grad()
        run = fxamp.convert(net, dtype, (images,)) if name == "fxamp" else net
        with torch.autocast("cuda", dtype, enabled=name == "autocast"):
            run(images).float().square().sum().backward()
        found = net.first.weight.grad.clone()
        wanted = found if wanted is None else wanted
        distances[name] = float((found - wanted).norm() / wanted.norm())
    assert distances["fxamp"] <= 1.5 * distances["autocast"] + 1e-6
