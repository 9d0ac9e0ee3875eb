"""What people write in forward: each idiom converted in both dtypes, with and without example inputs."""

import copy

import pytest
import torch
from torch import fx, nn
from torch.autograd import Variable
from torch.nn import functional as F

import fxamp
from fxamp.capture.creations import variables_made

IDIOMS = {
    "max values": lambda m, x: m.fc(x).max(1).values,
    "max pair": lambda m, x: sum(torch.max(m.fc(x), 1)[0:1]),
    "topk indices": lambda m, x: m.fc(x).topk(2).indices,
    "sort": lambda m, x: m.fc(x).sort(-1, descending=True)[0],
    "min over all": lambda m, x: m.fc(x).min(),
    "split loop": lambda m, x: sum(part * 2 for part in m.fc(x).split(4, -1)),
    "split sizes": lambda m, x: torch.cat(m.fc(x).split([2, 6], -1)[::-1], -1),
    "chunk cat": lambda m, x: torch.cat(m.fc(x).chunk(2, -1), 0),
    "unbind stack": lambda m, x: torch.stack(m.fc(x).unbind(0), 1),
    "ellipsis": lambda m, x: m.fc(x)[..., 1:3].contiguous().view(-1),
    "boolean mask": lambda m, x: m.fc(x) * (x > 0),
    "where scalar": lambda m, x: torch.where(x > 0, m.fc(x), 0.0),
    "masked fill": lambda m, x: m.fc(x).masked_fill(x > 1, float("-inf")).softmax(-1),
    "big masked fill": lambda m, x: m.fc(x).masked_fill(x > 1, -1e9).softmax(-1),
    "einsum": lambda m, x: torch.einsum("bi,ji->bj", m.fc(x), m.fc.weight),
    "transposes": lambda m, x: (m.fc(x).T @ m.fc(x)).mT,
    "matmul operator": lambda m, x: x @ m.fc.weight.t() + m.fc.bias,
    "new zeros": lambda m, x: m.fc(x) + x.new_zeros(1),
    "expand": lambda m, x: m.scale.expand(4, -1) * m.fc(x),
    "iadd": lambda m, x: _iadd(m.fc(x), x),
    "dict update": lambda m, x: {**{"a": m.fc(x)}, "b": x},
    "list append": lambda m, x: [m.fc(x), *[x + i for i in range(2)]],
    "sequential twice": lambda m, x: m.body(m.body(x)),
    "item access by getattr": lambda m, x: getattr(m, "fc")(x),  # noqa: B009
    "norm": lambda m, x: m.fc(x) / m.fc(x).norm(dim=-1, keepdim=True),
    "normalize": lambda m, x: F.normalize(m.fc(x), dim=-1),
    "rms norm by hand": lambda m, x: m.fc(x) * torch.rsqrt(m.fc(x).pow(2).mean(-1, keepdim=True) + 1e-6),
    "log of one minus": lambda m, x: torch.log(1 - torch.sigmoid(m.fc(x))),
    "loss inside": lambda m, x: F.cross_entropy(m.fc(x), torch.zeros(4, dtype=torch.long)),
    "softplus": lambda m, x: F.softplus(m.fc(x)).log(),
    "cumsum positions": lambda m, x: m.fc(x) * torch.cumsum(torch.ones_like(x), 0),
    "arange positions": lambda m, x: m.fc(x) + torch.arange(8, device=x.device).float() * 0.01,
    "size arithmetic": lambda m, x: m.fc(x).view(x.size(0) // 2, -1, x.size(1)),
    "divided sizes": lambda m, x: m.fc(x) * divmod(x.size(0), 3)[1] + divmod(20, x.size(0))[0],
    "type_as": lambda m, x: m.fc(x).type_as(x) + 1,
    "type_as of a mask": lambda m, x: m.fc(x) * (x > 0).type_as(m.fc(x)),
    "to a low value": lambda m, x: m.fc(x) + (x > 0).to(m.fc(x)) + torch.ones(8, dtype=torch.float64).to(m.fc(x)),
    "integers to a low value": lambda m, x: m.fc(m.fc(x) - torch.arange(8).to(m.fc(x), non_blocking=True)),
    "python's types as dtypes": lambda m, x: m.fc(x).to(float) * torch.ones(8, dtype=int) + x.gt(0).sum(dtype=int),
    "float cast": lambda m, x: m.fc(x).float().exp(),
    "double branch": lambda m, x: m.fc(x).double().sum(),
    "a variable": lambda m, x: m.fc(x) + Variable(torch.zeros(x.size(0), 8)).type(x.type()),
    "torch's old types": lambda m, x: m.fc(x).type(torch.FloatTensor) * (x > 0).type(torch.DoubleTensor).float(),
    "detach": lambda m, x: m.fc(x) - m.fc(x).detach(),
    "clone and write": lambda m, x: _write(m.fc(x).clone()),
    "index put": lambda m, x: _put(torch.zeros(4, 8), m.fc(x)),
    "gather": lambda m, x: m.fc(x).gather(1, torch.zeros(4, 2, dtype=torch.long)),
    "scatter add": lambda m, x: torch.zeros(4, 8).scatter_add(1, torch.zeros(4, 8, dtype=torch.long), m.fc(x)),
    "interpolate": lambda m, x: F.interpolate(m.fc(x)[None, None], scale_factor=2, mode="bilinear"),
    "grid sample": lambda m, x: F.grid_sample(m.fc(x)[None, None], torch.zeros(1, 2, 2, 2), align_corners=False),
    "prelu": lambda m, x: F.prelu(m.fc(x), m.slope),
    "lerp": lambda m, x: torch.lerp(m.fc(x), x, 0.3),
    "addcmul": lambda m, x: torch.addcmul(x, m.fc(x), x, value=0.5),
    "baddbmm": lambda m, x: torch.baddbmm(x[None], m.fc(x)[None], m.fc.weight[None]),
    "bilinear": lambda m, x: m.bilinear(m.fc(x), x),
    "pad": lambda m, x: F.pad(m.fc(x), (1, 1)),
    "unfold": lambda m, x: m.fc(x).unfold(1, 2, 2).sum(-1),
    "complex": lambda m, x: torch.fft.rfft(m.fc(x)).abs(),
    "one hot": lambda m, x: F.one_hot(m.fc(x).argmax(-1), 8).float() @ m.fc.weight,
    "var mean": lambda m, x: torch.var_mean(m.fc(x), dim=-1),
    "std": lambda m, x: (m.fc(x) - m.fc(x).mean(-1, keepdim=True)) / (m.fc(x).std(-1, keepdim=True) + 1e-5),
    "clamp": lambda m, x: m.fc(x).clamp(min=1e-12).sqrt(),
    "repeat interleave": lambda m, x: m.fc(x).repeat_interleave(2, 0),
    "roll": lambda m, x: m.fc(x).roll(1, 0),
    "meshgrid": lambda m, x: torch.meshgrid(m.fc(x)[0], x[0], indexing="ij")[0],
    "embedding bag": lambda m, x: F.embedding_bag(torch.zeros(2, 3, dtype=torch.long), m.fc.weight),
    "tied use": lambda m, x: F.linear(m.fc(x), m.fc.weight.t()),
    "cosine": lambda m, x: F.cosine_similarity(m.fc(x), x),
}


def _iadd(y, x):
    y += x
    y[:, 0] *= 2
    return y


def _write(y):
    y[0] = 1
    y[:, 1:3].add_(1)
    return y


def _put(out, y):
    out[torch.tensor([0, 1, 2, 3])] = y
    return out


class Idiom(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.bilinear = nn.Bilinear(8, 8, 3)
        self.scale = nn.Parameter(torch.ones(8))
        self.slope = nn.Parameter(torch.full((1,), 0.25))
        self.name = name

    def forward(self, x):
        return IDIOMS[self.name](self, x)


# Python's iteration over a traced value needs to know how long it is.
NEEDS_EXAMPLE = {"max pair", "split loop"}


@pytest.mark.parametrize("example", ["with example", "without"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", IDIOMS)
def test_idiom(name, dtype, example):
    if example == "without" and name in NEEDS_EXAMPLE:
        with pytest.raises(fxamp.CaptureError, match=r"iteration over a traced value.*Pass example_inputs"):
            fxamp.convert(Idiom(name), capture="symbolic")
        return
    torch.manual_seed(0)
    eager = Idiom(name)
    x = torch.randn(4, 8)
    given = (x,) if example == "with example" else None
    converted = fxamp.convert(copy.deepcopy(eager), dtype=dtype, example_inputs=given, capture="symbolic")
    ours, theirs = converted(x), eager(x)
    flat_ours, flat_theirs = (torch.utils._pytree.tree_leaves(tree) for tree in (ours, theirs))
    flat_autocast = _under_autocast(eager, x, dtype) or flat_theirs
    assert len(flat_ours) == len(flat_theirs)
    for one, other, cast in zip(flat_ours, flat_theirs, flat_autocast, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        if one.dtype.is_floating_point:
            size = other[other.isfinite()].abs().max().clamp(min=1.0)
            # three roundings of the linear layer's result, or what autocast itself is off by
            allowed = max(4 * torch.finfo(dtype).eps * float(size), 2 * float(_distance(cast, other)))
            assert float(_distance(one, other)) <= allowed


@pytest.mark.parametrize("needs_gradient", [{}, {"requires_grad": False}, {"requires_grad": True}], ids=str)
def test_no_gradient_goes_through_a_variable_to_what_it_is_made_of(needs_gradient):
    class Gated(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            gate = Variable(y, **needs_gradient)
            assert isinstance(gate, Variable)
            return y * gate

    model, x = Gated(8, 8), torch.randn(4, 8)
    converted = fxamp.convert(model, torch.bfloat16, capture="symbolic", example_inputs=(x,))
    converted(x).sum().backward()
    ours, model.weight.grad = model.weight.grad, None
    model(x).sum().backward()
    torch.testing.assert_close(ours, model.weight.grad, rtol=0.05, atol=0.05)
    assert type(Variable(x)) is torch.Tensor and "__call__" not in vars(type(Variable))


def test_a_variable_may_need_a_gradient():
    class Slope(nn.Linear):
        def forward(self, x):
            place = Variable(x, requires_grad=True)
            return torch.autograd.grad(super().forward(place).square().sum(), place, create_graph=True)[0]

    model, x = Slope(8, 8), torch.randn(4, 8)
    converted = fxamp.convert(model, torch.bfloat16, capture="symbolic", example_inputs=(x,))
    torch.testing.assert_close(converted(x), model(x), rtol=0.05, atol=0.05)


def test_a_trace_inside_of_a_trace_leaves_variables_to_the_outer_one():
    proxy = fx.Proxy(fx.Graph().placeholder("x"))
    with variables_made():
        with variables_made():
            pass
        assert type(Variable(proxy)) is fx.Proxy and type(Variable(torch.ones(2))) is torch.Tensor
    assert "__call__" not in vars(type(Variable))


def _under_autocast(eager, x, dtype):
    """What torch.autocast gives; nothing for the idioms it fails on (mixed dtypes, literals out of range)."""
    try:
        with torch.autocast("cpu", dtype=dtype):
            return torch.utils._pytree.tree_leaves(eager(x))
    except RuntimeError:
        return None


def _distance(one, other):
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, torch.zeros(()), (one.double() - other.double()).abs()).max()


class Factors(nn.Module):
    """A product of matrices; a slice of it is made anew, around parameters that it shares (tltorch's tensors)."""

    def __init__(self, core, factor):
        super().__init__()
        self.core = core
        if isinstance(factor, nn.Parameter):
            self.factor = factor
        else:
            self.register_buffer("factor", factor)

    def __getitem__(self, rows):
        return Factors(self.core, self.factor[rows])

    def matrix(self):
        return self.factor @ self.core


class Factored(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = Factors(nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(16, 4)))

    def forward(self, x):
        return F.linear(x, self.weight[2:6].matrix())


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_module_that_forward_makes_may_be_given_parameters(opt_level):
    plain, model = Factored(), fxamp.convert(Factored(), overrides={"*": "deny"}, opt_level=opt_level)
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            each(x).square().sum().backward()
        assert torch.equal(model(x), plain(x))
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(found.grad, expected.grad)
    assert set(fxamp.report(model).captures) == {"symbolic"}
    values = {name: value * 2 for name, value in plain.named_parameters()}  # with a grad_fn each
    found, expected = (torch.func.functional_call(each, values, (x,)) for each in (model, plain))
    assert torch.equal(found, expected)


def test_a_graph_for_parameters_is_not_for_what_was_computed_in_their_place():
    class Asking(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1 if self.weight.grad_fn is None else 2)

    plain = Asking(8, 8)
    model = fxamp.convert(copy.deepcopy(plain), overrides={"*": "deny"})
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    computed = {name: value * 2 for name, value in plain.named_parameters()}
    for values in ({}, computed, {}, computed):
        found, expected = (torch.func.functional_call(each, values, (x,)) for each in (model, plain))
        assert torch.equal(found, expected)
