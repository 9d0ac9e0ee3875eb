"""A loss reads low logits where the device's kernel can; the numbers are those of the cast."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp import ir
from fxamp.capability import conversions_inside
from fxamp.model.engine import engine_of
from fxamp.runtime import low_loss
from fxamp.runtime.padded_results import cast_of_part

ROOT = Path(__file__).resolve().parent.parent.parent
LOW = (torch.float16, torch.bfloat16)
CLASSES = 13


class Model(nn.Module):
    """Logits of a linear layer, and a loss over them."""

    def __init__(self, loss, classes: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, classes)
        self.register_buffer("shares", torch.rand(classes) + 0.5)
        self.loss = loss

    def forward(self, x, target):
        return self.loss(self, self.head(x), target)


def example(*batch: int, classes: int = CLASSES):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*batch, 8, generator=generator), torch.randint(0, classes, batch, generator=generator)


@pytest.fixture
def reads_low(monkeypatch):
    """As on a device whose log_softmax reads either dtype."""
    monkeypatch.setattr("fxamp.passes.losses.conversions_inside", lambda op, low, device: 0)


def converted_step(model, low, x, target, **options):
    """The results, all gradients, and the loss nodes of one step of the converted model."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    model = fxamp.convert(model, low, example_inputs=(x, target), **options)
    result = model(x, target)
    (result[0] if isinstance(result, tuple) else result).sum().backward()
    nodes = [node for graph in engine_of(model).graphs() for node in graph.graph.nodes]
    losses = [node for node in nodes if ir.mark(node).op == "cross_entropy"]
    return result, [x.grad, *(parameter.grad for parameter in model.parameters())], losses


def dtype_read(loss) -> torch.dtype:
    return ir.mark(loss.args[0]).type.dtype


def _written_first(m, h, t):
    h.mul_(2.0)
    return F.cross_entropy(h, t)


def _written_afterwards(m, h, t):
    loss = F.cross_entropy(h.view(-1, CLASSES), t)
    h.detach().mul_(2.0)
    return loss


FORMS = {
    "written first": (_written_first, (6,)),
    "written afterwards": (_written_afterwards, (6,)),
    "as it is": (lambda m, h, t: F.cross_entropy(h, t), (6,)),
    "one sample": (lambda m, h, t: F.cross_entropy(h, t), ()),
    "by keyword": (lambda m, h, t: F.cross_entropy(h, target=t, reduction="sum"), (6,)),
    "each": (lambda m, h, t: F.cross_entropy(h, t, reduction="none"), (6,)),
    "weights": (lambda m, h, t: F.cross_entropy(h, t, m.shares), (6,)),
    "ignored": (lambda m, h, t: F.cross_entropy(h, t, ignore_index=3), (6,)),
    "flat": (lambda m, h, t: F.cross_entropy(h.view(-1, CLASSES), t.view(-1)), (2, 5)),
    "places": (lambda m, h, t: F.cross_entropy(h.transpose(1, 2), t), (2, 5)),
    "user's float": (lambda m, h, t: F.cross_entropy(h.float().view(-1, CLASSES), t.view(-1)), (2, 5)),
    "device": (lambda m, h, t: F.cross_entropy(y := h.float().flatten(0, 1), t.flatten().to(y.device)), (2, 5)),
    "shifted": (
        lambda m, h, t: F.cross_entropy(
            h.float()[..., :-1, :].contiguous().view(-1, CLASSES), t[..., 1:].contiguous().view(-1)
        ),
        (2, 5),
    ),
    "masked": (lambda m, h, t: F.cross_entropy(h.float()[t > 2], t[t > 2]), (6,)),
    "a part of each": (lambda m, h, t: F.cross_entropy(h.float()[:, None, : h.shape[-1] - 1].squeeze(1), t % 12), (6,)),
    "and the logits": (lambda m, h, t: (F.cross_entropy(h.view(-1, CLASSES), t.view(-1)), h), (2, 5)),
    "and the guess": (lambda m, h, t: (F.cross_entropy(y := h.float(), t), y.argmax(-1)), (6,)),
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("form", FORMS)
def test_the_numbers_are_those_of_the_cast(form, low, monkeypatch):
    loss, batch = FORMS[form]
    model, given = Model(loss), example(*batch)
    plain = converted_step(model, low, *given)
    assert [dtype_read(node) for node in plain[2]] == [torch.float32]
    monkeypatch.setattr("fxamp.passes.losses.conversions_inside", lambda op, low, device: 0)
    ours = converted_step(model, low, *given)
    assert [dtype_read(node) for node in ours[2]] == [low]
    torch.testing.assert_close(ours[:2], plain[:2], rtol=0, atol=0)
    if not form.startswith("and the"):
        high = [node for node in ours[2][0].graph.nodes if ir.mark(node).op in ("to", "float")]
        assert torch.float32 not in [ir.mark(node).type.dtype for node in high]


def _written_between(m, h, t):
    y = h.float()
    y[:, 0] = 0.0
    return F.cross_entropy(y, t)


def _written_behind(m, h, t):
    y = h.float()
    y.view(-1).mul_(2.0)
    return F.cross_entropy(y, t)


def _written_before_the_cast(m, h, t):
    y = h.float()
    h.mul_(2.0)
    return F.cross_entropy(y, t) + 0 * h.sum()


def _users_low_logits_are_written(m, h, t):
    h = h.bfloat16()
    y = h.float()
    h.detach().mul_(2.0)
    return F.cross_entropy(y, t)


def _without_gradient(m, h, t):
    with torch.no_grad():
        y = h.float()
    return F.cross_entropy(y, t) + h.sum()


KEPT = {
    "another memory format": lambda m, h, t: F.cross_entropy(
        h.to(torch.float32, memory_format=torch.preserve_format), t
    ),
    "a memory format": lambda m, h, t: F.cross_entropy(h.float(memory_format=torch.preserve_format), t),
    "another device, perhaps": lambda m, h, t: F.cross_entropy(h.to(t.device, torch.float32), t),
    "label smoothing": lambda m, h, t: F.cross_entropy(h, t, label_smoothing=0.1),
    "shares as a target": lambda m, h, t: F.cross_entropy(h, F.one_hot(t, CLASSES).float()),
    "a second gradient": lambda m, h, t: F.cross_entropy(y := h.float(), t) + y.exp().mean(),
    "a second gradient behind a move": lambda m, h, t: F.cross_entropy(y := h.float(), t) + y.view(-1).exp().mean(),
    "the other low dtype": lambda m, h, t: F.cross_entropy(h.half().float(), t),
    "two losses": lambda m, h, t: F.cross_entropy(y := h.float(), t) + F.cross_entropy(y, t, reduction="sum"),
    "written in between": _written_between,
    "written behind a view": _written_behind,
    "the user's low logits are written": _users_low_logits_are_written,
    "the low logits are written": _written_before_the_cast,
    "cast without gradients": _without_gradient,
    "cast in a checkpointed region": lambda m, h, t: F.cross_entropy(
        checkpoint(lambda h: h.float().view(-1, CLASSES), h, use_reentrant=False), t
    ),
    "rows by their numbers": lambda m, h, t: F.cross_entropy(h.float()[t % 6], t),
    "rows by their numbers, of a list": lambda m, h, t: F.cross_entropy(h.float()[[0, 0, 1]], t[:3]),
    "rows by a tuple of numbers": lambda m, h, t: F.cross_entropy(
        h.float()[t.nonzero(as_tuple=True)], t[t.nonzero()[:, 0]]
    ),
    "more than a move": lambda m, h, t: F.cross_entropy(h.float().exp(), t),
}


@pytest.mark.parametrize("form", KEPT)
def test_what_is_more_than_a_cast_stays(form, monkeypatch):
    model, given = Model(KEPT[form]), example(6)
    plain = converted_step(model, torch.bfloat16, *given)
    monkeypatch.setattr("fxamp.passes.losses.conversions_inside", lambda op, low, device: 0)
    ours = converted_step(model, torch.bfloat16, *given)
    assert all(dtype_read(node) == torch.float32 for node in ours[2]) and ours[2]
    torch.testing.assert_close(ours[:2], plain[:2], rtol=0, atol=0)


@pytest.mark.parametrize("low", LOW)
def test_gradients_of_logits_that_are_picked_often_are_added_up_in_float32(low, reads_low):
    x, rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(3000, dtype=torch.long)
    model = Model(lambda m, h, t: F.cross_entropy(h.float()[rows], t.expand(3000), reduction="sum"))
    exact = copy.deepcopy(model)
    exact(x, torch.tensor([3])).backward()
    _, gradients, _ = converted_step(model, low, x, torch.tensor([3]))
    wanted = [parameter.grad for parameter in exact.parameters()]
    for found, grad in zip(gradients[1:], wanted, strict=False):
        assert (found - grad).norm() < 0.01 * grad.norm()


def test_where_the_kernel_casts_by_itself_nothing_changes():
    assert conversions_inside("log_softmax", torch.bfloat16, "cpu") == 1
    loss, batch = FORMS["and the logits"]
    model = fxamp.convert(Model(loss), torch.bfloat16, example_inputs=example(*batch))
    assert fxamp.report(model).casts == 2, "the input's, and one for the loss and the result together"


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_is_replayed_without_a_word(form, reads_low, tmp_path, recwarn):
    """Its conversions are gone from the plan, and still in the model."""
    loss, batch = FORMS[form]
    model, given = Model(loss), example(*batch)
    saved = fxamp.report(fxamp.convert(model, torch.bfloat16, example_inputs=given))
    saved.save_plan(tmp_path / "plan.json")
    again = fxamp.convert(copy.deepcopy(model), torch.bfloat16, example_inputs=given, plan=tmp_path / "plan.json")
    assert not [str(warning.message) for warning in recwarn if "plan" in str(warning.message)]
    precisions = [[(row.op, row.precision) for row in report.rows] for report in (saved, fxamp.report(again))]
    assert precisions[0] == precisions[1]


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("bias", [True, False])
def test_a_padded_vocabulary_pays_no_copy_of_the_logits(low, bias, reads_low, monkeypatch):
    model, given = Model(FORMS["and the logits"][0]), example(2, 5)
    if not bias:
        model.head.bias = None
    padded = converted_step(model, low, *given, pad="always")
    shapes = [tuple(node.args[0].meta[ir.MARK].type.shape) for node in padded[2]]
    assert shapes == [(10, 16)] and dtype_read(padded[2][0]) == low
    unpadded = converted_step(model, low, *given, pad_to=None)
    torch.testing.assert_close(padded[:2], unpadded[:2], rtol=0, atol=0)


@pytest.mark.parametrize("size", [lambda h: h.shape[-1], lambda h: h.size(-1), lambda h: CLASSES])
def test_the_question_for_the_vocabularys_size_copies_no_logits(size, reads_low):
    loss = lambda m, h, t: F.cross_entropy(h.reshape(-1, size(h)), t.reshape(-1))  # noqa: E731
    _, _, losses = converted_step(Model(loss), torch.bfloat16, *example(2, 5), pad="always")
    pads = [node for node in losses[0].graph.nodes if node.target is F.pad and ir.mark(node.args[0]).op == "linear"]
    assert not pads and ir.mark(losses[0].args[0]).type.shape == (10, 16)


@pytest.mark.parametrize("low", LOW)
def test_a_result_beside_a_padded_loss_is_the_cast_of_a_part(low):
    """Six bytes an element; a slice of the float32 logits, copied for the caller, would be eight more."""
    model, given = Model(FORMS["and the logits"][0]), example(2, 5)
    converted = fxamp.convert(model, low, example_inputs=given, pad="always")
    (graph,) = (each.graph for each in engine_of(converted).graphs())
    (result,) = [node for node in graph.nodes if node.op == "output"]
    cast = result.args[0][1]
    assert ir.mark(cast).role == "cast" and cast.target is cast_of_part
    assert ir.mark(cast).type.shape == (2, 5, CLASSES) and ir.mark(cast.args[0]).type.dtype == low
    assert converted(*given)[1].is_contiguous()


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 7, 3), (2, 7, 3, 4)])
def test_cross_entropy_of_low_logits(low, shape):
    generator = torch.Generator().manual_seed(2)
    logits = (30 * torch.randn(shape, generator=generator)).to(low).requires_grad_()
    target = torch.randint(0, 7, shape[:1] + shape[2:] if len(shape) > 1 else (), generator=generator)
    weight = torch.rand(7, generator=generator)
    for options in ({}, {"reduction": "sum"}, {"weight": weight}, {"ignore_index": int(target.flatten()[0])}):
        theirs = F.cross_entropy(logits.float(), target, **options)
        ours = low_loss.cross_entropy(logits, target, **options)
        assert ours.dtype == torch.float32 and torch.equal(ours.nan_to_num(), theirs.nan_to_num())
        (one,), (other,) = (torch.autograd.grad(each, logits) for each in (ours, theirs))
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


_COUNTED = """
import torch
from torch import nn
from torch.nn import functional as F
from fxamp.capability import conversions_inside
from fxamp.counting.run import count
from fxamp.counting.zoo import Step

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 1009)
    def forward(self, x, target):
        logits = self.head(self.body(x).relu())
        return F.cross_entropy(logits.float().view(-1, 1009), target.view(-1)), logits

def make(tiny):
    call = torch.randn(4, 8, 16), torch.randint(0, 1009, (4, 8))
    return Step(Words(), call, lambda result: result[0])

for low in (torch.float16, torch.bfloat16):
    found = count(make, "O1 balanced", low)
    ours = found.report
    agrees = found.counts.forward_tensors_cast == ours.casts + ours.weight_casts + ours.casts_inside + ours.user_casts
    print(conversions_inside("log_softmax", low, "cuda"), ours.casts, ours.user_casts, agrees)
"""


def test_what_cuda_runs_is_what_the_report_says():
    """torch's CUDA kernel reads float16 and not bfloat16; in a process of its own, on fake CUDA tensors."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _COUNTED], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["0 2 0 True", "1 2 0 True"]  # bfloat16: the loss reads the caller's copy
