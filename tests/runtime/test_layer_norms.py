"""A CPU's layer norm of low values takes its gradients from a float32 mean and scale, and adds them up in float32."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.model.engine import engine_of
from fxamp.runtime.cpu_norms import layer_norm
from tests.runtime.norm_cases import KIND, KINDS, LOW, numbers


def error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def given(low: torch.dtype, rows: tuple[int, ...] = (6,), kind: str = "weight and bias") -> list[torch.Tensor | None]:
    has_weight, has_bias = KINDS[kind]
    weight = numbers(8, dtype=low, seed=1).requires_grad_() if has_weight else None
    bias = numbers(8, dtype=low, seed=2).requires_grad_() if has_bias else None
    return [numbers(*rows, 8, dtype=low).requires_grad_(), weight, bias]


@LOW
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_over_many_rows_the_gradients_of_a_norm_are_as_near_to_float64_as_the_dtype_allows(low, opt_level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))
    x, way = numbers(20_000, 16), numbers(20_000, 16, seed=1)
    exact = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)).double()
    exact.load_state_dict(model.state_dict())
    (exact(x.double()) * way).sum().backward()
    converted = fxamp.convert(model, dtype=low, opt_level=opt_level, example_inputs=(x,))
    assert [row.precision for row in fxamp.report(converted).rows if row.op == "layer_norm"] == ["low"]
    (converted(x) * way / 64).sum().backward()
    for found, wanted in zip(converted[1].parameters(), exact[1].parameters(), strict=True):
        assert error(found.grad.double() * 64, wanted.grad) < 4 * torch.finfo(low).eps


@LOW
@KIND
@pytest.mark.parametrize("rows", [(6,), (2, 3), (), (0,)])
def test_results_are_torchs_and_so_are_gradients_but_for_rounding(low, kind, rows):
    tensors = given(low, rows, kind)
    trained = [tensor for tensor in tensors if tensor is not None]
    ours, theirs = (norm(tensors[0], (8,), *tensors[1:], 1e-3) for norm in (layer_norm, functional.layer_norm))
    assert torch.equal(ours, theirs) and ours.dtype == low
    way = numbers(*rows, 8, dtype=low, seed=3)
    found, wanted = (torch.autograd.grad(result, trained, way) for result in (ours, theirs))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == low and one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=8 * torch.finfo(low).eps, atol=8 * torch.finfo(low).eps)


@LOW
@KIND
def test_its_input_gets_gradients_that_are_rounded_once(low, kind):
    x, *weights = given(low, (400,), kind)
    x = (x.detach() / 4 + 3).requires_grad_()  # a mean that is far from 0
    norm = layer_norm(x, (8,), *weights)
    way = norm.detach() + numbers(400, 8, dtype=low, seed=3) / 2  # as a squared error's: they grow with the result
    (found,) = torch.autograd.grad(norm, x, way)
    wide = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in (x, *weights)]
    (exact,) = torch.autograd.grad(functional.layer_norm(wide[0], (8,), *wide[1:]), wide[0], way.double())
    assert error(found, exact) < torch.finfo(low).eps / 2


def test_rows_without_variance_have_finite_gradients_in_float16_too():
    """Their scale is a million, which float16 does not hold; their gradients it does."""
    x, weight, bias = given(torch.float16)
    x = x.detach().mul_(0).requires_grad_()
    layer_norm(x, (8,), weight, bias, 1e-12).backward(numbers(6, 8, dtype=torch.float16, seed=3) / 1000)
    assert x.grad.isfinite().all() and weight.grad.isfinite().all()


def test_only_what_needs_a_gradient_gets_one():
    x, weight, bias = given(torch.float16)
    layer_norm(x.detach(), (8,), weight, bias.detach()).sum().backward()
    assert x.grad is None and bias.grad is None and weight.grad is not None
    assert not layer_norm(x.detach(), (8,), weight.detach(), bias.detach()).requires_grad


def test_gradients_that_are_differentiated_are_torchs():
    tensors = given(torch.bfloat16)
    found = []
    for norm in (layer_norm, functional.layer_norm):
        first = torch.autograd.grad(norm(tensors[0], (8,), *tensors[1:]).square().sum(), tensors, create_graph=True)
        found.append(torch.autograd.grad(sum(each.square().sum() for each in first), tensors))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def test_gradients_inside_a_checkpoint_are_differentiated():
    tensors = given(torch.bfloat16)
    found = []
    for run in (lambda *args: checkpoint(layer_norm, *args, use_reentrant=False), layer_norm):
        first = torch.autograd.grad(run(tensors[0], (8,), *tensors[1:]).square().sum(), tensors, create_graph=True)
        found.append(torch.autograd.grad(sum(each.square().sum() for each in first), tensors))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_batches_of_gradients_are_torchs():
    tensors = given(torch.bfloat16)
    ways = numbers(3, 6, 8, dtype=torch.bfloat16, seed=3)
    ours, theirs = (
        torch.autograd.grad(norm(tensors[0], (8,), *tensors[1:]), tensors, ways, is_grads_batched=True)
        for norm in (layer_norm, functional.layer_norm)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def test_transforms_and_forward_mode_get_torchs():
    x, weight, bias = (tensor.detach() for tensor in given(torch.bfloat16))
    ours, theirs = (
        grad(lambda w, norm=norm: norm(x, (8,), w, bias).sum())(weight) for norm in (layer_norm, functional.layer_norm)
    )
    assert torch.equal(ours, theirs)
    ours, theirs = (
        vmap(lambda row, norm=norm: norm(row, (8,), weight, bias))(x) for norm in (layer_norm, functional.layer_norm)
    )
    assert torch.equal(ours, theirs)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        assert forward_ad.unpack_dual(layer_norm(dual, (8,), weight.requires_grad_(), bias)).tangent is not None


def test_it_compiles_in_one_piece_and_other_devices_keep_torchs_own():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    x = numbers(4, 8)
    converted = fxamp.convert(model, dtype=torch.bfloat16, example_inputs=(x,))
    compiled = torch.compile(converted, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), converted(x))
    on_meta = fxamp.convert(model.to("meta"), dtype=torch.float16, example_inputs=(x.to("meta"),))
    (variant,) = engine_of(on_meta).all_variants()
    assert functional.layer_norm in [node.target for node in variant.graph.nodes]
