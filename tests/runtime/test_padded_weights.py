"""Copies of weights that grow while they are made are those of a cast and a pad, and so are their gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import fxamp
from fxamp.runtime.packed_weights import KeptCast, packed_cast
from fxamp.runtime.padded_weights import grown, make_room, own_part
from tests.runtime.test_packed_weights import LOW, Ops

BF16 = torch.bfloat16


@st.composite
def weights_and_growths(draw):
    """A weight of one to four dimensions in some layout, and how it grows (None: it does not)."""
    blocks = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    shape = [count * draw(st.integers(1, 4)) for count in blocks]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    layout = draw(st.sampled_from(["contiguous", "transposed", "channels last", "part"]))
    if layout == "transposed" and len(shape) > 1:
        weight = weight.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "channels last" and len(shape) == 4:
        weight = weight.contiguous(memory_format=torch.channels_last)
    elif layout == "part":
        weight = functional.pad(weight, (0, 1))[..., :-1]
    dims = tuple((count, draw(st.integers(0, 2))) for count in blocks)
    return weight, draw(st.sampled_from([None, (dims, 0.0), (dims, -3.0)]))


@settings(deadline=None, max_examples=150)
@given(bucket=st.lists(weights_and_growths(), min_size=1, max_size=4), low=st.sampled_from(LOW))
def test_a_bucket_is_a_cast_and_a_pad_of_each(bucket, low):
    ours, theirs = ([nn.Parameter(weight.detach()) for weight, _ in bucket] for _ in range(2))
    growths = tuple(growth for _, growth in bucket)
    copies = packed_cast(low, *ours, pads=growths)
    expected = [w.to(low) if how is None else grown(w.to(low), *how) for w, how in zip(theirs, growths, strict=True)]
    for copy, value in zip(copies, expected, strict=True):
        assert copy.dtype == low and torch.equal(copy, value)
    with torch.no_grad():
        assert all(map(torch.equal, packed_cast(low, *ours, pads=growths), expected))
    factors = [torch.randn(value.shape).to(low) for value in expected]
    torch.autograd.backward(copies, factors)
    torch.autograd.backward(expected, factors)
    for weight, reference in zip(ours, theirs, strict=True):
        assert weight.grad.dtype == torch.float32 and torch.equal(weight.grad, reference.grad)


def test_blocks_grow_one_by_one():
    gates = grown(torch.arange(6.0).view(6, 1), ((3, 1), (1, 1)), 7.0)
    assert gates[:, 0].tolist() == [0, 1, 7, 2, 3, 7, 4, 5, 7] and gates[:, 1].tolist() == [7] * 9
    assert own_part(gates, (6, 1), ((3, 1), (1, 1))).flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_rows_cost_no_kernel_of_their_own():
    weights = [nn.Parameter(torch.ones(3, 4)) for _ in range(3)]
    weights += [nn.Parameter(torch.ones(3, 4, 2, 2).to(memory_format=torch.channels_last))]
    growths = (None, (((1, 5), (1, 0)), 0.0), (((1, 1), (1, 0)), 0.0), (((1, 5), (1, 0), (1, 0), (1, 0)), 0.0))
    with Ops() as ops:
        copies = packed_cast(BF16, *weights, pads=growths)
        torch.autograd.backward(copies, [torch.ones_like(copy) for copy in copies])
    kernels = [
        name for name in ops.names if not name.startswith(("empty", "new_empty", "slice", "view", "detach", "ones"))
    ]
    assert kernels == ["_foreach_zero_", "_foreach_copy_", "_foreach_copy_"]


def test_columns_cost_a_fill_of_the_border_and_a_copy():
    weight = nn.Parameter(torch.ones(3, 4))
    with Ops() as ops:
        (copy,) = packed_cast(BF16, weight, pads=((((1, 0), (1, 4)), 0.0),))
        copy.backward(torch.ones_like(copy))
    assert [name for name in ops.names if name in ("fill_", "copy_", "_to_copy")] == ["fill_", "copy_", "_to_copy"]


def test_a_gradient_of_a_gradient():
    weight = nn.Parameter(torch.full((3, 2), 2.0, dtype=torch.float64))
    (copy,) = packed_cast(torch.float32, weight, pads=((((3, 1), (1, 1)), 0.0),))
    (first,) = torch.autograd.grad(copy.pow(3).sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    assert torch.equal(first.detach(), torch.full((3, 2), 12.0, dtype=torch.float64))
    assert torch.equal(second, torch.full((3, 2), 12.0, dtype=torch.float64))


@pytest.mark.parametrize("how", ["vmap", "forward mode", "compile"])
def test_where_casts_are_plain(how):
    growths = ((((1, 1), (1, 1)), 0.0), None)
    weights = torch.randn(2, 3), torch.randn(2)
    copies = lambda a, b: packed_cast(BF16, a, b, pads=growths)  # noqa: E731
    if how == "vmap":
        found = torch.func.vmap(copies)(*[torch.stack([weight] * 2) for weight in weights])
        found = tuple(value[1] for value in found)
    elif how == "forward mode":
        found, tangents = torch.func.jvp(copies, weights, weights)
        assert all(map(torch.equal, tangents, found))
    else:
        found = torch.compile(copies, fullgraph=True, backend="eager")(*weights)
    assert all(map(torch.equal, found, copies(*weights)))


def test_kept_copies_are_grown():
    kept, weight = KeptCast(0), torch.ones(2, 3)
    with torch.no_grad():
        first, again = (kept(BF16, weight, pads=((((1, 1), (1, 1)), 0.0),))[0] for _ in range(2))
        assert first is again and first.shape == (3, 4) and first.sum() == 6
        weight.add_(1)
        assert kept(BF16, weight, pads=((((1, 1), (1, 1)), 0.0),))[0].sum() == 12


# ------------------------------------------------------------------------ weights that are stored low, with room

ROWS = (((1, 3), (1, 0)), 0.0)


def roomy(rows: int = 5, columns: int = 4) -> nn.Parameter:
    weight = nn.Parameter(torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(BF16))
    make_room(weight, 8)
    return weight


def test_a_weight_with_room_is_not_copied():
    weight = roomy()
    assert weight.shape == (5, 4) and weight.is_contiguous()
    with Ops() as ops:
        (copy,) = packed_cast(BF16, weight, pads=(ROWS,))
    assert set(ops.names) <= {"as_strided", "detach"}
    assert torch.equal(copy[:5], weight) and copy.shape == (8, 4) and not copy[5:].any()
    copy.backward(torch.ones_like(copy))
    assert torch.equal(weight.grad, torch.ones(5, 4, dtype=BF16))


def test_writes_are_seen_and_an_update_between_forward_and_backward_is_an_error():
    weight = roomy()
    (copy,) = packed_cast(BF16, weight, pads=(ROWS,))
    loss = (copy * copy).sum()
    with torch.no_grad():
        weight.fill_(3)
        assert packed_cast(BF16, weight, pads=(ROWS,))[0].sum() == 60
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        loss.backward()


@pytest.mark.parametrize(
    "how", ["other memory", "a part of other memory", "a part of its own", "too little room", "another number"]
)
def test_where_there_is_no_room_a_copy_is_made(how):
    weight, growth = roomy(), ROWS
    if how == "other memory":
        weight.data = weight.detach().clone()
    elif how == "a part of other memory":
        weight.data = torch.full((8, 4), 9.0, dtype=BF16)[:5]
    elif how == "a part of its own":
        weight.data = weight.data[1:]
        growth = (((1, 4), (1, 0)), 0.0)
    elif how == "too little room":
        growth = (((1, 11), (1, 0)), 0.0)
    else:
        growth = (ROWS[0], 1.0)
    (copy,) = packed_cast(BF16, weight, pads=(growth,))
    assert copy.data_ptr() != weight.data_ptr()
    assert torch.equal(copy, grown(weight, *growth))


def test_only_whole_rows_of_dense_weights_get_room():
    transposed = nn.Parameter(torch.ones(4, 5, dtype=BF16).t())
    aligned, number = nn.Parameter(torch.ones(8, 2)), nn.Parameter(torch.ones(()))
    filters = nn.Parameter(torch.ones(3, 4, 2, 2).to(memory_format=torch.channels_last))
    pointers = [weight.data_ptr() for weight in (transposed, aligned, number)]
    for weight in (transposed, aligned, number, filters):
        make_room(weight, 8)
    assert [weight.data_ptr() for weight in (transposed, aligned, number)] == pointers
    growth = (((1, 5), *((1, 0),) * 3), 0.0)
    (copy,) = packed_cast(torch.float32, filters, pads=(growth,))
    assert copy.data_ptr() == filters.data_ptr()
    assert copy.is_contiguous(memory_format=torch.channels_last) and torch.equal(copy, grown(filters, *growth))


def test_a_model_that_is_moved_keeps_its_room():
    model = fxamp.convert(nn.Linear(8, 13), BF16, (torch.ones(2, 8),), "O2", pad="always")
    before = model.weight.detach()  # alive, so its memory is not given to another
    model._apply(torch.Tensor.clone)
    assert model.weight.data_ptr() != before.data_ptr()
    (copy,) = packed_cast(BF16, model.weight, pads=(ROWS,))
    assert copy.data_ptr() == model.weight.data_ptr() and not copy[13:].any()
