"""Values of which the data says how many there are (`y[mask]`): what is made of them is known but for their number."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp


def _gated(m, y, mask):
    a, b = m.inner(y[mask]).chunk(2, -1)
    return a * b


def _written_back(m, y, mask):
    z = torch.zeros_like(y)
    z[mask] = m.inner(y[mask]).max(1, keepdim=True).values
    return z


def _routed(m, y, mask):
    (rows,) = torch.where(mask)
    return y.index_add(0, rows, m.inner(y[rows]))


def _marked(m, y, mask):
    z = m.inner(y)
    rows, columns = zip(*torch.stack([torch.arange(len(y)), y.argmax(1)], 1), strict=True)
    z[rows, columns] = 0.5
    return z * 2, z[rows, columns]


CHOSEN = {
    "returned whole": lambda m, y, mask: m.inner(y[mask]).max(1),
    "in a dictionary": lambda m, y, mask: {"best": y[mask].topk(2), "ranges": y[mask].aminmax(dim=1)},
    "a field": lambda m, y, mask: m.inner(y[mask]).topk(2).values * 2,
    "a field of another name": lambda m, y, mask: y[mask].aminmax(dim=1).max + 1,
    "its parts": lambda m, y, mask: sum(y[mask].max(1)),
    "a property": lambda m, y, mask: m.inner(y[mask]).real * 2,
    "chunks": lambda m, y, mask: y[mask].chunk(2, 1),
    "gated": _gated,
    "written back": _written_back,
    "routed": _routed,
    "by places": lambda m, y, mask: m.inner(y)[mask.nonzero().squeeze(1)] * 2,
    "by tuples of places": _marked,
    "by two places": lambda m, y, mask: y[(y > 0).nonzero(as_tuple=True)] + 1,
    "selected": lambda m, y, mask: (y.masked_select(mask[:, None]) + 1).sort(),
    "of two dimensions": lambda m, y, mask: m.inner(y.view(2, 3, 8)[mask.view(2, 3)]).sort(),
    "unique": lambda m, y, mask: torch.unique(y[mask].round(), return_inverse=True)[0],
    "unique as it is": lambda m, y, mask: torch.unique(y[mask].round(), return_inverse=True),
    "pooled": lambda m, y, mask: F.max_pool1d(y[mask], 2, return_indices=True),
}


class Choosing(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x):
        return self.function(self, self.fc(x), x.sum(1) > 0)


def _described(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape
    return type(value), [_described(each) for each in (value.values() if isinstance(value, dict) else value)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CHOSEN)
def test_results_are_what_the_model_gives(name, dtype):
    model = Choosing(CHOSEN[name])
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    converted = fxamp.convert(copy.deepcopy(model), dtype=dtype, capture="symbolic", example_inputs=(x,))
    for given in (x, -x):
        assert _described(converted(given)) == _described(model(given))
    report = fxamp.report(converted)
    assert report.low_precision_nodes and report.captures == ("symbolic",)


@pytest.mark.parametrize("name", ["gated", "written back", "routed"])
def test_o2_takes_them(name):
    model = Choosing(CHOSEN[name])
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    converted = fxamp.convert(copy.deepcopy(model), dtype=torch.bfloat16, opt_level="O2", example_inputs=(x,))
    model(x).sum().backward()
    converted(x).sum().backward()
    for parameter, other in zip(model.parameters(), converted.parameters(), strict=True):
        torch.testing.assert_close(other.grad.float(), parameter.grad, rtol=0.05, atol=0.05)
