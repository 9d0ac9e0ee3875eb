"""The low weights of a recurrent call lie in one piece of memory, where the device's kernels ask for that.

No CPU has such kernels. Here cuDNN's part is played by `layout`: all weights, then all biases, with a gap between; the
last test asks cuDNN itself.
"""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxamp
from fxamp.model.engine import engine_of
from fxamp.passes.pack import PackWeights
from fxamp.runtime import recurrent_memory
from fxamp.runtime.packed_weights import packed_cast

GAP = 3


class Recurrent(nn.Module):
    def __init__(self, cell=nn.LSTM, size=6, hidden=10, **options):
        super().__init__()
        self.cell = cell(size, hidden, batch_first=True, **options)
        self.head = nn.Linear((options.get("proj_size") or hidden) * (1 + self.cell.bidirectional), 3)

    def forward(self, x):
        return self.head(self.cell(x)[0])


class Packed(Recurrent):
    def forward(self, x):
        packed = pack_padded_sequence(x, [4, 3], batch_first=True)
        return self.head(pad_packed_sequence(self.cell(packed)[0], batch_first=True)[0])


class Twice(nn.Module):
    """One layer that is called twice, and another behind it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.GRU(6, 6, batch_first=True), nn.GRU(6, 5, batch_first=True)

    def forward(self, x):
        return self.second(self.first(self.first(x)[0])[0])[0]


def layout(call, weights):
    """Moves the weights to one piece; returns how many elements it has."""
    assert all(weight.is_contiguous() for weight in weights)
    order = sorted(range(len(weights)), key=lambda number: weights[number].dim() == 1)
    size = GAP + sum(weight.numel() for weight in weights)
    whole = torch.full((size,), torch.nan, dtype=weights[0].dtype)
    at = 0
    for number in order:
        if weights[number].dim() == 1 and not at % 2:
            at += GAP
        weights[number].set_(whole.untyped_storage(), at, weights[number].shape, weights[number].stride())
        at += weights[number].numel()
    return size + GAP


@pytest.fixture
def cudnn(monkeypatch):
    """As if the CPU were a GPU with cuDNN; gives the calls it was asked about."""
    asked = []
    monkeypatch.setattr(recurrent_memory, "_reads_whole", lambda weight: True)
    monkeypatch.setattr(recurrent_memory, "_flatten", lambda call, w: asked.append(call) or layout(call, w))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    recurrent_memory._places.cache_clear()
    yield asked
    recurrent_memory._places.cache_clear()


def weights_seen(model, x):
    """The weights of each recurrent call of a forward."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("lstm", "gru", "rnn_tanh"):
            real = getattr(torch, name)

            def call(*args, real=real):
                seen.append(next(list(value) for value in args if isinstance(value, list)))
                return real(*args)

            call.__module__ = "fxamp.counting"  # as its stand-ins, it is no function of the user's: graphs call it
            patch.setattr(torch, name, call)
        model(x)
    return seen


CASES = {
    "lstm": lambda: Recurrent(),
    "both ways": lambda: Recurrent(num_layers=2, bidirectional=True),
    "without biases": lambda: Recurrent(bias=False),
    "projected": lambda: Recurrent(proj_size=4, num_layers=2),
    "gru": lambda: Recurrent(nn.GRU, num_layers=2),
    "elman": lambda: Recurrent(nn.RNN),
    "packed": lambda: Packed(nn.LSTM, num_layers=2),
    "twice": Twice,
}


def run(model, x):
    """Output, and gradients in float32."""
    out = model(x)
    out.float().square().mean().backward()
    return out.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("pad", ["auto", "always"])
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_the_numbers_are_those_of_weights_that_lie_apart(make, pad, cudnn):
    torch.manual_seed(0)
    model, x = make(), torch.randn(2, 4, 6)
    other = copy.deepcopy(model)
    apart = run(fxamp.convert(other, example_inputs=(x,), pad=pad, dtype=torch.bfloat16), x)
    assert cudnn
    recurrent_memory._places.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent_memory, "_reads_whole", lambda weight: False)
        plain = run(fxamp.convert(model, example_inputs=(x,), pad=pad, dtype=torch.bfloat16), x)
    torch.testing.assert_close(apart, plain, rtol=0, atol=0)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("pad", ["auto", "always"])
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_the_weights_of_a_call_are_one_piece(make, pad, gradients, cudnn):
    x = torch.randn(2, 4, 6)
    model = fxamp.convert(make(), example_inputs=(x,), pad=pad, dtype=torch.bfloat16)
    with torch.set_grad_enabled(gradients):
        calls = weights_seen(model, x)
    assert calls
    for weights in calls:
        assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
        assert all(weight.is_contiguous() and not weight._is_view() for weight in weights)
        spans = sorted((weight.storage_offset(), weight.storage_offset() + weight.numel()) for weight in weights)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        whole = torch.empty(0, dtype=weights[0].dtype).set_(weights[0].untyped_storage())
        for start, end in spans:
            whole[start:end] = 0
        assert not whole.isnan().any() and not whole.any()  # nothing but zeros between them


def test_frozen_copies_are_one_piece_that_is_kept(cudnn):
    x = torch.randn(2, 4, 6)
    model = fxamp.convert(Recurrent().eval(), example_inputs=(x,), dtype=torch.bfloat16)
    model.freeze()
    with torch.no_grad():
        (first,), (second,) = weights_seen(model, x), weights_seen(model, x)
    assert len({weight.untyped_storage().data_ptr() for weight in first}) == 1
    assert [weight.data_ptr() for weight in first] == [weight.data_ptr() for weight in second]


def test_each_layout_is_asked_for_once(cudnn):
    x = torch.randn(2, 4, 6)
    model = fxamp.convert(Twice(), example_inputs=(x,), dtype=torch.bfloat16)
    for _ in range(3):
        model(x)
    assert len(cudnn) == 2


def test_a_layout_that_cudnn_has_not_leaves_the_weights_apart(cudnn, monkeypatch):
    def refuse(call, weights):
        raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(recurrent_memory, "_flatten", refuse)
    x = torch.randn(2, 4, 6)
    model = fxamp.convert(Recurrent(), example_inputs=(x,), dtype=torch.bfloat16)
    (weights,) = weights_seen(model, x)
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == len(weights)


def test_a_call_is_in_one_bucket_however_large(monkeypatch):
    monkeypatch.setattr("fxamp.pipeline.PackWeights", lambda: PackWeights(64))
    x = torch.randn(2, 4, 6)
    model = fxamp.convert(Recurrent(num_layers=2), example_inputs=(x,), dtype=torch.bfloat16)
    (variant,) = engine_of(model).all_variants()
    packed = [node for node in variant.graph.nodes if node.target is packed_cast]
    assert [len(node.args) - 1 for node in packed] == [8]  # a bucket of one is a plain cast
    assert [len(node.kwargs["recurrent"]) for node in packed] == [1]


def addresses(layer):
    return {weight.untyped_storage().data_ptr() for weight in layer.parameters()}


@pytest.mark.parametrize("pad", ["auto", "always"])
def test_weights_that_are_stored_low_are_one_piece_and_stay_so(pad, cudnn):
    torch.manual_seed(0)
    model, x = Recurrent(num_layers=2), torch.randn(2, 4, 6)
    exact = copy.deepcopy(model.state_dict())
    other = fxamp.convert(copy.deepcopy(model), example_inputs=(x,), opt_level="O2", pad=pad, dtype=torch.bfloat16)
    model = fxamp.convert(model, example_inputs=(x,), opt_level="O2", pad=pad, dtype=torch.bfloat16)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, exact[name], rtol=0, atol=0)
    for moved in (lambda: model, lambda: model.to("cpu"), model.share_memory):
        moved()
        assert len(addresses(model.cell)) == 1 and len(addresses(model.head)) == 2
    optimizers = [fxamp.MasterWeightOptimizer(torch.optim.Adam(m.parameters(), 0.1)) for m in (model, other)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent_memory, "_reads_whole", lambda weight: False)
        for _ in range(3):
            for each, optimizer in zip((model, other), optimizers, strict=True):
                each(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert len(addresses(model.cell)) == 1
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks cuDNN, which needs a GPU")
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_cudnn_finds_the_weights_in_one_piece(make, opt_level):
    torch.manual_seed(0)
    x, model = torch.randn(2, 4, 6, device="cuda"), make().cuda()
    expected = model(x)
    model = fxamp.convert(model, example_inputs=(x,), opt_level=opt_level, dtype=torch.float16)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="RNN module weights are not part of single contiguous chunk")
        found = model(x)
        found.square().mean().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-3)
