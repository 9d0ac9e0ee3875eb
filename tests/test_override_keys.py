"""Which override holds, and what those of a model are for a part of it."""

import pytest
from torch import nn

from fxamp.override_keys import around, override_of, overrides_within


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.mlp = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())


MODULES = ["", "enc", "enc.a", "enc.a.fc", "enc.a.mlp", "enc.a.mlp.0", "enc.a.mlp.1", "enc.b"]


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ({}, {}),
        ({"enc.b": "deny"}, {}),
        ({"enc.a": "deny"}, {"*": "deny", "fc": "deny", "mlp": "deny", "mlp.0": "deny", "mlp.1": "deny"}),
        (
            {"enc": "deny", "enc.a.mlp": "allow"},
            {"*": "deny", "fc": "deny", "mlp": "allow", "mlp.0": "allow", "mlp.1": "allow"},
        ),
        ({"*.mlp": "deny"}, {"mlp": "deny", "mlp.0": "deny", "mlp.1": "deny"}),
        (
            {"enc.a": "allow", "*.fc": "deny"},
            {"*": "allow", "fc": "allow", "mlp": "allow", "mlp.0": "allow", "mlp.1": "allow"},
        ),
        ({"linear_1": "deny", "linear*": "allow"}, {"linear_1": "deny", "linear*": "allow"}),
        ({"fc": "deny"}, {}),  # a node's name, which is a module's in here
    ],
    ids=str,
)
def test_those_of_a_part(overrides, expected):
    assert overrides_within(Part(), "enc.a", overrides, MODULES) == expected


@pytest.mark.parametrize(
    "name, overrides, key",
    [
        ("exp", {"exp": "allow", "a.b": "deny"}, "exp"),
        ("exp", {"a": "allow", "a.b": "deny"}, "a.b"),
        ("exp", {"*": "allow", "a": "deny"}, "a"),
        ("exp", {"e*": "allow", "a*": "deny"}, "e*"),
        ("", {"e*": "allow"}, None),
        ("exp", {"b": "deny"}, None),
    ],
)
def test_names_go_before_modules_and_these_before_globs(name, overrides, key):
    assert override_of(list(around("a.b")), name, overrides) == key
