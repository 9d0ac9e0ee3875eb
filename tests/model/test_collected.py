"""A module that is converted inside of a model of transformers, which collects what its layers give."""

import sys
import types

import pytest
import torch
from torch import nn

import fxamp
from fxamp.model.engine import engine_of

NAME = "transformers.utils.output_capturing"


class Collector:
    """As transformers' own: what a running forward collects into, if it does."""

    def __init__(self):
        self.value = None

    def get(self):
        return self.value


@pytest.fixture
def collector(monkeypatch):
    module = types.ModuleType(NAME)
    module._active_collector = Collector()
    monkeypatch.setitem(sys.modules, NAME, module)
    return module._active_collector


def collecting_hook(collector):
    def hook(module, args, output):
        if collector.get():
            collector.get()["states"].append(output)

    hook.__module__ = NAME
    return hook


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    "options", [{}, {"opt_level": "O2"}, {"opt_level": "O3"}, {"boundaries": ["layers.1"]}], ids=str
)
def test_each_call_that_is_collected_from_gives_what_is_collected(collector, options):
    torch.manual_seed(0)
    encoder, x = Encoder(), torch.randn(4, 8)
    for layer in encoder.layers:
        layer.register_forward_hook(collecting_hook(collector))
    expected = encoder(x)
    converted = fxamp.convert(encoder, torch.bfloat16, **options)
    for collects in (False, True, True, False, True):
        collector.value = {"states": []} if collects else None
        found = converted(x)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
        states = [] if collector.value is None else collector.value["states"]
        assert len(states) == 3 * collects
        assert all(isinstance(state, torch.Tensor) and not isinstance(state, torch.fx.Proxy) for state in states)
        if states:
            torch.testing.assert_close(states[-1].float(), found.float(), rtol=0, atol=0)
        found.sum().backward()


def test_symbolic_capture_refuses_such_a_call_and_takes_others(collector):
    encoder, x = Encoder(), torch.randn(4, 8)
    encoder.layers[0].register_forward_hook(collecting_hook(collector))
    converted = fxamp.convert(encoder, torch.bfloat16, capture="symbolic")
    converted(x)
    collector.value = {"states": []}
    with pytest.raises(fxamp.CaptureError, match="collects hidden states"):
        converted(x)
    collector.value = {}  # a forward that collects nothing
    converted(x)
    assert len(engine_of(converted).all_variants()) == 1
