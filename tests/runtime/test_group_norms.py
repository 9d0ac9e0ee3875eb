"""A CPU's group norm of low values takes its gradients from a mean and a scale in float32."""

import pytest
import torch
from torch import nn
from torch.func import grad
from torch.nn import functional

import fxamp
from fxamp.model.engine import engine_of
from fxamp.runtime.cpu_norms import group_norm
from tests.runtime.norm_cases import KIND, KINDS, LOW, numbers


def given(low: torch.dtype, kind: str = "weight and bias", length: int = 400) -> list[torch.Tensor | None]:
    has_weight, has_bias = KINDS[kind]
    weight = (1 + numbers(4, seed=1)).to(low).requires_grad_() if has_weight else None
    bias = numbers(4, dtype=low, seed=2).requires_grad_() if has_bias else None
    return [(1.37 + numbers(2, 4, length)).to(low).requires_grad_(), weight, bias]


@LOW
@KIND
def test_its_input_gets_gradients_that_are_rounded_once(low, kind):
    tensors = given(low, kind)
    norm = group_norm(tensors[0], 1, *tensors[1:])
    plain = functional.group_norm(tensors[0], 1, *tensors[1:])
    assert norm.dtype == low and torch.equal(norm, plain)
    way = norm.detach() + numbers(2, 4, 400, dtype=low, seed=3) / 2  # as a squared error's: they grow with the result
    (found,) = torch.autograd.grad(norm, tensors[0], way)
    wide = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in tensors]
    (exact,) = torch.autograd.grad(functional.group_norm(wide[0], 1, *wide[1:]), wide[0], way.double())
    assert float((found - exact).norm() / exact.norm()) < torch.finfo(low).eps / 2


@LOW
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_converted_models_low_group_norm_goes_by_it(low, opt_level):
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Conv1d(4, 2, 3))
    x = numbers(2, 2, 20)
    converted = fxamp.convert(model, dtype=low, opt_level=opt_level, example_inputs=(x,))
    assert [row.precision for row in fxamp.report(converted).rows if row.op == "group_norm"] == ["low"]
    (variant,) = engine_of(converted).all_variants()
    assert group_norm in [node.target for node in variant.graph.nodes]
    converted(x).square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in converted.parameters())


def test_only_what_needs_a_gradient_gets_one_and_weights_get_theirs_in_their_own_dtype():
    x, weight, bias = given(torch.bfloat16)
    group_norm(x.detach(), 2, weight, bias).sum().backward()
    assert x.grad is None and weight.grad.dtype == bias.grad.dtype == torch.bfloat16
    with torch.no_grad():
        assert not group_norm(x, 2, weight, bias).requires_grad


def test_gradients_that_are_differentiated_are_near_torchs_in_float32():
    tensors = given(torch.bfloat16, length=5)
    found = []
    for values in (tensors, [tensor.detach().float().requires_grad_() for tensor in tensors]):
        first = torch.autograd.grad(group_norm(values[0], 2, *values[1:]).square().sum(), values, create_graph=True)
        found.append(torch.autograd.grad(sum(each.square().sum() for each in first), values))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.05, atol=0.05 * float(other.abs().max()))


def test_transforms_and_compilers_get_torchs_and_other_devices_keep_it():
    x, weight, bias = (tensor.detach() for tensor in given(torch.bfloat16))
    ours, theirs = (
        grad(lambda w, norm=norm: norm(x, 2, w, bias).sum())(weight) for norm in (group_norm, functional.group_norm)
    )
    assert torch.equal(ours, theirs)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Conv1d(4, 2, 3))
    x = numbers(2, 2, 20)
    converted = fxamp.convert(model, dtype=torch.bfloat16, example_inputs=(x,))
    compiled = torch.compile(converted, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), converted(x))
    on_meta = fxamp.convert(model.to("meta"), dtype=torch.float16, example_inputs=(x.to("meta"),))
    (variant,) = engine_of(on_meta).all_variants()
    assert functional.group_norm in [node.target for node in variant.graph.nodes]


def test_batches_of_gradients_are_near_torchs():
    tensors = given(torch.bfloat16, length=5)
    ways = numbers(3, 2, 4, 5, dtype=torch.bfloat16, seed=3)
    ours, theirs = (
        torch.autograd.grad(norm(tensors[0], 2, *tensors[1:]), tensors, ways, is_grads_batched=True)
        for norm in (group_norm, functional.group_norm)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def test_channels_last_and_no_rows_are_taken():
    x, weight, bias = given(torch.bfloat16)
    images = x.detach().reshape(2, 4, 20, 20).contiguous(memory_format=torch.channels_last).requires_grad_()
    norm = group_norm(images, 2, weight, bias)
    assert torch.equal(norm, functional.group_norm(images, 2, weight, bias))
    (found,) = torch.autograd.grad(norm.square().sum(), images)
    (same,) = torch.autograd.grad(group_norm(x, 2, weight, bias).square().sum(), x)
    torch.testing.assert_close(found.reshape(x.shape), same, rtol=0.05, atol=0.05)
    group_norm(x[:0], 2, weight, bias).sum().backward()
    assert not weight.grad.any()
