"""Custom `autograd.Function`s keep their own backward in a graph, however they are called."""

import pytest
import torch
from torch import nn

import fxamp


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 7 * grad  # no derivative of what forward computes: a lost backward shows


class Scaled(torch.autograd.Function):
    """With a `setup_context`, two inputs, and one that needs no gradient."""

    @staticmethod
    def forward(x, factor):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return 7 * grad * ctx.factor, None


class Inside(torch.autograd.Function):
    """Calls another one."""

    @staticmethod
    def forward(ctx, x):
        return Twice.apply(x)

    @staticmethod
    def backward(ctx, grad):
        return 7 * grad


class Halves(torch.autograd.Function):
    """Two results, and a tensor kept for backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x / 2, x.neg() / 2

    @staticmethod
    def backward(ctx, first, second):
        return 7 * first + ctx.saved_tensors[0]


twice, scaled, halves = Twice.apply, Scaled.apply, Halves.apply  # bound before, as modules of many packages do

WAYS = {
    "looked up": lambda x: Twice.apply(x),
    "of a setup": lambda x: Scaled.apply(x, 3.0),
    "inside of another": lambda x: Inside.apply(x),
    "bound before": lambda x: twice(x),
    "a bound one of a setup": lambda x: scaled(x, 3.0),
    "a bound one by name": lambda x: scaled(x, factor=3.0),
    "a bound one of two results": lambda x: sum(halves(x)),
    "without gradients": lambda x: x + Twice.apply(x.detach()),
    "in no_grad": lambda x: x + torch.no_grad()(twice)(x),
}


class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.first, self.last, self.way = nn.Linear(8, 8), nn.Linear(8, 8), way

    def forward(self, x):
        return self.last(self.way(self.first(x)))


def built(way):
    """The net, where this torch can run it: in 2.11 `apply` takes no keywords."""
    torch.manual_seed(0)
    net, x = Net(WAYS[way]), torch.randn(4, 8)
    try:
        net(x)
    except TypeError as error:
        pytest.skip(f"torch {torch.__version__} does not run it: {error}")
    return net, x


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"capture": "dynamo"}, {"opt_level": "O2"}], ids=["auto", "dynamo", "O2"])
def test_gradients_are_those_of_its_own_backward(way, options):
    if "capture" in options and way == "in no_grad" and torch.__version__ < "2.13":
        pytest.skip("Dynamo of torch 2.11 and 2.12 ends in an AssertionError")
    plain, x = built(way)
    (expected,) = torch.autograd.grad(plain(x).sum(), plain.first.weight)
    converted = fxamp.convert(plain, dtype=torch.bfloat16, **options)
    for _ in range(2):
        (found,) = torch.autograd.grad(converted(x).sum(), converted.first.weight)
        assert (found.float() - expected).norm() < 0.02 * expected.norm()


def test_a_forward_that_is_called_by_itself_is_entered():
    net, x = Net(lambda x: Scaled.forward(x, 3.0) + Twice.forward(None, x)), torch.randn(4, 8)
    converted = fxamp.convert(net, dtype=torch.bfloat16, capture="symbolic", example_inputs=(x,))
    assert [row.op for row in fxamp.report(converted).rows].count("mul") == 2
    torch.testing.assert_close(converted(x), net(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("way", WAYS)
def test_a_symbolic_graph_holds_all_of_them(way):
    net, x = built(way)
    converted = fxamp.convert(net, dtype=torch.bfloat16, capture="symbolic", example_inputs=(x,))
    torch.testing.assert_close(converted(x), net(x), rtol=0.05, atol=0.05)
    assert Twice.apply(torch.ones(2)).tolist() == [2.0, 2.0] and twice(torch.ones(1)).item() == 2.0
