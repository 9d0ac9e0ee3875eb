"""Losses, and other modules that have no parameters: converted as any model."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp

BF16 = torch.bfloat16


class Contrastive(nn.Module):
    """NT-Xent, Chen et al. 2020."""

    def forward(self, first, second):
        both = F.normalize(torch.cat([first, second]), dim=-1)
        likeness = both @ both.T / 0.1
        count = likeness.shape[0]
        likeness = likeness.masked_fill(torch.eye(count, dtype=torch.bool), float("-inf"))
        partners = torch.arange(count, device=both.device).roll(count // 2)
        return F.cross_entropy(likeness, partners)


class Hardest(nn.Module):
    """A triplet loss that asks its own results, so that no graph holds it."""

    def forward(self, rows, labels):
        distances, same = torch.cdist(rows, rows), labels[:, None] == labels
        furthest, nearest = (distances * same).amax(1), (distances + 1e3 * same).amin(1)
        loss = F.relu(furthest - nearest + 0.3)
        return loss[loss > 0].mean() if (loss > 0).any() else loss.sum()


class Attention(nn.Module):
    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value)


def rows(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


MODELS = {
    "cross entropy": (nn.CrossEntropyLoss(), (rows(16, 50), torch.arange(16))),
    "contrastive": (Contrastive(), (rows(16, 32), rows(16, 32) + rows(16, 32).flip(0))),
    "hardest": (Hardest(), (rows(16, 32), torch.arange(16) // 4)),
    "attention": (Attention(), (rows(2, 4, 16, 8), rows(2, 4, 16, 8).flip(0), rows(2, 4, 16, 8).flip(1))),
    "mean squared error": (nn.MSELoss(), (rows(16, 8), rows(16, 8).flip(0))),
}


def called(model, inputs):
    """The result, and the gradient of the first input."""
    first = inputs[0].clone().requires_grad_()
    result = model(first, *inputs[1:])
    result.float().sum().backward()
    return result.detach(), first.grad


def under_autocast(model):
    def run(*inputs):
        with torch.autocast("cpu", BF16):
            return model(*inputs)

    return run


def distance(found, exact):
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_as_near_to_float32_as_under_autocast(name, dtype, opt_level):
    model, inputs = MODELS[name]
    inputs = tuple(value.to(dtype) if value.is_floating_point() else value for value in inputs)
    converted = fxamp.convert(model, dtype=BF16, opt_level=opt_level)
    exact = called(model, tuple(value.float() if value.is_floating_point() else value for value in inputs))
    theirs = called(under_autocast(model), inputs)
    ours = [called(converted, inputs) for _ in range(2)][-1]
    for found, reference, wanted in zip(ours, theirs, exact, strict=True):
        assert found.dtype == reference.dtype or found.dtype == torch.float32
        assert distance(found, wanted) <= 1.5 * distance(reference, wanted) + 1e-7


def test_a_loss_reads_low_logits_in_float32():
    logits, labels = rows(16, 50).to(BF16), torch.arange(16)
    found = fxamp.convert(nn.CrossEntropyLoss(), dtype=BF16)(logits, labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, F.cross_entropy(logits.float(), labels), rtol=1e-6, atol=0)


def test_a_product_of_a_loss_runs_low():
    model, inputs = MODELS["contrastive"]
    converted = fxamp.convert(model, dtype=BF16, example_inputs=inputs)
    assert [row.dtype for row in fxamp.report(converted).rows if row.op == "matmul"] == ["bfloat16"]


def test_the_dtype_is_that_of_the_machines_device(monkeypatch):
    assert fxamp.report(fxamp.convert(nn.CrossEntropyLoss())).low_dtype in ("bfloat16", "float16")
    for device, low in (("cuda", "float16"), ("cpu", "bfloat16")):
        given = torch.device(device)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False, given=given: given)
        assert fxamp.report(fxamp.convert(nn.CrossEntropyLoss())).low_dtype == low


def test_low_logits_and_a_converted_loss_train_as_under_autocast():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 50))
    model, loss_of = (
        fxamp.convert(plain, dtype=BF16, output_dtype=None),
        fxamp.convert(nn.CrossEntropyLoss(), dtype=BF16),
    )
    x, labels = rows(32, 16), torch.arange(32)
    logits = model(x)
    assert logits.dtype == BF16
    loss_of(logits, labels).backward()
    ours = [parameter.grad.clone() for parameter in plain.parameters()]
    plain.zero_grad()
    with torch.autocast("cpu", BF16):
        F.cross_entropy(plain(x), labels).backward()
    for found, parameter in zip(ours, plain.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=2e-2, atol=1e-5)
