"""Gradients of one result of a model with respect to another: what the caller gets is on the way."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.errors import InvariantError
from fxamp.passes.outputs import ConnectOutputs

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Features(nn.Module):
    """A head's scores, and the features they are computed from."""

    def __init__(self, act=F.leaky_relu):
        super().__init__()
        self.body, self.head, self.act = nn.Linear(8, 16), nn.Linear(16, 4), act

    def forward(self, x):
        features = self.act(self.body(x))
        return self.head(features), features


class Attention(nn.Module):
    """Attention maps are returned beside the result, as transformers' output_attentions does."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        maps = self.q(x) @ self.k(x).t()
        return maps.softmax(-1) @ self.v(x), maps


class Widened(nn.Module):
    """The user's own conversion is returned; in float32 it is the very tensor that the head reads."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        features = self.body(x)
        return self.head(features), features.float()


class Shared(nn.Module):
    """What the user converts and returns is read in float32 elsewhere, which needs a cast of ours."""

    def __init__(self, use):
        super().__init__()
        self.body, self.use = nn.Linear(8, 16), use

    def forward(self, x):
        features = self.body(x)
        return self.use(features), features.float()


USES = {
    "a loss": lambda y: F.mse_loss(y, torch.zeros_like(y)),
    "a deny op": torch.exp,
    "a sum of powers": lambda y: y.pow(3).sum(),
    "float64": lambda y: y.double().sum(),
    "the other dtype": lambda y: y.to(torch.bfloat16),
    "deny and allow": lambda y: y.exp() + y @ torch.ones(16, 16),
    "a moved one": lambda y: y.transpose(0, 1).exp(),
    "two of them": lambda y: y.exp() + y.pow(2).sum(),
    "a write into it": lambda y: y.exp() + y.float().mul_(2),
}


class Uneven(Features):
    """Sizes that are padded."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 13), nn.Linear(13, 5)


class Bounded(Features):
    def forward(self, x):
        logits = self.body(x)
        return self.head(logits.sigmoid()), logits


class Kept(Features):
    def forward(self, x):
        self.features = self.body(x)
        return self.head(self.features)


def gradient(model, x=X):
    result, inner = model(x)
    return torch.autograd.grad(result.float().sum(), inner)[0]


def distance(ours, theirs):
    return float((ours.float() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(
    "model", [Features, lambda: Features(lambda y: y), lambda: Features(F.gelu), Attention, Widened, Bounded, Uneven]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"capture": "dynamo"},
        {"level": "aggressive"},
        {"opt_level": "O2", "example_inputs": (X,)},
        {"pad": "always"},
    ],
    ids=["default", "dynamo", "aggressive", "O2", "padded"],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_result_has_a_gradient_with_respect_to_another(model, options, dtype):
    torch.manual_seed(0)
    plain = model()
    converted = fxamp.convert(copy.deepcopy(plain), dtype=dtype, **options)
    assert distance(gradient(converted), gradient(plain)) < 8 * torch.finfo(dtype).eps
    result, inner = converted(X)
    inner.retain_grad()
    result.sum().backward()
    assert inner.grad is not None and inner.dtype == inner.grad.dtype == torch.float32


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_result_and_what_reads_it_in_float32_share_a_cast(use, capture, dtype):
    torch.manual_seed(0)
    plain = Shared(use)
    converted = fxamp.convert(copy.deepcopy(plain), dtype=dtype, capture=capture, example_inputs=(X,))
    used, features = converted(X)
    wanted_use, wanted = plain(X)
    assert features.dtype == torch.float32 and distance(features, wanted) < 8 * torch.finfo(dtype).eps
    assert used.dtype == wanted_use.dtype and distance(used, wanted_use) < 16 * torch.finfo(torch.bfloat16).eps
    (used.sum().float() + features.sum()).backward()
    (wanted_use.sum().float() + wanted.sum()).backward()
    ours, theirs = (model.body.weight.grad for model in (converted, plain))
    assert distance(ours, theirs) < 16 * torch.finfo(dtype).eps


def test_the_shared_cast_is_the_users():
    converted = fxamp.convert(Shared(torch.exp), dtype=torch.float16, example_inputs=(X,))
    assert fxamp.report(converted).casts == 1, "the input down; the features go up by the user's own"


def test_the_numbers_are_those_of_the_copy_that_was_beside():
    torch.manual_seed(0)
    plain, rows = Features(), []
    converted = fxamp.convert(plain, dtype=torch.float16)
    beside = fxamp.convert(plain, dtype=torch.float16, output_dtype=None)
    for mine, other in zip(converted(X), beside(X), strict=True):
        assert torch.equal(mine, other.float())
    for model in (converted, beside):
        scores, features = model(X)
        (scores.float().sum() + features.float().square().sum()).backward()
        rows.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    for mine, other in zip(*rows, strict=True):
        assert distance(mine, other) < 2e-3


def test_nothing_is_added_where_no_gradient_flows():
    converted = fxamp.convert(Features(lambda y: y).requires_grad_(False), dtype=torch.float16)
    converted(X)
    assert fxamp.report(converted).casts == 3  # the input, two results
    converted = fxamp.convert(Features(lambda y: y), dtype=torch.float16)
    converted(X)
    assert fxamp.report(converted).casts == 4


def test_a_value_that_forward_keeps_on_the_model():
    model = fxamp.convert(Kept(), dtype=torch.bfloat16)
    scores = model(X)
    assert torch.autograd.grad(scores.sum(), model.features)[0].abs().sum() > 0


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "last"])
@pytest.mark.parametrize("options", [{}, {"opt_level": "O2"}, {"capture": "dynamo"}], ids=["O1", "O2", "dynamo"])
def test_the_gradient_that_forward_asks_to_retain_is_there(options, is_read):
    """As in Grad-CAM: `self.features = h; h.retain_grad()`."""

    class Retains(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            self.features = self.first(x).relu()
            self.features.retain_grad()
            return (self.last(self.features), self.features) if is_read else self.features

    plain, converted = Retains(), fxamp.convert(Retains(), dtype=torch.bfloat16, **options)
    x = torch.linspace(-2, 2, 32).reshape(4, 8)
    for _ in range(2):
        found = []
        for model in (plain, converted):
            results = model(x)
            (results[0] if is_read else results).square().sum().backward()
            found.append(model.features.grad)
        assert found[1] is not None
        torch.testing.assert_close(found[1].float(), found[0], rtol=0.05, atol=0.05)


def test_a_result_that_is_written_afterwards_is_as_it_was():
    class Writes(Features):
        def forward(self, x):
            features = self.body(x)
            scores = self.head(features)
            features.detach().mul_(2)
            return scores, features

    torch.manual_seed(0)
    plain = Writes()
    converted = fxamp.convert(copy.deepcopy(plain), dtype=torch.float16)
    with torch.no_grad():
        for mine, other in zip(converted(X), plain(X), strict=True):
            assert distance(mine, other) < 4e-3


def test_through_a_loss_in_forward():
    """On a CPU; where a kernel of a GPU reads low logits, the loss is computed past the copy that is returned."""

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 16)

        def forward(self, x, target):
            logits = self.head(x)
            return F.cross_entropy(logits.view(-1, 16), target.view(-1)), logits

    model = fxamp.convert(WithLoss(), dtype=torch.bfloat16)
    loss, logits = model(X, torch.arange(4))
    assert torch.autograd.grad(loss, logits)[0].shape == (4, 16)
    report = fxamp.report(model)
    assert (report.casts_to_low, report.casts_to_high) == (1, 1)  # one copy for the caller and the loss


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("slice_of", [lambda h: h[:, 0], lambda h: h.float()[:, 0]], ids=["low", "float32"])
def test_a_result_and_a_slice_of_it(slice_of, opt_level):
    """The slice moves the float32 copy, so its own copy is left out."""

    class Pooled(nn.Linear):
        def forward(self, x):
            hidden = super().forward(x)
            return hidden.float(), slice_of(hidden)

    converted = fxamp.convert(Pooled(8, 8), torch.bfloat16, (X,), opt_level=opt_level)
    hidden, first = converted(X)
    assert (hidden.dtype, first.dtype) == (torch.float32, torch.float32) and torch.equal(hidden[:, 0], first)
    (gradient,) = torch.autograd.grad(first.sum(), hidden, allow_unused=True)
    assert gradient is not None


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_defect_that_each_capture_meets_stops_no_training(opt_level, monkeypatch, caplog):
    """The model runs as it is written, as under autocast, and its parts as graphs."""
    whole = ConnectOutputs.apply

    def broken(self, graph):
        if any(node.target is torch.exp for node in graph.nodes):
            raise InvariantError("a rule is broken")
        return whole(self, graph)

    monkeypatch.setattr(ConnectOutputs, "apply", broken)
    torch.manual_seed(0)
    plain = Shared(torch.exp)
    converted = fxamp.convert(copy.deepcopy(plain), dtype=torch.bfloat16, opt_level=opt_level)
    for _ in range(2):
        for model in (plain, converted):
            model.zero_grad()
            sum(part.float().sum() for part in model(X)).backward()
        assert distance(converted.body.weight.grad, plain.body.weight.grad) < 0.02
    assert "please report it" in caplog.text and "runs as under torch.autocast" in str(fxamp.report(converted))
