"""Memory whose views are kept: nobody may hold what lies in it when its bytes are gone."""

import copy
import functools
import importlib

import pytest
import torch

from fxamp import recorded
from fxamp.runtime import LossScaler, MasterWeightOptimizer, device_skip, layouts
from fxamp.runtime.layouts import Layouts
from fxamp.runtime.snapshot import LAYOUTS
from fxamp.runtime.stand_ins import ELEMENTWISE

BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = ((4, 3), (3, 5), (2, 2))


def made(kind, dtypes=(BF16,), shapes=SHAPES):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for dtype in dtypes for shape in shapes]
    return weights, MasterWeightOptimizer(kind(weights, lr=0.1))


def train(weights, optimizer, steps=3, form=torch.contiguous_format, scaler=None):
    scaler = scaler or LossScaler(8.0)
    scaler.scale(torch.zeros(()))
    for step in range(steps):
        torch.manual_seed(step)
        for weight in weights:
            weight.grad = torch.randn(weight.shape).to(weight.dtype).to(memory_format=form)
        scaler.step(optimizer)
        scaler.update()


def storages(optimizer):
    pieces = [piece for kept in optimizer._layouts._of.values() for piece in kept]
    assert pieces
    return {piece.flat.untyped_storage()._cdata for piece in pieces}


def state_of(weights, optimizer):
    masters = list(optimizer.master_params())
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return [*weights, *masters, *states]


DENSE = [kind for kind in ELEMENTWISE if kind is not torch.optim.SparseAdam]


@pytest.mark.parametrize("kind", DENSE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_no_optimizer_of_torch_keeps_the_gradients_it_is_lent(kind, as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(device_skip, "LOOKS_AT_HOST_FLAGS", not as_on_a_gpu)
    weights, optimizer = made(kind)
    expected, reference = made(kind)
    reference._layouts = None
    train(weights, optimizer, 1)
    pieces = [piece for kept in optimizer._layouts._of.values() for piece in kept]
    train(weights, optimizer, 3)
    train(expected, reference, 1)
    train(expected, reference, 3)
    assert pieces == [piece for kept in optimizer._layouts._of.values() for piece in kept]
    assert not any(piece.is_left for piece in pieces)
    lent = storages(optimizer)
    assert optimizer._layouts.held_bytes == 0
    found = state_of(weights, optimizer)
    assert all(tensor.untyped_storage()._cdata not in lent for tensor in found)
    assert all(map(torch.equal, found, state_of(expected, reference)))
    assert all(weight.grad.untyped_storage().nbytes() for weight in weights)


@pytest.mark.parametrize("dtypes", [(BF16, FP16), (BF16, torch.float32), (FP16, BF16, torch.float32)])
def test_a_bucket_of_several_dtypes(dtypes):
    weights, optimizer = made(torch.optim.AdamW, dtypes)
    expected, reference = made(torch.optim.AdamW, dtypes)
    reference._layouts = None
    train(weights, optimizer)
    train(expected, reference)
    assert all(map(torch.equal, state_of(weights, optimizer), state_of(expected, reference)))
    assert optimizer._layouts.held_bytes == 0


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_with_strides_lie_beside_those_without(fused):
    shapes = ((2, 3, 4, 5), (6,), (3, 2, 4, 4))

    def kind(weights, lr):
        return torch.optim.AdamW(weights, lr, fused=fused)

    results = []
    for has_layouts in (True, False):
        weights, optimizer = made(kind, shapes=shapes)
        for weight in (weights[0], weights[2]):
            weight.data = weight.data.to(memory_format=torch.channels_last)
        if not has_layouts:
            optimizer._layouts = None
        scaler = LossScaler(8.0)
        scaler.scale(torch.zeros(()))
        for step in range(3):
            torch.manual_seed(step)
            for weight in weights:
                gradient = torch.randn(weight.shape).to(BF16)
                is_image = weight.dim() == 4
                weight.grad = gradient.to(memory_format=torch.channels_last) if is_image else gradient
            scaler.step(optimizer)
            scaler.update()
        results.append(state_of(weights, optimizer))
    assert all(map(torch.equal, *results))


def test_a_step_that_fails_gives_the_bytes_back(monkeypatch):
    weights, optimizer = made(torch.optim.SGD)
    train(weights, optimizer, 1)

    def failing(*_, **__):
        raise ValueError("no")

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="no"):
        patch.setattr(importlib.import_module("torch.optim.sgd"), "sgd", failing)
        train(weights, optimizer, 1)
    assert optimizer._layouts.held_bytes == 0
    train(weights, optimizer, 1)


class Keeping(torch.optim.SGD):
    """It holds on to the gradients that it has seen."""

    def step(self, closure=None):
        kept = [p.grad for group in self.param_groups for p in group["params"]]
        self.seen = [*getattr(self, "seen", ()), *kept]
        return super().step(closure)


def test_another_packages_optimizer_may_keep_gradients():
    weights, optimizer = made(Keeping)
    train(weights, optimizer)
    assert len(optimizer.optimizer.seen) == 3 * len(SHAPES)
    assert all(gradient.untyped_storage().nbytes() for gradient in optimizer.optimizer.seen)
    assert not optimizer._layouts._of


@pytest.mark.parametrize("keeps", [lambda grad: grad, lambda grad: grad.view(-1), lambda grad: (grad, grad.detach())])
def test_who_keeps_a_gradient_that_was_lent_keeps_its_numbers(keeps, monkeypatch):
    """A patched function of torch's own optimizer: its memory is not taken away under a reader."""
    module, seen, expected = importlib.import_module("torch.optim.sgd"), [], []
    plain = module.sgd

    def watching(params, grads, *rest, **options):
        seen.append([keeps(grad) for grad in grads])
        expected.append([grad.clone() for grad in grads])
        return plain(params, grads, *rest, **options)

    monkeypatch.setattr(module, "sgd", watching)
    weights, optimizer = made(torch.optim.SGD)
    train(weights, optimizer)
    for found, wanted in zip(seen, expected, strict=True):
        for one, other in zip(found, wanted, strict=True):
            for each in one if isinstance(one, tuple) else (one,):
                assert torch.equal(each.reshape(other.shape), other)
    assert optimizer._layouts.held_bytes == 0


def test_a_copy_of_an_optimizer_has_its_own(monkeypatch):
    monkeypatch.setattr(device_skip, "LOOKS_AT_HOST_FLAGS", False)
    weights, optimizer = made(torch.optim.AdamW)
    train(weights, optimizer)
    twin = copy.deepcopy(optimizer)
    assert optimizer._layouts._of and not twin._layouts._of
    assert LAYOUTS not in vars(twin.optimizer) and LAYOUTS in vars(optimizer.optimizer)
    assert not copy.deepcopy(vars(optimizer.optimizer)[LAYOUTS])._of


def test_a_graph_that_is_recorded_has_memory_of_its_own(monkeypatch):
    """What lies in it is read at each replay: nobody else's copies may come to lie there."""
    monkeypatch.setattr(device_skip, "LOOKS_AT_HOST_FLAGS", False)
    weights, optimizer = made(functools.partial(torch.optim.SGD, momentum=0.9))
    expected, reference = made(functools.partial(torch.optim.SGD, momentum=0.9))
    train(weights, optimizer, 1)  # which makes the state
    train(expected, reference, 1)
    optimizer._layouts._of.clear()
    del vars(optimizer.optimizer)[LAYOUTS]
    with monkeypatch.context() as patch:
        patch.setattr(recorded, "is_capturing", lambda device: True)
        train(weights, optimizer, 2)
    train(expected, reference, 2)
    assert not optimizer._layouts._of and LAYOUTS not in vars(optimizer.optimizer)
    assert reference._layouts._of and all(map(torch.equal, weights, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16, torch.bool, torch.complex64])
def test_copies_begin_where_kernels_read_four_numbers_at_a_time(dtype):
    """Of 1 and 3 numbers in a row the second would begin in the middle of 16 bytes."""
    tensors = [torch.ones(shape).to(dtype) for shape in ((), (3,), (0, 4), (2, 5), (1,))]
    (piece,) = Layouts().of("before", tensors, dtype)
    piece.fill(tensors)
    assert all((view.data_ptr() - piece.flat.data_ptr()) % 64 == 0 for view in piece.views)
    assert all(map(torch.equal, piece.views, tensors))


def test_pieces_are_few(monkeypatch):
    """Each costs a few launches: of much, a piece is an eighth."""
    monkeypatch.setattr(layouts, "CHUNK_BYTES", 64)
    pieces = Layouts().of("before", [torch.ones(16) for _ in range(100)], torch.float32)
    assert 8 <= len(pieces) <= 9
    assert [place for piece in pieces for place in range(piece.part.start, piece.part.stop)] == list(range(100))


def test_pieces_that_are_filled_are_not_given_again():
    made_once, tensors = Layouts(), [torch.ones(3), torch.ones(2)]
    (first,) = made_once.of("wide", tensors, torch.float32)
    first.fill(tensors)
    (second,) = made_once.of("wide", tensors, torch.float32)
    assert second is not first and second.flat.data_ptr() != first.flat.data_ptr()
    first.free()
    assert made_once.of("wide", tensors, torch.float32) == [first] and made_once.held_bytes == 0
