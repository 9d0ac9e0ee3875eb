"""FlexAttention: low operands, and the kernel that the model would have under torch.compile."""

import contextlib
import copy
import logging
import math
import re

import pytest
import torch
import torch._inductor.config
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.profiler import profile

import fxamp
from fxamp.capture.frames import compile_apart
from fxamp.dynamo import flex

DENSE = "aten::_safe_softmax"  # what the op computes with where it is not compiled

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


class Attention(nn.Module):
    """With a bias by distance, and perhaps a mask; asked for the sums beside the result, or not."""

    def __init__(self, mask: BlockMask | None = None, gives_sums: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.slope = nn.Linear(32, 96), nn.Linear(32, 32), nn.Parameter(torch.rand(2))
        self.mask, self.gives_sums = mask, gives_sums

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 2, 16).permute(2, 0, 3, 1, 4)
        bias = lambda score, b, h, i, j: score + self.slope[h] * (j - i)  # noqa: E731
        if not self.gives_sums:
            y = flex_attention(q, k, v, score_mod=bias, block_mask=self.mask)
            return self.out(y.transpose(1, 2).flatten(2))
        y, sums = flex_attention(q, k, v, score_mod=bias, block_mask=self.mask, return_lse=True)
        return self.out((y * sums[..., None].sigmoid()).transpose(1, 2).flatten(2)) + sums.sum((1, 2))[:, None, None]


@pytest.fixture(autouse=True)
def no_kernels():
    torch._dynamo.reset()
    flex._kernels.clear()


@pytest.fixture
def inductor():
    """torch's own compiler, without the threads that it would leave behind."""
    with torch._inductor.config.patch(compile_threads=1):
        yield


@pytest.fixture
def quick(monkeypatch):
    """What Dynamo makes of the op is run as it is: a kernel takes many seconds."""
    by_eager = lambda function, _, fullgraph: compile_apart(function, "eager", fullgraph)  # noqa: E731
    monkeypatch.setattr(flex, "compile_apart", by_eager)


def distances(gives_sums: bool) -> tuple[nn.Module, float, float]:
    """A converted model, and how far its outputs and autocast's are from float32's."""
    torch.manual_seed(0)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    model, x = Attention(mask, gives_sums).requires_grad_(False), torch.randn(2, 128, 32)
    converted = fxamp.convert(model, torch.bfloat16)
    exact = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = model(x)
    return converted, (converted(x) - exact).norm().item(), (autocast.float() - exact).norm().item()


@pytest.mark.parametrize("gives_sums", [False, True])
def test_operands_are_low_and_sums_are_not(gives_sums, quick):
    converted, ours, autocasts = distances(gives_sums)
    assert ours <= 1.01 * autocasts
    (row,) = [row for row in fxamp.report(converted).rows if row.op == "higher_order::flex_attention"]
    assert (row.precision, row.dtype) == ("low", "bfloat16/float32")


@pytest.mark.parametrize("gives_sums", [False, True])
def test_lengths_and_dtypes_of_inputs_may_change(gives_sums, quick):
    model = Attention(None, gives_sums).requires_grad_(False)
    converted = fxamp.convert(model, torch.bfloat16)
    for length in (64, 32, 48):
        x = torch.randn(2, length, 32)
        assert (converted(x) - model(x)).norm() < 0.02 * model(x).norm()
    low = x.bfloat16()
    assert (converted(low) - model(low.float())).norm() < 0.02 * model(x).norm()


def test_its_products_count(quick):
    (row,) = [row for row in fxamp.report(distances(False)[0]).gemms if row.node == "flex_attention"]
    assert row.batch * row.m * row.n * row.k == 2 * 2 * 128 * 128 * (16 + 16)


def test_the_kernel_is_fused(inductor):
    converted, *_ = distances(False)
    with profile() as seen:
        converted(torch.randn(2, 128, 32))
    assert "aten::addmm" in {event.key for event in seen.key_averages()}
    assert DENSE not in {event.key for event in seen.key_averages()}


def test_layers_share_a_kernel_and_lengths_do_not_use_it_up(quick):
    model = nn.Sequential(Attention(), Attention()).requires_grad_(False)
    converted = fxamp.convert(model, torch.bfloat16)
    compiled = torch._dynamo.utils.counters["stats"]
    for length in range(16, 16 * 12, 16):
        x = torch.randn(1, length, 32)
        assert (converted(x) - model(x)).norm() < 0.05 * model(x).norm()
        compiled[length] = compiled["unique_graphs"]
    assert len(flex._kernels) == 1
    assert compiled[16] < compiled[32] == compiled[16 * 11]


def test_kernels_are_of_what_is_done_to_scores_and_of_which_there_are(quick):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            one = flex_attention(x, x, x, score_mod=lambda score, *_: score * 2)
            two = flex_attention(x, x, x, score_mod=lambda score, *_: score * 3)
            return one + two + sum(flex_attention(x, x, x, block_mask=mask) for mask in masks)

    parts = torch.arange(128) // 32
    masks = [
        create_block_mask(seen, None, None, 128, 128, device="cpu")
        for seen in (lambda b, h, i, j: i >= j, lambda b, h, i, j: parts[i] == parts[j])
    ]
    x, model = torch.randn(1, 2, 128, 16), Two()
    assert torch.allclose(fxamp.convert(model, torch.bfloat16)(x), model(x), atol=0.05)
    assert len(flex._kernels) == 4


def test_a_compiler_behind_dynamo_makes_the_kernel_itself():
    model, x = Attention().requires_grad_(False), torch.randn(1, 32, 32)
    compiled = torch.compile(model, backend="fxamp", options={"dtype": torch.bfloat16, "inner": "aot_eager"})
    assert (compiled(x) - model(x)).norm() < 0.02 * model(x).norm()
    assert not flex._kernels


def test_what_torch_makes_no_kernel_of_runs_dense_and_is_told_once(caplog, inductor):
    with caplog.at_level(logging.WARNING, "fxamp"):
        converted, *_ = distances(True)
        converted(torch.randn(2, 128, 32))
    told = [line for line in caplog.messages if "runs dense" in line]
    assert len(told) == 1
    assert "return_lse" in told[0]


def test_o2_says_where_it_stands():
    with pytest.raises(fxamp.CaptureError, match=r"test_flex_attention\.py:4"):
        fxamp.convert(Attention(), torch.bfloat16, opt_level="O2", capture="symbolic")(torch.randn(2, 128, 32))


def test_o2_runs_it_as_written(caplog):
    model, x = Attention(), torch.randn(2, 128, 32)
    plain = copy.deepcopy(model)
    with caplog.at_level("INFO", "fxamp"), torch.no_grad():
        found = fxamp.convert(model, torch.bfloat16, opt_level="O2")(x)
        expected = plain(x)
    assert re.search(r"runs as under torch.autocast.*test_flex_attention\.py:4", caplog.text)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("way", ["compiled", "dense", "fake"])
def test_gradients_reach_what_a_score_is_changed_by(way, quick, monkeypatch):
    """torch has no backward of the kernel on a CPU, and refuses one; the op itself has."""
    if way == "dense":
        monkeypatch.setattr(flex, "_kernel", lambda *_: refuses)
    torch.manual_seed(0)
    q, k, v, slope = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(4))
    slope = slope[0, :, 0, 0]
    score_mod = fx.symbolic_trace(lambda score, b, h, i, j, slope: score + slope[h] * (j - i))
    mask_mod = fx.symbolic_trace(lambda b, h, i, j: i >= j)
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, device="cpu").as_tuple()
    bias = slope[:, None, None] * (torch.arange(8) - torch.arange(8)[:, None])
    causal = torch.ones(8, 8).tril().log()
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=bias + causal)
    options = {"OUTPUT_LOGSUMEXP": True}
    mode = FakeTensorMode(allow_non_fake_inputs=True) if way == "fake" else contextlib.nullcontext()
    inputs = (q, k, v, slope)
    with mode:
        if way == "fake":
            inputs = tuple(mode.from_tensor(each.detach()).requires_grad_() for each in inputs)
        y, *_ = flex.flex_attention(*inputs[:3], score_mod, (*blocks[:-1], mask_mod), 0.25, options, inputs[3:])
        found = torch.autograd.grad(y.sum(), inputs)
    if way != "fake":
        assert torch.allclose(y, exact, atol=1e-5)
        for ours, wanted in zip(found, torch.autograd.grad(exact.sum(), inputs), strict=True):
            assert torch.allclose(ours, wanted, atol=1e-4)


def test_kernels_are_not_kept_without_end(quick, monkeypatch):
    monkeypatch.setattr(flex, "_MOST", 2)
    q = torch.randn(1, 2, 8, 16)
    blocks = create_block_mask(causal, None, None, 8, 8, device="cpu").as_tuple()
    mask_mod = fx.symbolic_trace(lambda b, h, i, j: i >= j)
    for number in range(4):
        score_mod = fx.symbolic_trace(lambda score, b, h, i, j, number=number: score + number * i)
        flex.flex_attention(q, q, q, score_mod, (*blocks[:-1], mask_mod), 0.25, {})
    assert len(flex._kernels) == 2
    assert flex._content(score_mod) in {score for score, _ in flex._kernels}


def refuses(*given):
    raise torch._dynamo.exc.BackendCompilerFailed(refuses, RuntimeError("no kernel"), None)


class Trained(Attention):
    """Calls the op itself, as `flex_attention` does: that refuses to be trained on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        blocks = self.mask.as_tuple()
        bias = lambda score, b, h, i, j: score + self.slope[h] * (j - i)  # noqa: E731
        attend = torch.ops.higher_order.flex_attention
        y, sums, _ = attend(q, k, v, bias, (*blocks[:-1], causal), 0.25, {"OUTPUT_LOGSUMEXP": True})
        return self.out((y * sums[..., None].sigmoid()).transpose(1, 2).flatten(2))

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        far = torch.arange(128) - torch.arange(128)[:, None]
        scores = 0.25 * q @ k.mT + self.slope[:, None, None] * far + torch.ones(128, 128).tril().log()
        y = scores.softmax(-1) @ v
        sums = scores.logsumexp(-1) / math.log(2)  # the op's are of base 2
        return self.out((y * sums[..., None].sigmoid()).transpose(1, 2).flatten(2))


def causal(b, h, i, j):
    return i >= j


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_trains(dtype, quick):
    torch.manual_seed(0)
    mask = create_block_mask(causal, None, None, 128, 128, device="cpu")
    model, x = Trained(mask), torch.randn(2, 128, 32)
    exact = model.exact(x)
    wanted = torch.autograd.grad(exact.pow(2).sum(), list(model.parameters()))
    converted = fxamp.convert(model, dtype)
    y = converted(x)
    y.pow(2).sum().backward()
    assert (y - exact).norm() < 0.02 * exact.norm()
    for weight, gradient in zip(converted.parameters(), wanted, strict=True):
        assert (weight.grad - gradient).norm() < 0.03 * gradient.norm()
    for rows in (3, 4, 5):  # Dynamo makes a graph for all of these
        x = torch.randn(rows, 128, 32)
        assert (converted(x) - model.exact(x)).norm() < 0.02 * model.exact(x).norm()
    found = [row for row in fxamp.report(converted).rows if row.op == "higher_order::flex_attention"]
    assert len(found) == 2
    assert {(row.precision, row.dtype) for row in found} == {("low", f"{dtype}/torch.float32".replace("torch.", ""))}
