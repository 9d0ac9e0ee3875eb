"""`n += 1` of what is no tensor makes a new value, and whoever holds the old one keeps it."""

import pytest
import torch
from torch import nn

import fxamp


def running_offsets(m, y, tables):
    total, offsets = 0, []
    for table in tables:
        offsets.append(total)
        total += table.shape[0]
    return torch.stack([y[offset] for offset in offsets]) * total


def half(m, y, tables):
    count = y.size(0) * 1.0
    other = count
    other /= 2
    return y * count + other


def of_a_module(m, y, tables):
    scale = m.scale
    other = scale
    other *= 2
    return y * scale - y * y * other


def longer_shape(m, y, tables):
    lead = y.size()[:-1]
    full = lead
    full += (2, 4)
    return y.view(full).flatten(1) * y.sum(-1).view(lead)[:, None]


def window(m, y, tables):
    width, parts = y.shape[0] // 3, []
    start = width * 0
    for _ in range(3):
        end = start
        end += width
        parts.append(y[start:end] * (end - start))
        start = end
    return torch.cat(parts)


def in_place_on_a_tensor(m, y, tables):
    other = y * 2.0
    held = other
    other += 1.0
    return held + y


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.function, self.scale = nn.Linear(8, 8), function, 1.0

    def forward(self, x, *tables):
        return self.function(self, self.fc(x), tables)


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize(
    "function",
    [running_offsets, half, of_a_module, longer_shape, window, in_place_on_a_tensor],
    ids=lambda f: f.__name__,
)
def test_who_holds_the_old_number_keeps_it(function, capture):
    torch._dynamo.reset()
    model = Model(function)
    x, tables = torch.randn(9, 8), [torch.zeros(size) for size in (2, 3, 2)]
    converted = fxamp.convert(model, torch.bfloat16, (x, *tables), capture=capture)
    for call in range(3):
        model.scale = converted.scale = 1.0 + call
        torch.testing.assert_close(converted(x, *tables), model(x, *tables), rtol=0.05, atol=0.05)
