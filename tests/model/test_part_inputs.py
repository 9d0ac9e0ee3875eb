"""What comes low into a part of a forward that runs as it is written is no choice of the user's: it may stay low."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from tests.choosing import batch

FORMS = {
    "add": lambda part, x: part.other(x + part.fc(x)),
    "added in place": lambda part, x: part.other(part.fc(x).add_(x)),
    "cat": lambda part, x: part.wide(torch.cat([x, part.fc(x)], -1)),
    "where": lambda part, x: part.other(torch.where(x > 0, x, part.fc(x))),
    "product": lambda part, x: part.other(torch.sigmoid(part.fc(x)) * x),
    "sums that go on": lambda part, x: (x + part.fc(x)) + part.other(x + part.fc(x)),
}


class Part(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.fc, self.other, self.wide, self.form = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(32, 16), form

    def forward(self, x):
        return self.form(self, x)


class Net(nn.Module):
    """Hands what its first layer gives, which autocast makes low, to a part."""

    def __init__(self, form):
        super().__init__()
        self.stem, self.part = nn.Linear(16, 16), Part(form)

    def forward(self, x):
        h = self.stem(x)
        return torch.cat([self.part(h).float(), h.float()])


def net(form, kind=Net):
    """With a hook, so that it runs as it is written."""
    torch.manual_seed(0)
    model = kind(form)
    model.part.register_forward_hook(lambda module, given, out: None)
    return model


def run(model, low=None):
    """The output, and the gradients of the parameters."""
    with torch.autocast("cpu", low, enabled=low is not None):
        out = model(batch(0))
    out.square().mean().backward()
    return torch.cat([out.detach().flatten(), *(w.grad.flatten() for w in model.parameters() if w.grad is not None)])


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("name", FORMS)
def test_it_runs_low_and_is_no_further_from_float32_than_autocast(name, opt_level, low):
    expected, autocast = run(net(FORMS[name])), run(net(FORMS[name]), low)
    converted = fxamp.convert(net(FORMS[name]), low, opt_level=opt_level)
    found = run(converted)
    assert (found - expected).norm() <= 1.2 * (autocast - expected).norm()
    rows = [row for row in fxamp.report(converted).rows if row.role == "" and row.module.startswith("part")]
    assert rows and not [row.name for row in rows if row.precision == "high" and row.op != "parameter"]


def test_what_the_user_hands_over_low_is_read_as_it_is():
    """The sum of a bfloat16 input and of a layer's result is float32 without autocast."""
    converted = fxamp.convert(Part(FORMS["add"]), torch.bfloat16)
    converted(batch(0).bfloat16())
    (row,) = (row for row in fxamp.report(converted).rows if row.op == "add")
    assert row.precision == "high" and "is bfloat16 by itself" in row.reason


def test_what_comes_low_into_a_part_is_not_said_to_be_the_users_choice():
    converted = fxamp.convert(net(lambda part, x: part.fc(x.exp())), torch.bfloat16)
    run(converted)
    reasons = [row.reason for row in fxamp.report(converted).rows]
    assert [reason for reason in reasons if "is low by itself" in reason]
    assert not [reason for reason in reasons if "user" in reason]


class Writing(Net):
    def forward(self, x):
        h = self.stem(x)
        return self.part(h).float() + h.float()


@pytest.mark.parametrize("write", [lambda x: x.mul_(2), lambda x: F.relu(x, inplace=True), lambda x: x[:2].zero_()])
def test_what_a_part_writes_into_what_it_is_given_arrives(write):
    def form(part, x):
        write(x)
        return part.fc(x) + x

    expected, autocast = run(net(form, Writing)), run(net(form, Writing), torch.bfloat16)
    found = run(fxamp.convert(net(form, Writing), torch.bfloat16))
    assert (found - expected).norm() <= 1.2 * (autocast - expected).norm()


class Scaled(Net):
    def __init__(self, form):
        super().__init__(form)
        self.part.scale = nn.Parameter(torch.tensor(0.3))


def test_a_scale_without_dimensions_leaves_the_dtype_to_what_it_scales():
    def form(part, x):
        return part.other(x * part.scale)

    expected, autocast = run(net(form, Scaled)), run(net(form, Scaled), torch.bfloat16)
    found = run(fxamp.convert(net(form, Scaled), torch.bfloat16))
    assert (found - expected).norm() <= 1.2 * (autocast - expected).norm()


PLACES = torch.tensor([3, 0, 2, 1])


def placed(write):
    """A form that writes a layer's result into places of zeros that are as low as what comes in."""

    def form(part, x):
        rows = torch.zeros_like(x)
        write(rows, part.fc(x))
        return part.other(rows) + x

    return form


def gathered(part, x):
    """An expert's rows of a batch, of which the data decides how many there are."""
    rows, chosen = torch.zeros_like(x), x[:, 0] > 0
    rows[chosen] = part.fc(x[chosen])
    return part.other(rows) + x


def given_low(part, x):
    """A layer's result, into which what comes in is written."""
    rows = part.fc(x)
    rows[PLACES] = x[PLACES.flip(0)]
    return part.other(rows) + x


WRITES = {
    "setitem": placed(lambda rows, made: rows.__setitem__(PLACES, made[:4])),
    "setitem by a mask": placed(lambda rows, made: rows.__setitem__(made > 0, made[made > 0])),
    "index_put": placed(lambda rows, made: rows.index_put_((PLACES,), made[:4])),
    "index_add": placed(lambda rows, made: rows.index_add_(0, PLACES, made[:4])),
    "index_copy": placed(lambda rows, made: rows.index_copy_(0, PLACES, made[:4])),
    "scatter": placed(lambda rows, made: rows.scatter_(0, PLACES[:, None].expand(4, 16), made[:4])),
    "scatter_add": placed(lambda rows, made: rows.scatter_add_(0, PLACES[:, None].expand(4, 16), made[:4])),
    "scatter_reduce": placed(
        lambda rows, made: rows.scatter_reduce_(0, PLACES[:, None].expand(4, 16), made[:4], "amax")
    ),
    "masked_scatter": placed(lambda rows, made: rows.masked_scatter_(made > 0, made)),
    "gathered": gathered,
    "given low": given_low,
}


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_into_chosen_places_has_the_dtype_that_is_there(name, opt_level):
    expected, autocast = run(net(WRITES[name])), run(net(WRITES[name]), torch.bfloat16)
    converted = fxamp.convert(net(WRITES[name]), torch.bfloat16, opt_level=opt_level)
    found = run(converted)
    assert (found - expected).norm() <= 1.2 * (autocast - expected).norm()
    rows = [row for row in fxamp.report(converted).rows if row.module.startswith("part.")]
    assert {row.precision for row in rows if row.op == "linear"} == {"low"}
