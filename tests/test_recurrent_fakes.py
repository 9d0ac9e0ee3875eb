"""Recurrent layers on fake tensors of a GPU: sizes as torch gives them, and cuDNN is not asked."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxamp
from fxamp import fakes, recurrent_fakes
from fxamp.recurrent_fakes import SEQUENCES, like_recurrent, without_cudnn

LAYERS = {
    "lstm": (nn.LSTM, {}),
    "deep": (nn.LSTM, {"num_layers": 3, "bidirectional": True}),
    "projected": (nn.LSTM, {"proj_size": 2, "num_layers": 2}),
    "without biases": (nn.LSTM, {"bias": False}),
    "gru": (nn.GRU, {"bidirectional": True}),
    "tanh": (nn.RNN, {"num_layers": 2}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}


def kinds(values):
    return [(value.shape, value.dtype, value.requires_grad, value.is_leaf) for value in values]


@contextlib.contextmanager
def calls_of(op):
    """The arguments of each call of one of torch's recurrent layers, and what it gave."""
    seen = []
    real = getattr(torch._VF, op)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._VF, op, lambda *args: seen.append((args, real(*args))) or seen[-1][1])
        yield seen


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("layer, options", LAYERS.values(), ids=LAYERS)
def test_the_kinds_are_those_of_a_run(layer, options, is_packed, batch_first, is_trained):
    module = layer(4, 6, batch_first=batch_first, **options)
    x = torch.randn(3, 5, 4)
    if is_packed:
        x = pack_padded_sequence(x, [5, 4, 3] if batch_first else [3, 2, 2, 1, 1], batch_first=batch_first)
    with calls_of(module.mode.lower()) as seen, torch.set_grad_enabled(is_trained):
        module(x)
        ((args, given),) = seen
        assert kinds(like_recurrent(*args)) == kinds(given)


def test_a_recurrent_layer_that_is_frozen_gives_no_gradients():
    args = (torch.ones(2, 3, 4), torch.zeros(1, 3, 6), [torch.ones(18, 4), torch.ones(18, 6)])
    assert not any(value.requires_grad for value in like_recurrent(*args, False, 1, 0.0, True, False, False))


class Net(nn.Module):
    def __init__(self, cell, is_packed):
        super().__init__()
        self.cell, self.head, self.is_packed = cell(8, 8, batch_first=True), nn.Linear(8, 8), is_packed

    def forward(self, x):
        if not self.is_packed:
            return self.head(self.cell(x)[0])
        packed = pack_padded_sequence(x, [4, 3], batch_first=True)
        return self.head(pad_packed_sequence(self.cell(packed)[0], batch_first=True)[0])


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_on_another_device_torchs_own_layers_are_not_run_on_fakes(cell, is_packed, monkeypatch):
    """The meta device stands for a GPU."""
    seen = []
    monkeypatch.setattr(fakes, "like_recurrent", lambda *args: seen.append(args[0].device) or like_recurrent(*args))
    with torch.device("meta"):
        model, x = Net(cell, is_packed), torch.empty(2, 4, 8)
    report = fxamp.report(fxamp.convert(model, torch.float16, (x,)))
    assert {device.type for device in seen} == (set() if is_packed else {"meta"})
    (row,) = [row for row in report.rows if row.op in ("lstm", "gru", "rnn_tanh")]
    assert row.precision == "low" and {row.precision for row in report.rows if row.op == "linear"} == {"low"}


@pytest.mark.parametrize("op", SEQUENCES, ids=lambda op: op.__name__)
def test_only_other_devices_ask(op):
    assert not recurrent_fakes.asks_cudnn(op, (torch.ones(1),))
    assert recurrent_fakes.asks_cudnn(op, (torch.ones(1, device="meta"),))
    assert not recurrent_fakes.asks_cudnn(torch.add, (torch.ones(1, device="meta"),))


def test_cudnn_is_off_for_layers_that_are_run_whole():
    assert torch.backends.cudnn.enabled
    with without_cudnn(nn.Sequential(nn.LSTM(2, 2))):
        assert not torch.backends.cudnn.enabled
    with without_cudnn(nn.Sequential(nn.Linear(2, 2))):
        assert torch.backends.cudnn.enabled
    with pytest.raises(KeyError), without_cudnn(nn.GRU(2, 2)):
        raise KeyError
    assert torch.backends.cudnn.enabled


def test_a_layer_with_hooks_is_run_without_cudnn_on_fakes(monkeypatch):
    seen = []
    module = Net(nn.LSTM, False)
    module.cell.register_forward_hook(lambda *_: None)
    real = torch._VF.lstm
    monkeypatch.setattr(torch._VF, "lstm", lambda *args: seen.append(is_fake(args[0])) or real(*args))
    fxamp.convert(module, example_inputs=(torch.ones(2, 4, 8),))
    assert (True, False) in seen and (True, True) not in seen


def is_fake(value):
    return isinstance(value, fakes.FakeTensor), torch.backends.cudnn.enabled
