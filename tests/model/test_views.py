"""A converted model, and what is captured, hold the user's own objects: nothing of theirs is copied."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import fxamp

LOW = torch.bfloat16
X = torch.linspace(0.5, 1.5, 16).reshape(2, 8)


class FrozenDict(OrderedDict):
    """As diffusers keeps a configuration: entries are attributes too, which copy() would lose."""

    def __init__(self, **entries):
        super().__init__(entries)
        for name, value in entries.items():
            setattr(self, name, value)


class OfAPath(dict):
    def __init__(self, path):
        super().__init__(scale=2.0)
        self.path = path

    def copy(self):
        raise TypeError("no copies")


class Model(nn.Module):
    def __init__(self, name, config, read):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.name, self.read = name, read
        setattr(self, name, config)

    def forward(self, x):
        return self.linear(x) * self.read(getattr(self, self.name))


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("name", ["config", "_config", "_internal_dict"])
@pytest.mark.parametrize(
    ("config", "read"),
    [
        ({"scale": 2.0}, lambda held: held["scale"]),
        (FrozenDict(scale=2.0), lambda held: held.scale),
        (OfAPath("a"), lambda held: held["scale"]),
    ],
)
def test_dictionaries_of_the_users_are_theirs(name, config, read, capture):
    model = Model(name, config, read)
    converted = fxamp.convert(model, LOW, capture=capture)
    assert getattr(converted, name) is config
    torch.testing.assert_close(converted(X), model(X), atol=0.05, rtol=0.02)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["config", "_config"])
def test_a_dictionary_that_training_code_changes_is_followed(name):
    config = {"scale": 2.0}
    model = Model(name, config, lambda held: held["scale"])
    converted = fxamp.convert(model, LOW)
    first = converted(X)
    config["scale"] = 20.0
    torch.testing.assert_close(converted(X), 10 * first, atol=0.0, rtol=0.02)


def test_children_and_hooks_of_the_converted_model_are_its_own():
    model = Model("config", {"scale": 1.0}, lambda held: held["scale"])
    converted = fxamp.convert(model, LOW)
    calls = []
    converted.register_forward_hook(lambda *_: calls.append(1))
    converted.linear = nn.Identity()
    model(X)
    assert not calls and isinstance(model.linear, nn.Linear)
    converted(X)
    assert calls == [1]
