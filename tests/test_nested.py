"""A converted model inside another one that is converted: its plain forward becomes a part of the outer graph."""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

import fxamp
from fxamp.errors import OptionError

X = torch.linspace(-1, 1, 64).reshape(8, 8)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x)).exp()


class Outer(nn.Module):
    """Holds the inner model two levels down, and twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"first": inner, "again": inner})
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(self.body["first"](x))
        return self.head(self.body["again"](x))


class Deciding(Outer):
    """Only Dynamo can follow this one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return x if y.sum() > 1e9 else y


@pytest.fixture
def inner():
    torch.manual_seed(0)
    return Inner()


def both(inner: nn.Module, outer: type[Outer], **options: object) -> tuple[nn.Module, nn.Module]:
    """Outer converted around a converted inner model, and around the plain one."""
    torch.manual_seed(1)
    nested = outer(fxamp.convert(inner, dtype="bf16"))
    plain = outer(inner)
    plain.head.load_state_dict(nested.head.state_dict())
    return fxamp.convert(nested, dtype="bf16", **options), fxamp.convert(plain, dtype="bf16", **options)


@pytest.mark.parametrize("outer", [Outer, Deciding])
@pytest.mark.parametrize("example", [None, (X,)])
def test_it_is_as_if_the_inner_model_were_plain(inner, outer, example):
    nested, plain = both(inner, outer, example_inputs=example)
    assert torch.equal(nested(X), plain(X))
    found, expected = fxamp.report(nested), fxamp.report(plain)
    assert found.summary() == expected.summary()
    assert (found.captures, found.casts, found.user_casts) == (expected.captures, expected.casts, expected.user_casts)
    assert [row.module for row in found.rows] == [row.module for row in expected.rows]


def test_the_inner_model_is_named_and_keeps_its_own_conversion(inner, caplog):
    converted = fxamp.convert(inner, dtype="fp16", level="strict")
    before = converted(X)
    with caplog.at_level(logging.INFO, "fxamp"):
        outer = fxamp.convert(Outer(converted), dtype="bf16")
    assert "Outer holds converted models (body.first, body.again): in it they run as parts of it" in caplog.text
    outer(X)
    assert outer.body["first"] is converted and torch.equal(converted(X), before)
    assert fxamp.report(converted).low_dtype == "float16"


@pytest.mark.parametrize("outer", [Outer, Deciding])
def test_gradients_and_state_are_those_of_the_plain_model(inner, outer):
    nested, plain = both(inner, outer)
    assert list(nested.state_dict()) == list(plain.state_dict())
    gradients = []
    for model in (nested, plain):
        model.zero_grad()
        model(X).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_copies_and_pickles_keep_both(inner):
    nested, _ = both(inner, Outer)
    expected = nested(X)
    for twin in (copy.deepcopy(nested), pickle.loads(pickle.dumps(nested))):
        assert torch.equal(twin(X), expected)
        assert torch.equal(twin.body["first"](X), nested.body["first"](X))
        assert twin.body["first"] is twin.body["again"]


def test_a_lowered_inner_model(inner):
    exact = {f"body.first.{name}": value.clone() for name, value in inner.state_dict().items()}
    low = fxamp.convert(inner, "bf16", (X,), opt_level="O2")
    outer = fxamp.convert(Outer(low), dtype="bf16")
    assert torch.isfinite(outer(X)).all()
    state = outer.state_dict()
    assert all(torch.equal(state[name], value) for name, value in exact.items())
    with pytest.raises(OptionError, match=r"body.first.fc.weight was lowered by .*bfloat16 now.*dtype=torch.bfloat16"):
        fxamp.convert(Outer(low), dtype="fp16")
