"""What many read of one low copy comes back to float32 by several ways, and is added up there."""

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.model.engine import engine_of
from fxamp.passes.shared_casts import TOGETHER
from fxamp.runtime.cast_again import cast_again

LOW = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])


class Readers(nn.Module):
    """A float32 value that as many linear layers read, as a decoder's layers read what the encoder gives."""

    def __init__(self, many: int, checkpointed: bool = False):
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(many))
        self.checkpointed = checkpointed

    def forward(self, tokens):
        x = self.table(tokens).exp()
        total = 0
        for layer in self.layers:
            y = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            total = total + y.float().square().mean()
        return total


def made(many: int, **options: object) -> tuple[Readers, torch.Tensor]:
    torch.manual_seed(0)
    return Readers(many, **options), torch.randint(50, (4, 16))


def again_in(converted: nn.Module) -> int:
    return sum(
        node.target is cast_again for variant in engine_of(converted).all_variants() for node in variant.graph.nodes
    )


def table_gradient(model: nn.Module, tokens: torch.Tensor, scale: float = 1024.0) -> torch.Tensor:
    model.zero_grad()
    (model(tokens) * scale).backward()
    return model.table.weight.grad.double() / scale


@LOW
def test_strict_has_the_gradients_of_autocast(low):
    model, tokens = made(3)
    converted = fxamp.convert(model, dtype=low, level="strict", example_inputs=(tokens,))
    ours = table_gradient(converted, tokens)
    with torch.autocast("cpu", dtype=low):
        theirs = table_gradient(model, tokens)
    assert (ours - theirs).norm() < 1e-6 * theirs.norm()


@LOW
@pytest.mark.parametrize("level", ["strict", "balanced"])
def test_gradients_of_what_many_read_are_as_near_to_float64_as_autocasts(low, level):
    model, tokens = made(48)
    exact = table_gradient(made(48)[0].double(), tokens)
    converted = fxamp.convert(model, dtype=low, level=level, example_inputs=(tokens,))
    ours = (table_gradient(converted, tokens) - exact).norm()
    with torch.autocast("cpu", dtype=low):
        theirs = (table_gradient(model, tokens) - exact).norm()
    assert ours < 1.5 * theirs


@pytest.mark.parametrize("many", [1, TOGETHER, TOGETHER + 1, 4 * TOGETHER])
def test_there_is_one_cast_and_a_way_for_each_group_of_readers(many):
    model, tokens = made(many)
    converted = fxamp.convert(model, dtype=torch.bfloat16, example_inputs=(tokens,))
    assert fxamp.report(converted).casts_to_low == 1
    assert again_in(converted) == (many - 1) // TOGETHER


def test_a_way_stands_behind_the_readers_of_the_one_before():
    """So in backward its gradient is converted and added before those others are there."""
    model, tokens = made(3 * TOGETHER)
    converted = fxamp.convert(model, dtype=torch.bfloat16, example_inputs=(tokens,))
    (variant,) = engine_of(converted).all_variants()
    ways = [node.target is cast_again for node in variant.graph.nodes if node.target in (cast_again, F.linear)]
    assert ways == [False] * TOGETHER + [True] + [False] * TOGETHER + [True] + [False] * TOGETHER


def test_without_gradients_there_is_nothing_to_add():
    model, tokens = made(9)
    converted = fxamp.convert(model.requires_grad_(False), dtype=torch.bfloat16, example_inputs=(tokens,))
    assert again_in(converted) == 0
    with torch.no_grad():
        converted = fxamp.convert(made(9)[0], dtype=torch.bfloat16)
        converted(tokens)
    assert again_in(converted) == 0


def test_checkpointed_readers_have_ways_of_their_own():
    gradients = []
    for checkpointed in (False, True):
        model, tokens = made(6, checkpointed=checkpointed)
        converted = fxamp.convert(model, dtype=torch.bfloat16, example_inputs=(tokens,))
        assert again_in(converted) == (5 if checkpointed else 1)
        gradients.append(table_gradient(converted, tokens))
    assert (gradients[1] - gradients[0]).norm() < 0.01 * gradients[0].norm()


class Parallel(nn.Module):
    """A block whose norm has many low readers, as where adapters stand beside its projections."""

    def __init__(self, readers: int, norm):
        super().__init__()
        self.norm = norm(16)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(16, 16) / 4) for _ in range(readers)])

    def forward(self, x):
        h = self.norm(x)
        return x + sum((h @ weight).tanh() for weight in self.weights)


class Blocks(nn.Module):
    def __init__(self, readers: int, norm=nn.RMSNorm, **options):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks, self.options = nn.ModuleList([Parallel(readers, norm) for _ in range(3)]), options

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, **self.options) if self.options else block(x)
        return x


@LOW
@pytest.mark.parametrize("how", [{"level": "strict"}, {}, {"level": "aggressive"}, {"opt_level": "O2"}], ids=str)
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("readers", [2, TOGETHER + 1, 3 * TOGETHER])
def test_a_value_of_a_checkpointed_region_has_ways_inside_of_it(readers, norm, how, low):
    x, found = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)), []
    for options in ({}, {"use_reentrant": False}, {"use_reentrant": True}):
        torch.manual_seed(0)
        model = fxamp.convert(Blocks(readers, norm, **options), dtype=low, capture="symbolic", **how)
        for _ in range(2):
            model.zero_grad()
            model(x).square().mean().backward()
        found.append(torch.cat([weight.grad.float().flatten() for weight in model.parameters()]))
    torch.manual_seed(0)
    exact = Blocks(readers, norm)
    exact(x).square().mean().backward()
    wanted = torch.cat([weight.grad.flatten() for weight in exact.parameters()])
    for gradients in found:
        assert (gradients - wanted).norm() < (0.03 if low == torch.bfloat16 else 0.004) * wanted.norm()


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiler_is_given_such_regions():
    x, gradients = torch.randn(4, 16), []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        model = fxamp.convert(Blocks(TOGETHER + 1, use_reentrant=False), dtype=torch.bfloat16)
        run = model if backend is None else torch.compile(model, backend=backend)
        run(x).square().mean().backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    assert (gradients[1] - gradients[0]).norm() < 0.01 * gradients[0].norm()


def test_the_instruments_look_at_it_and_it_compiles():
    model, tokens = made(6)
    converted = fxamp.convert(model, dtype=torch.bfloat16, example_inputs=(tokens,))
    assert fxamp.compare(model, converted, (tokens,), loss_fn=lambda loss: loss).output < 1e-3
    assert fxamp.find_nan(converted, (tokens,), loss_fn=lambda loss: loss) is None
    expected = table_gradient(converted, tokens)
    compiled = table_gradient(torch.compile(converted, backend="aot_eager", fullgraph=True), tokens)
    assert (compiled - expected).norm() < 0.01 * expected.norm()


@LOW
def test_it_is_the_low_copy_with_a_gradient_in_float32(low):
    value = torch.randn(3, 4, requires_grad=True)
    copy = value.to(low)
    again = cast_again(value, copy)
    assert again.data_ptr() == copy.data_ptr() and again.dtype == low
    way = torch.randn(3, 4).to(low)
    (found,) = torch.autograd.grad(again, value, way, retain_graph=True)
    assert found.dtype == torch.float32 and torch.equal(found, way.float())
    (batch,) = torch.autograd.grad(again, value, torch.stack([way, -way]), is_grads_batched=True)
    assert torch.equal(batch, torch.stack([way, -way]).float())
    with torch.no_grad():
        assert cast_again(value, copy) is copy


def test_second_derivatives_and_transforms():
    value = torch.randn(5, dtype=torch.float64).float().requires_grad_()

    def loss(x):
        return cast_again(x, x.to(torch.bfloat16)).square().sum()

    (first,) = torch.autograd.grad(loss(value), value, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), value)
    assert torch.equal(second, torch.full((5,), 2.0))
    assert torch.equal(grad(loss)(value.detach()), first)
    assert vmap(lambda x: cast_again(x, x.to(torch.bfloat16)))(value.detach()).dtype == torch.bfloat16
