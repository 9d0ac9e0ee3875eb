"""Tensors of the model that forward meets elsewhere too: in a list, an object, a global."""

import copy
import types

import pytest
import torch
from torch import nn

import fxamp
from fxamp.model.engine import engine_of

X = torch.linspace(-2, 2, 32).reshape(4, 8)
ASIDE: dict[str, torch.Tensor] = {}


class Model(nn.Module):
    """`table` is replaced between calls, or by forward; what else holds the tensor that it was goes on holding that."""

    def __init__(self, is_set_by_forward=False):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = torch.ones(8)
        self.register_buffer("mask", torch.ones(8))
        self.is_set_by_forward = is_set_by_forward
        self.keep()

    def keep(self):
        self.kept = [self.table, self.mask]

    def read(self):
        return self.kept[0] + self.kept[1]

    def forward(self, x):
        y = self.linear(x * self.read())
        if self.is_set_by_forward:
            self.table = y.detach()[0]
        return y


class InAnObject(Model):
    def keep(self):
        self.kept = types.SimpleNamespace(table=self.table, masks={"mask": (self.mask,)})

    def read(self):
        return self.kept.table + self.kept.masks["mask"][0]


class ByAnotherName(Model):
    def keep(self):
        self.first, self.other = self.table, self.mask

    def read(self):
        return self.first + self.other


class InAGlobal(Model):
    def keep(self):
        ASIDE.update(table=self.table, mask=self.mask)

    def read(self):
        return ASIDE["table"] + ASIDE["mask"]


class InADefault(Model):
    def keep(self):
        self.reader = lambda table=self.table, mask=self.mask: table + mask

    def read(self):
        return self.reader()


class InBoth(Model):
    def read(self):
        return self.kept[0] + self.kept[1] + self.table + self.mask


KINDS = [Model, InAnObject, ByAnotherName, InAGlobal, InADefault, InBoth]


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("is_set_by_forward", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_is_held_twice_is_asked_for_where_it_is_met(kind, is_set_by_forward, opt_level):
    original = kind(is_set_by_forward)
    plain = copy.deepcopy(original)  # a global and a default are the original's
    model = fxamp.convert(original, overrides={"*": "deny"}, opt_level=opt_level)
    for step in range(5):
        assert torch.equal(model(X), plain(X))
        for each in (plain, model):
            if not is_set_by_forward:
                each.table = torch.full((8,), step / 2)
            each.mask = torch.full((8,), 1 - step / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_is_held_twice_may_be_replaced_by_another(kind):
    original = kind()
    del original.mask
    original.mask = nn.Parameter(torch.ones(8))
    original.keep()
    plain = copy.deepcopy(original)
    model = fxamp.convert(original, overrides={"*": "deny"})
    for step in range(4):
        assert torch.equal(model(X), plain(X))
        for each in (plain, model):
            each.mask = nn.Parameter(torch.full((8,), step / 2))


def test_what_stays_where_it_is_is_captured_once():
    model = fxamp.convert(Model())
    for step in range(4):
        with torch.no_grad():
            model.table.mul_(0.5)
            model.mask.add_(step)
        model(X)
    assert len([each for each in engine_of(model).all_variants() if not each.is_preview]) == 1
