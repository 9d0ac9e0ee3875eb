"""A float32 value that is dropped out on its way to a GEMM is rounded once, as under autocast."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp

FORMS = {
    "module": lambda m, h: m.drop(h),
    "function": lambda m, h: F.dropout(h, m.drop.p, m.training),
    "torch": lambda m, h: torch.dropout(h, m.drop.p, m.training),
}


class Head(nn.Module):
    def __init__(self, form, p=0.1, is_low_born=False):
        super().__init__()
        self.before = nn.Linear(16, 16) if is_low_born else nn.LayerNorm(16)
        self.drop, self.head, self.form = nn.Dropout(p), nn.Linear(16, 16), form

    def forward(self, x):
        return self.head(self.form(self, self.before(x)))


def precision(model, dtype=torch.bfloat16, training=True, **options):
    torch.manual_seed(0)
    converted = fxamp.convert(model.train(training), dtype, example_inputs=(torch.randn(4, 16),), **options)
    (row,) = [row for row in fxamp.report(converted).rows if row.op == "dropout"]
    return row.precision


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_training_gives_autocasts_numbers(form, capture):
    torch.manual_seed(0)
    model, x = Head(form), torch.randn(64, 16)
    converted = fxamp.convert(model, torch.bfloat16, capture=capture)
    converted(x)
    torch.manual_seed(1)
    found = converted(x)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    assert torch.equal(found, expected.float())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("p", [0.0, 0.5, 0.75])
def test_a_power_of_two_rounds_nothing(form, p):
    assert precision(Head(form, p)) == "low"


def test_where_it_stays_low():
    form = FORMS["module"]
    assert precision(Head(form)) == "high"
    assert precision(Head(form), training=False) == "low"
    assert precision(Head(form, is_low_born=True)) == "low"
    assert precision(Head(form), level="aggressive") == "low"
    assert precision(Head(form), torch.float16) == "low"  # with TF32's bits
    assert precision(Head(form), torch.float16, level="strict") == "high"
    assert precision(Head(form), overrides={"drop": "allow"}) == "low"
