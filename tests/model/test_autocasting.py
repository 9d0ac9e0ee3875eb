"""Calls of inference at O2 that no graph holds: as torch.autocast runs them, on low weights."""

import copy

import pytest
import torch
from torch import nn

import fxamp


class Memory:
    """What a graph cannot take: an object that holds what an earlier call computed."""

    def __init__(self, value):
        self.value = value


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 8), norm, nn.Linear(8, 8)

    def forward(self, x, memory=None):
        y = self.up(x)
        return self.down(self.norm(y if memory is None else y + memory.value))


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(8), nn.LayerNorm((4, 8)), nn.RMSNorm((4, 8)), nn.BatchNorm1d(4)], ids=str
)
def test_norms_of_any_shape_take_such_a_call(norm):
    torch.manual_seed(0)
    model, x, memory = Net(norm).eval(), torch.randn(2, 4, 8), Memory(torch.randn(2, 4, 8))
    plain = copy.deepcopy(model)
    converted = fxamp.convert(model, torch.bfloat16, (x,), opt_level="O2")
    stored = {name: weight.dtype for name, weight in converted.named_parameters()}
    with torch.no_grad():
        expected, found = plain(x, memory), converted(x, memory)
        with torch.autocast("cpu", torch.bfloat16):
            autocast = plain(x, memory)
    assert found.dtype == torch.float32 and not torch.equal(found, expected)
    assert (found - expected).norm() <= 1.5 * (autocast - expected).norm()
    assert {name: weight.dtype for name, weight in converted.named_parameters()} == stored
    with pytest.raises(fxamp.FxampError):
        converted(x, memory)
