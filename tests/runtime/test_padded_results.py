"""cast_of_part is indexing and a cast, in every way autograd can be asked, and moves less in backward."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from fxamp.runtime.padded_results import cast_of_part
from tests.runtime.test_packed_weights import Ops

CASES = {
    "last": ((3, 16), -1, 7),
    "middle": ((2, 8, 5), -2, 3),
    "first": ((8,), -1, 1),
    "channels": ((2, 8, 3, 3), -3, 5),
    "no rows": ((0, 8), -1, 2),
    "nothing of its own": ((2, 8), -1, 8),
}
EACH_CASE = pytest.mark.parametrize(("shape", "dim", "extra"), CASES.values(), ids=CASES)


def plain(padded, dim, extra, dtype):
    return padded.narrow(dim, 0, padded.size(dim) - extra).to(dtype)


def numbers(shape, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@EACH_CASE
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_values_strides_and_gradients_are_those_of_indexing_and_a_cast(shape, dim, extra, low):
    padded = numbers(shape, low).requires_grad_()
    results = [function(padded, dim, extra, torch.float32) for function in (cast_of_part, plain)]
    assert torch.equal(*results) and results[0].stride() == results[1].stride()
    weight = numbers(results[0].shape, torch.float32)
    ours, theirs = (torch.autograd.grad(result, padded, weight)[0] for result in results)
    assert torch.equal(ours, theirs) and ours.dtype == low and ours.stride() == padded.stride()


def test_a_gradient_that_is_expanded_or_transposed_lands_where_it_belongs():
    padded = numbers((4, 8)).requires_grad_()
    for of in (lambda y: y.sum(), lambda y: (y.t() * numbers((5, 4), torch.float32)).sum()):
        ours, theirs = (
            torch.autograd.grad(of(function(padded, -1, 3, torch.float32)), padded)[0]
            for function in (cast_of_part, plain)
        )
        assert torch.equal(ours, theirs)


def test_a_value_that_is_laid_out_otherwise():
    channels_last = numbers((2, 8, 3, 3)).to(memory_format=torch.channels_last).requires_grad_()
    expanded = numbers((1, 8)).requires_grad_()
    for padded, seen, dim in ((channels_last, channels_last, -3), (expanded, expanded.expand(3, 8), -1)):
        ours, theirs = (
            torch.autograd.grad(function(seen, dim, 3, torch.float32).square().sum(), padded, retain_graph=True)[0]
            for function in (cast_of_part, plain)
        )
        assert torch.equal(ours, theirs)


def test_backward_converts_into_the_padded_gradient():
    padded = numbers((4, 16)).requires_grad_()
    result = cast_of_part(padded, -1, 7, torch.float32)
    with Ops() as ops:
        result.backward(torch.ones_like(result))
    assert [name for name in ops.names if name in ("_to_copy", "copy_", "slice_backward", "zero_")] == [
        "copy_",
        "zero_",
    ]


def test_without_a_gradient_it_is_no_function_of_autograd():
    padded = numbers((4, 16))
    assert not cast_of_part(padded, -1, 7, torch.float32).requires_grad
    with torch.no_grad():
        assert cast_of_part(padded.requires_grad_(), -1, 7, torch.float32).grad_fn is None
    assert cast_of_part(padded, -1, 7, torch.float32).requires_grad


def test_second_derivatives_and_batches_of_gradients():
    padded = numbers((4, 8)).requires_grad_()
    found = []
    for function in (cast_of_part, plain):
        result = function(padded, -1, 3, torch.float32)
        (first,) = torch.autograd.grad(result.pow(3).sum(), padded, create_graph=True)
        (second,) = torch.autograd.grad(first.float().square().sum(), padded)
        (batch,) = torch.autograd.grad(result, padded, torch.eye(20).view(20, 4, 5), is_grads_batched=True)
        found.append((first, second, batch))
    assert all(map(torch.equal, *found)) and found[0][1].any()


def test_functorch_and_forward_mode():
    padded = numbers((4, 8))
    for function in (cast_of_part, plain):
        of_one = lambda row, function=function: function(row, -1, 3, torch.float32).square().sum()  # noqa: E731
        mapped = vmap(grad(of_one))(padded)
        assert torch.equal(mapped[:, :5], (2 * padded.float()).to(torch.bfloat16)[:, :5]) and not mapped[:, 5:].any()
        _, tangent = jvp(of_one, (padded[0],), (torch.ones_like(padded[0]),))
        assert tangent == 2 * padded[0, :5].float().sum()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(padded.requires_grad_(), torch.ones_like(padded))
        tangent = forward_ad.unpack_dual(cast_of_part(dual, -1, 3, torch.float32)).tangent
    assert torch.equal(tangent, torch.ones(4, 5))


def test_compiled_and_exported_it_is_plain():
    padded = numbers((4, 8)).requires_grad_()
    of = lambda x: cast_of_part(x, -1, 3, torch.float32).square().sum()  # noqa: E731
    compiled = torch.compile(of, backend="aot_eager", fullgraph=True)
    ours, theirs = (
        torch.autograd.grad(result, padded)[0]
        for result in (compiled(padded), plain(padded, -1, 3, torch.float32).square().sum())
    )
    assert torch.equal(ours, theirs)
