"""Containers that a forward reads are as they were after a conversion, whatever class they have."""

import collections

import torch
from torch import nn

import fxamp


class Makes(collections.OrderedDict):
    """A registry of classes that gives a new object each time it is asked, as transformers' ACT2FN does."""

    def __getitem__(self, key):
        kind, options = super().__getitem__(key)
        return kind(**options)


REGISTRY = Makes(gelu=(nn.GELU, {"approximate": "tanh"}), relu=(nn.ReLU, {}))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return REGISTRY["gelu"](self.fc(x))


def test_a_registry_that_makes_its_values_is_read_and_not_changed():
    before = dict(dict.items(REGISTRY))
    model, x = Reader(), torch.randn(2, 4)
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=(x,), capture="symbolic")
    assert dict(dict.items(REGISTRY)) == before and list(REGISTRY) == ["gelu", "relu"]
    assert fxamp.report(converted).low_precision_nodes > 0
    torch.testing.assert_close(converted(x), model(x), rtol=0, atol=2 * 2**-8 * float(model(x).detach().abs().max()))
