"""The FlashAttention package, whose kernels refuse float32. A stand-in has its names and its form, on a CPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

import fxamp
from fxamp.lists import TRAITS, OpLists
from fxamp.opnames import canonical_name

LIBRARY = "flash_attn.flash_attn_interface"


def refuse(*given: torch.Tensor) -> None:
    if not {tensor.dtype for tensor in given} < {torch.float16, torch.bfloat16} or len({t.dtype for t in given}) > 1:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")


def scores(q: torch.Tensor, k: torch.Tensor, slopes: torch.Tensor | None) -> torch.Tensor:
    far = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    found = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) / q.shape[-1] ** 0.5
    return found if slopes is None else found - slopes[:, None, None] * far.abs()


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    refuse(q, k, v)
    assert slopes is None or slopes.dtype == torch.float32
    found = scores(q, k, slopes)
    result = torch.einsum("bhij,bjhd->bihd", found.softmax(-1), v.float())
    return result.to(q.dtype).contiguous(), found.logsumexp(-1)


@_forward.register_fake
def _(q, k, v, slopes):
    return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=())
def _backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    refuse(gradient, q, k, v)
    chances, wide = scores(q, k, slopes).softmax(-1), gradient.float()
    of_chances = torch.einsum("bihd,bjhd->bhij", wide, v.float())
    inner = chances * (of_chances - (chances * of_chances).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    to_q, to_k = torch.einsum("bhij,bjhd->bihd", inner, k.float()), torch.einsum("bhij,bihd->bjhd", inner, q.float())
    to_v = torch.einsum("bhij,bihd->bjhd", chances, wide)
    return tuple(found.to(q.dtype).contiguous() for found in (to_q, to_k, to_v))


@_backward.register_fake
def _(gradient, q, k, v, slopes):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, slopes, returns_sums):
        q, k, v = (F.pad(each, [0, -each.shape[-1] % 8]) for each in (q, k, v))
        result, sums = torch.ops.flash_attn._flash_attn_forward(q, k, v, slopes)
        ctx.save_for_backward(q, k, v, slopes)
        return (result, sums) if returns_sums else result

    @staticmethod
    def backward(ctx, gradient, *_):
        return (*torch.ops.flash_attn._flash_attn_backward(gradient.contiguous(), *ctx.saved_tensors), None, None, None)


@pytest.fixture(autouse=True)
def stands_in(monkeypatch):
    monkeypatch.setattr(FlashAttnFunc, "__module__", LIBRARY)
    torch._dynamo.reset()


class Attention(nn.Module):
    """As models call the package: on what a projection gives, after norms, on what was cast to float32."""

    def __init__(self, before: str = "") -> None:
        super().__init__()
        self.qkv, self.out, self.before = nn.Linear(32, 96), nn.Linear(32, 32), before
        self.register_buffer("slopes", torch.rand(2) if before == "slopes" else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
        if self.before.startswith("norms"):
            q, k = F.rms_norm(q.float(), (16,)), F.rms_norm(k.float(), (16,))
        elif self.before == "casts":
            q, k, v = q.float(), k.float(), v.float()
        if self.before == "sums":
            y, sums = FlashAttnFunc.apply(q, k, v, False, None, True)
            return self.out((y * sums.mT[..., None].sigmoid()).flatten(2))
        y = FlashAttnFunc.apply(q, k, v, False, self.slopes, False)
        if "gate" in self.before:
            y *= x.unflatten(-1, (2, 16)).sigmoid()  # what must be float32 is a copy
        return self.out(y.flatten(2))

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
        if self.before.startswith("norms"):
            q, k = F.rms_norm(q, (16,)), F.rms_norm(k, (16,))
        found = scores(q, k, self.slopes)
        y = torch.einsum("bhij,bjhd->bihd", found.softmax(-1), v)
        if "gate" in self.before:
            y = y * x.unflatten(-1, (2, 16)).sigmoid()
        return self.out((y * found.logsumexp(-1).mT[..., None].sigmoid() if self.before == "sums" else y).flatten(2))


@pytest.mark.parametrize("ways", [{"opt_level": "O1"}, {"opt_level": "O2"}, {"capture": "dynamo"}], ids=str)
@pytest.mark.parametrize("before", ["", "norms", "casts", "slopes", "sums", "norms, then a gate"])
def test_it_runs_low_whatever_comes_before(before, ways):
    torch.manual_seed(0)
    model, x, longer = Attention(before), torch.randn(2, 8, 32), torch.randn(2, 12, 32)
    exact, exact_of_longer = model.exact(x), model.exact(longer)
    wanted = torch.autograd.grad(exact.pow(2).sum(), list(model.parameters()))
    others = [(given, model.exact(given)) for given in (torch.randn(3, 8, 32), torch.randn(4, 8, 32))]
    converted = fxamp.convert(model, torch.bfloat16, **ways)
    y = converted(x)
    y.pow(2).sum().backward()
    assert y.dtype == torch.float32
    assert (y - exact).norm() < 0.02 * exact.norm()
    for weight, gradient in zip(converted.parameters(), wanted, strict=True):
        assert (weight.grad - gradient).norm() < 0.03 * gradient.norm()
    for x, exact in others:
        assert (converted(x) - exact).norm() < 0.02 * exact.norm()
    assert (converted(longer) - exact_of_longer).norm() < 0.02 * exact_of_longer.norm()


def test_a_compiler_behind_dynamo_gets_it_low():
    model, x = Attention(), torch.randn(2, 8, 32)
    options = {"dtype": torch.bfloat16, "inner": "aot_eager"}
    y = torch.compile(model, backend="fxamp", options=options)(x)
    y.sum().backward()
    assert (y - model.exact(x)).norm() < 0.02 * y.norm()


def test_copies_of_the_library_are_the_library(monkeypatch):
    for module in ("flash_attn_interface", "kernels_6a1f.flash_attn_interface"):
        monkeypatch.setattr(FlashAttnFunc, "__module__", module)
        assert canonical_name(FlashAttnFunc.apply) == f"{LIBRARY}.FlashAttnFunc"


def test_what_refuses_float32_is_on_the_allow_list():
    assert {OpLists.default().colour(op) for op in TRAITS["low_only"]} == {"allow"}


class IndexPutFirstAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, indices, rows):
        ctx.save_for_backward(indices)
        output = torch.zeros(rows, *values.shape[1:], dtype=values.dtype)
        output[indices] = values
        return output

    @staticmethod
    def backward(ctx, gradient):
        return gradient[ctx.saved_tensors[0]], None, None


class Unpadding(Attention):
    """As models of transformers run it: no mask where nothing is hidden, else rows are taken out and put back."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, attend=FlashAttnFunc.apply, put=IndexPutFirstAxis.apply):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
        batch, length = mask.shape
        if mask.all():
            return self.out(attend(q, k, v, False, None, False).flatten(2))
        rows = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
        q, k, v = (part.flatten(0, 1)[rows][None] for part in (q, k, v))
        y = put(attend(q, k, v, False, None, False)[0], rows, batch * length)
        return self.out(y.view(batch, length, *y.shape[1:]).flatten(2))


def attend_exactly(q, k, v, *_):
    return torch.einsum("bhij,bjhd->bihd", scores(q, k, None).softmax(-1), v)


def put_exactly(values, indices, rows):
    return values.new_zeros(rows, *values.shape[1:]).index_copy(0, indices, values)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_batches_with_padding_and_without_run_low(level, monkeypatch):
    monkeypatch.setattr(IndexPutFirstAxis, "__module__", "flash_attn.bert_padding")
    torch.manual_seed(0)
    model, x = Unpadding(), torch.randn(2, 8, 32)
    padded = torch.arange(8) < torch.tensor([[5], [8]])
    exact = {mask: model(x, mask, attend_exactly, put_exactly) for mask in (padded, padded | True)}
    wanted = {mask: torch.autograd.grad(y.pow(2).sum(), list(model.parameters())) for mask, y in exact.items()}
    converted = fxamp.convert(model, torch.bfloat16, opt_level=level, example_inputs=(x, padded), capture="symbolic")
    for mask in (*exact, padded):
        converted.zero_grad()
        y = converted(x, mask)
        y.pow(2).sum().backward()
        assert (y - exact[mask]).norm() < 0.02 * exact[mask].norm()
        for weight, gradient in zip(converted.parameters(), wanted[mask], strict=True):
            assert (weight.grad - gradient).norm() < 0.03 * gradient.norm()
    report = fxamp.report(converted)
    assert len({row.graph for row in report.rows}) == 2
    assert {row.precision for row in report.rows if "flash_attn" in row.op} == {"low"}


def test_padding_is_taken_out_as_transformers_does():
    """What `.item()` gives is an integer, whatever it is: the kernel's longest length."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            longest = mask.sum(-1).max().item()
            if not isinstance(longest, int):
                raise TypeError(longest)
            share = mask.float().mean().item()
            return self.linear(x[mask]) * longest * (2.0 if isinstance(share, float) else share)

    model, x = Padded(), torch.randn(2, 3, 4)
    mask, shorter = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool(), torch.tensor([[1, 0, 0], [1, 1, 0]]).bool()
    converted = fxamp.convert(model, torch.bfloat16, capture="symbolic", example_inputs=(x, mask))
    for chosen in (mask, shorter):
        assert torch.allclose(converted(x, chosen), model(x, chosen), atol=0.05)


def test_torchs_own_for_lengths_that_vary():
    class Varying(Attention):
        def forward(self, x: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(1)
            return self.out(varlen_attn(q.float(), k, v, begins, begins, 8, 8).flatten(1))

    inputs = torch.randn(16, 32), torch.tensor([0, 8, 16], dtype=torch.int32)
    converted = fxamp.convert(Varying(), torch.bfloat16, example_inputs=inputs, capture="symbolic")
    (row,) = [row for row in fxamp.report(converted).rows if row.op == "torch_attn::_varlen_attn"]
    assert row.precision == "low"
    assert row.dtype.startswith("bfloat16/float32")
