"""`custom_fwd(cast_inputs=)` and `register_autocast`: what authors say about precision holds without autocast, too."""

import copy
import functools

import pytest
import torch
from torch import nn

import fxamp
from fxamp.authors import cast_by_autocast

BF16 = torch.bfloat16


class Product(torch.autograd.Function):
    """Has kernels of bfloat16 alone."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=BF16)
    def forward(ctx, x, w):
        if {x.dtype, w.dtype} != {BF16}:
            raise TypeError("bfloat16 alone")
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w.T, x.T @ gradient


class WideProduct(torch.autograd.Function):
    """Gives float32, whatever it is given; called with operands of one dtype."""

    @staticmethod
    def forward(ctx, x, w):
        assert x.dtype == w.dtype
        ctx.save_for_backward(x, w)
        return x.float() @ w.float()

    @staticmethod
    def backward(ctx, gradient):
        assert gradient.dtype == torch.float32
        x, w = ctx.saved_tensors
        return (gradient @ w.float().T).to(x.dtype), (x.float().T @ gradient).to(w.dtype)


@torch.library.custom_op("fxamp_tests::low_product", mutates_args=())
def low_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if {x.dtype, w.dtype} != {BF16}:
        raise TypeError("bfloat16 alone")
    return x @ w


@low_product.register_fake
def _(x, w):
    return x.new_empty(x.shape[0], w.shape[1])


low_product.register_autograd(
    lambda ctx, gradient: (gradient @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ gradient),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
torch.library.register_autocast("fxamp_tests::low_product", "cpu", BF16)


def contiguous(forward):
    """What libraries put around a forward."""

    @functools.wraps(forward)
    def call(ctx, *given):
        return forward(ctx, *(each.contiguous() for each in given))

    return call


class GuardedProduct(Product):
    forward = staticmethod(contiguous(Product.forward))


class WideBehindLow(torch.autograd.Function):
    """Is to be given bfloat16, and gives float32."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=BF16)
    def forward(ctx, x, w):
        ctx.given = x.dtype
        ctx.save_for_backward(x, w)
        return x.float() @ w.float()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return (gradient @ w.float().T).to(x.dtype), (x.float().T @ gradient).to(w.dtype)


CALLS = {
    "custom_fwd in another wrapper": GuardedProduct.apply,
    "custom_fwd": Product.apply,
    "custom op": low_product,
    "its packet": torch.ops.fxamp_tests.low_product,
    "its overload": torch.ops.fxamp_tests.low_product.default,
}


class Net(nn.Module):
    def __init__(self, product):
        super().__init__()
        self.first, self.w, self.last = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)
        self.product = product

    def forward(self, x):
        return self.last(self.product(self.first(x), self.w))


def step(model, x):
    y = model(x)
    y.float().pow(2).sum().backward()
    return y.float(), [weight.grad.float() for weight in model.parameters()]


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("call", CALLS)
def test_it_is_given_what_autocast_would_give_it(call, opt_level):
    torch.manual_seed(0)
    model, twin, x = Net(CALLS[call]), Net(CALLS[call]), torch.randn(4, 8)
    twin.load_state_dict(model.state_dict())
    converted = fxamp.convert(twin, BF16, opt_level=opt_level)
    with torch.autocast("cpu", BF16):
        wanted, gradients = step(model, x)
    y, ours = step(converted, x)
    assert torch.equal(y, wanted)
    for gradient, expected in zip(ours, gradients, strict=True):
        assert torch.allclose(gradient, expected, rtol=0.02, atol=0.1)
    (row,) = [row for row in fxamp.report(converted).rows if row.op.endswith(("Product", "low_product"))]
    assert (row.precision, row.dtype, row.reason_kind) == ("low", "bfloat16", "author")
    assert "has torch.autocast give it bfloat16" in str(fxamp.explain(converted, row.name))
    assert fxamp.report(converted).coverage == 1, "what reads it runs low"


def test_lists_are_stronger_and_so_is_another_low_dtype():
    x = torch.randn(4, 8)
    lists = fxamp.OpLists.default().override(deny=[Product])
    with pytest.raises(TypeError, match="bfloat16 alone"):
        fxamp.convert(Net(Product.apply), BF16, lists=lists)(x)
    with pytest.raises(TypeError, match="bfloat16 alone"):
        fxamp.convert(Net(Product.apply), torch.float16)(x)


def test_what_it_gives_is_an_output_as_any_other():
    model, x = Net(Product.apply), torch.randn(4, 8)
    model.last = nn.Identity()
    assert fxamp.convert(model, BF16)(x).dtype == torch.float32
    assert fxamp.convert(model, BF16, output_dtype=None)(x).dtype == BF16


def test_for_another_low_dtype_it_is_given_float32():
    converted = fxamp.convert(Net(WideBehindLow.apply), torch.float16, example_inputs=(torch.randn(4, 8),))
    (row,) = [row for row in fxamp.report(converted).rows if row.op.endswith("WideBehindLow")]
    assert (row.precision, row.reason_kind) == ("high", "unlisted")
    assert "has torch.autocast give it bfloat16" in row.reason


def test_what_is_said_for_another_device_does_not_hold():
    assert cast_by_autocast(Product.apply, "cpu") == cast_by_autocast(low_product, "cpu") == BF16
    assert cast_by_autocast(Product.apply, "cuda") is cast_by_autocast(low_product, "cuda") is None
    assert cast_by_autocast(WideProduct.apply, "cpu") is cast_by_autocast(torch.mm, "cpu") is None


ALLOWED = {
    "listed": (WideProduct, {"lists": fxamp.OpLists.default().override(allow=[WideProduct])}),
    "overridden": (WideProduct, {"overrides": {"wide_product": "allow"}}),
    "by its author": (WideBehindLow, {}),
}


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("way", ALLOWED)
def test_what_a_function_gives_in_float32_whatever_it_reads_stays_so(way, opt_level):
    torch.manual_seed(0)
    function, options = ALLOWED[way]
    model, x = Net(function.apply), torch.randn(4, 8)
    converted = fxamp.convert(copy.deepcopy(model), BF16, opt_level=opt_level, example_inputs=(x,), **options)
    exact, gradients = step(model, x)
    y, ours = step(converted, x)
    assert (y - exact).norm() < 0.02 * exact.norm()
    for gradient, expected in zip(ours, gradients, strict=True):
        assert (gradient - expected).norm() < 0.03 * expected.norm()
    report = fxamp.report(converted)
    (row,) = [row for row in report.rows if row.op.endswith(function.__name__)]
    assert (row.precision, row.dtype) == ("low", "float32")
    assert report.coverage == 1, "what reads it runs low, as under autocast"
