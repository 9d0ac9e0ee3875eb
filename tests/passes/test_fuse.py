"""Expressions that are one op: read as it where nobody can tell the difference, and left as written everywhere else."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.model.engine import engine_of

LOW = torch.float16
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
C = math.sqrt(2 / math.pi)


def llama(x, w):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return w * wide.to(x.dtype)


def gemma(x, w):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + w)).type_as(x)


NORMS = {
    "llama": llama,
    "gemma": gemma,
    "t5": lambda x, w: w * (x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)),
    "square": lambda x, w: x * (x.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt() * w,
    "product": lambda x, w: torch.mul(torch.rsqrt(1e-5 + torch.mean(x * x, dim=[-1], keepdim=True)), x) * w,
    "root": lambda x, w: x / torch.sqrt(torch.mean(x**2, -1, True) + 1e-5) * w,
    "power": lambda x, w: w * (x * torch.pow(x.pow(2).mean(-1, keepdim=True) + 1e-5, -0.5)),
}

GELUS = {
    "gpt2": lambda x: 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0)))),
    "bert": lambda x: x * (0.5 * (1.0 + torch.tanh(C * (x + 0.044715 * x * x * x)))),
    "fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "open": lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x.pow(2)))),
    "sum": lambda x: (lambda half: half + half * (C * x + C * 0.044715 * x**3).tanh())(x * 0.5),
}


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.body = body

    def forward(self, x):
        return self.last(self.body(self.first(x), self.weight))


BODIES = {
    **{f"norm {name}": (body, "rms_norm") for name, body in NORMS.items()},
    **{f"gelu {name}": ((lambda x, w, body=body: body(x * w)), "gelu") for name, body in GELUS.items()},
}


def ops(converted):
    return [row.op for row in fxamp.report(converted).rows]


def converted(body, dtype=LOW, **options):
    torch.manual_seed(0)
    net = Net(body)
    return net, fxamp.convert(net, dtype, example_inputs=(X,), capture="symbolic", **options)


def results(net, run, x=X):
    net.zero_grad()
    x = x.clone().requires_grad_()
    out = run(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(weight.grad.clone() for weight in net.parameters() if weight.grad is not None)]


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("name", BODIES)
def test_every_spelling_is_one_low_op(name, capture):
    body, op = BODIES[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net(body)
    model = fxamp.convert(net, LOW, capture=capture, example_inputs=(X,))
    model(X)
    rows = {row.op: row for row in fxamp.report(model).rows}
    assert rows[op].precision == "low"
    assert not rows.keys() & {"pow", "rsqrt", "tanh", "mean", "square", "sqrt"}


@pytest.mark.parametrize("scale", [1e-2, 1.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", BODIES)
def test_no_further_from_float64_than_the_parts_were(name, dtype, scale):
    body, op = BODIES[name]
    net, fused = converted(body, dtype)
    with torch.no_grad():
        net.first.weight.mul_(scale)
    net, parts = net, fxamp.convert(net, dtype, lists=fxamp.OpLists.default().override(deny=[op]), example_inputs=(X,))
    assert op in ops(fused) and op not in ops(parts)
    wide = copy.deepcopy(net).double()
    exact = results(wide, wide, X.double())
    ours, theirs = results(net, fused), results(net, parts)
    for truth, one, other in zip(exact, ours, theirs, strict=True):
        scale_of = truth.norm()
        ulp = torch.finfo(dtype).eps
        assert (one - truth).norm() <= 2 * (other - truth).norm() + 2 * ulp * scale_of


@pytest.mark.parametrize("name", BODIES)
def test_float32_is_left_within_its_rounding(name):
    """Where the op turns out to be float32 (the input is no low value), it gives what the parts gave."""
    body, op = BODIES[name]
    torch.manual_seed(0)
    net = Net(body)
    net.first = nn.Identity()
    model = fxamp.convert(net, LOW, example_inputs=(X,), overrides={"last": "deny"})
    assert op in ops(model)
    for expected, found in zip(results(net, net), results(net, model), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def stops_gradient(x, w):
    with torch.no_grad():
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return w * (x * root)


def writes_between(x, w):
    root = inverse_root(x)
    x.mul_(2)
    return w * (x * root)


def reads_what_was_written(x, w):
    root = inverse_root(x)
    return w * (x.mul_(2) * root)


def reads_a_part(x, w):
    root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return w * (x * root) + root


def checkpoints_a_part(x, w):
    root = checkpoint(lambda x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5), x, use_reentrant=False)
    return w * (x * root)


def a_factor_without_gradient(x, w):
    with torch.no_grad():
        y = x * 1.0
    return w * (x * torch.rsqrt((x * y).mean(-1, keepdim=True) + 1e-5))


def stays_float32(x, w):
    x = x.float()
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def becomes_float32(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)).float()


def own_weight(x, w):
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return scaled * scaled * w


def inverse_root(x, **options):
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True, **options) + 1e-5)


def gelu_with_a_part_read(x, w):
    inner = torch.tanh(C * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + inner) + inner * w


def gelu_with_its_inside_read(x, w):
    inside = C * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(inside)) + inside * w


LEFT = {
    "another dimension": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5)),
    "all dimensions": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean() + 1e-5)),
    "a sum": lambda x, w: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-5)),
    "a cube": lambda x, w: w * (x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-5)),
    "another value": lambda x, w: w * (x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-5)),
    "a root": lambda x, w: w * (x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
    "an alpha": lambda x, w: w * (x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), 1e-5, alpha=2))),
    "a wider eps": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w * 1e-5)),
    "no weight": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "a twofold square": lambda x, w: w * (x * torch.rsqrt((x * (2 * x)).mean(-1, keepdim=True) + 1e-5)),
    "a difference": lambda x, w: w * (x * torch.rsqrt(5.0 - x.pow(2).mean(-1, keepdim=True))),
    "another power": lambda x, w: w * (x * torch.pow(x.pow(2).mean(-1, keepdim=True) + 1e-5, 0.5)),
    "a quotient by the inverse root": lambda x, w: w * (x / torch.pow(x.pow(2).mean(-1, keepdim=True) + 1e-5, -0.5)),
    "a square of rounded values": lambda x, w: w * (x * inverse_root(x.half().float())),
    "a norm of rounded values": lambda x, w: (lambda y: w * (y * inverse_root(y)))(x.half()),
    "an integer eps": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1)),
    "a power between": lambda x, w: (lambda y: w * (y * torch.rsqrt(y.pow(2.5).mean(-1, keepdim=True) + 1e-5)))(
        x.abs()
    ),
    "a weight of one number": lambda x, w: w[:1] * (x * inverse_root(x)),
    "a weight in float64": lambda x, w: (w.double() * (x * inverse_root(x))).float(),
    "a part that is written": lambda x, w: (x * inverse_root(x)).mul_(w),
    "a mean that is float64": lambda x, w: (w * (x * inverse_root(x, dtype=torch.float64))).float(),
    "a mean in float64": lambda x, w: w * (x * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5).float()),
    "no gradient": stops_gradient,
    "a factor without gradient": a_factor_without_gradient,
    "float32 that stays": stays_float32,
    "float32 before the weight": becomes_float32,
    "a part that is read": reads_a_part,
    "a part in a checkpoint": checkpoints_a_part,
    "another constant": lambda x, w: 0.5 * x * (1 + torch.tanh(0.79 * (x + 0.044715 * x**3))),
    "another half": lambda x, w: 0.4 * x * (1 + torch.tanh(C * (x + 0.044715 * x**3))),
    "a tanh of two values": lambda x, w: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * x * x * w))),
    "a gelu's part that is read": gelu_with_a_part_read,
    "a gelu's tanh of what is read": gelu_with_its_inside_read,
    "a further term": lambda x, w: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * x**3)) + x),
    "a further term of the tanh": lambda x, w: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * x**3) + x * x)),
    "an alpha of a gelu": lambda x, w: 0.5 * x * (1 + torch.tanh(C * torch.add(x, 0.044715 * x**3, alpha=2))),
    "a difference in a gelu": lambda x, w: 0.5 * x * (1 + torch.tanh(C * (x - 0.044715 * x**3))),
    "the negative in a gelu": lambda x, w: 0.5 * x * (1 + torch.tanh(-(C * (x + 0.044715 * x**3)))),
    "a gelu of rounded values": lambda x, w: GELUS["gpt2"](x.half()).float(),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_something_else_is_left_as_written(name):
    net, model = converted(LEFT[name])
    assert not {"rms_norm", "gelu"} & {*ops(model)}
    for exact, found in zip(results(net, net), results(net, model), strict=True):
        assert (found - exact).norm() <= 0.02 * (exact.norm() + 0.1)


@pytest.mark.parametrize(
    "body",
    [
        lambda x, w: torch.outer(w, w) * (x * inverse_root(x)),
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1) + 1e-5)),
    ],
    ids=["a weight of two dimensions", "a mean for each column"],
)
def test_of_as_many_rows_as_columns_nothing_else_is_taken_for_a_norm(body):
    torch.manual_seed(0)
    net, x = Net(body), torch.randn(8, 8)
    model = fxamp.convert(net, LOW, example_inputs=(x,), capture="symbolic")
    assert "rms_norm" not in ops(model)
    for exact, found in zip(results(net, net, x), results(net, model, x), strict=True):
        assert (found - exact).norm() <= 0.02 * (exact.norm() + 0.1)


def test_a_norm_is_not_its_own_weight():
    """Of one dimension everything has the weight's shape."""
    torch.manual_seed(0)
    net, x = Net(own_weight), X[0]
    model = fxamp.convert(net, LOW, example_inputs=(x,), capture="symbolic")
    for exact, found in zip(results(net, net, x), results(net, model, x), strict=True):
        assert (found - exact).norm() <= 0.02 * (exact.norm() + 0.1)


@pytest.mark.parametrize("body", [writes_between, reads_what_was_written])
def test_a_write_between_the_parts_is_no_norm(body):
    net, model = converted(body)
    assert "rms_norm" not in ops(model)
    with torch.no_grad():  # autograd itself refuses the write
        torch.testing.assert_close(model(X), net(X), rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    "said",
    [
        {"level": "strict"},
        {"overrides": {"**": "deny"}},
        {"overrides": {"pow_1": "deny"}},
        {"lists": fxamp.OpLists.default().override(deny=["rms_norm"])},
        {"lists": fxamp.OpLists.default().override(infer=["rsqrt"])},
    ],
    ids=["strict", "all", "a part", "the op", "a part of lists"],
)
def test_whoever_has_said_something_is_obeyed(said):
    net, model = converted(NORMS["llama"], **said)
    assert "rms_norm" not in ops(model)
    if said.get("overrides") == {"**": "deny"}:
        assert torch.equal(model(X), net(X))


def test_a_norm_that_the_model_keeps_in_float32_is_left():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return NORMS["llama"](x, self.weight)

    class Keeps(nn.Module):
        _keep_in_fp32_modules = ("norm",)

        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(8, 8), Norm(), nn.Linear(8, 4)

        def forward(self, x):
            return self.last(self.norm(self.first(x)))

    assert "rms_norm" not in ops(fxamp.convert(Keeps(), LOW, example_inputs=(X,)))
    assert "rms_norm" in ops(fxamp.convert(Keeps(), torch.bfloat16, example_inputs=(X,)))


def without_autocast(x, w):
    with torch.autocast("cpu", enabled=False):
        return NORMS["llama"](x, w)


def test_a_region_without_autocast_is_left():
    assert "rms_norm" not in ops(converted(without_autocast)[1])


def test_in_a_checkpointed_region_the_whole_is_computed_again():
    net, model = converted(lambda x, w: checkpoint(NORMS["llama"], x, w, use_reentrant=False))
    assert "rms_norm" in ops(model)
    assert "rms_norm" not in engine_of(model).graphs()[0].compiled.source  # it stands in the region
    for exact, found in zip(results(net, net), results(net, model), strict=True):
        assert (found - exact).norm() <= 0.02 * exact.norm()


def test_a_plan_finds_the_op_again(tmp_path):
    net, model = converted(NORMS["llama"])
    fxamp.report(model).save_plan(tmp_path / "plan.json")
    again = fxamp.convert(net, LOW, example_inputs=(X,), plan=tmp_path / "plan.json")
    assert ops(again) == ops(model)
    assert [row.precision for row in fxamp.report(again).rows] == [row.precision for row in fxamp.report(model).rows]
    assert torch.equal(model(X), again(X))


def test_explain_says_how_it_was_written():
    _, model = converted(NORMS["llama"])
    (row,) = [row for row in fxamp.report(model).rows if row.op == "rms_norm"]
    assert row.written_out == "to, pow, mean, add, rsqrt, mul, mul"
    assert f"written out in the model as {row.written_out}" in fxamp.explain(model, row.name)
    assert "test_fuse.py" in row.source


def test_compare_and_find_nan_know_the_op():
    net, model = converted(NORMS["llama"])
    compared = fxamp.compare(net, model, (X,))
    assert any(row.op == "rms_norm" for row in compared.rows)
    assert fxamp.find_nan(model, (X,)) is None
    with torch.no_grad():
        net.weight[3] = float("nan")
    found = fxamp.find_nan(model, (X,))
    assert found is not None


def test_a_weight_that_low_would_destroy_keeps_it_in_float32():
    torch.manual_seed(0)
    net = Net(NORMS["llama"])
    with torch.no_grad():
        net.weight.fill_(1e-9)
    model = fxamp.convert(net, LOW, example_inputs=(X,))
    rows = {row.op: row for row in fxamp.report(model).rows}
    assert rows["rms_norm"].precision == "high"


def test_gelu_is_torchs_own():
    net, model = converted(lambda x, w: GELUS["gpt2"](x))
    h = F.linear(X.to(LOW), net.first.weight.to(LOW), net.first.bias.to(LOW))
    expected = F.linear(F.gelu(h, approximate="tanh"), net.last.weight.to(LOW), net.last.bias.to(LOW)).float()
    assert torch.equal(model(X), expected)
