"""A NaN has a name where forward runs as it is written: the parts that it calls as graphs are looked at, in order."""

import copy

import pytest
import torch
from torch import nn

import fxamp
from tests.choosing import Choosing, batch

BIG = 1e5  # times weights of 0.25: float16 holds these, and not what comes of them


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.up(x)


def choosing():
    torch.manual_seed(0)
    return Choosing(Residual)


def summed(out):
    return out.float().sum()


def watched(converted, loss_fn=summed):
    with fxamp.watch_nan(converted, raises=False) as watch:
        loss_fn(converted(batch(0))).backward()
    converted.zero_grad()
    return watch.found


def found_in(converted, loss_fn=summed):
    return fxamp.find_nan(converted, (batch(0),), loss_fn)


def taken(model):
    """The path of the block that forward chooses."""
    return "left" if model.stem(batch(0)).sum() > 0 else "right"


@pytest.mark.parametrize("is_seen_before", [False, True])
@pytest.mark.parametrize(
    ("look", "opt_level"), [(watched, "O1"), (watched, "O2"), (watched, "O3"), (found_in, "O2"), (found_in, "O3")]
)
def test_the_part_that_overflows_is_named_though_equal_ones_share_its_graph(look, opt_level, is_seen_before):
    model = choosing()
    path = taken(model)
    with torch.no_grad():
        model.get_submodule(path).up.weight.mul_(BIG)
    converted = fxamp.convert(model, torch.float16, opt_level=opt_level)
    if is_seen_before:
        converted(batch(1))
    found = look(converted)
    assert found.module.split(".")[0] == path
    assert not found.is_bad_in_float32 or opt_level == "O3"
    assert (found.call, found.steps) == (0, 0) or look is watched


@pytest.mark.parametrize("look", [watched, found_in])
def test_of_gradients_the_one_that_came_first_is_named(look):
    model = choosing()
    converted = fxamp.convert(model, torch.float16, opt_level="O2")
    found = look(converted, lambda out: out.float().sum() * 1e30)
    assert found.phase in ("backward", "sum of gradients") and found.module.startswith("head")
    assert "smaller loss scale" in str(found) and "no matter of precision" not in str(found)


class Between(Choosing):
    """Divides by zero in its own forward, before the second block, or after the last."""

    def __init__(self, is_after=False):
        super().__init__()
        self.is_after = is_after

    def forward(self, x):
        h = self.stem(x)
        h = h if h.sum().item() > -1e9 else -h
        bad = torch.where(h > 1, torch.nan, 1.0)
        return self.head(self.left(h)) * bad.mean(-1, True) if self.is_after else self.head(self.left(h * bad))


@pytest.mark.parametrize("look", [watched, found_in])
def test_what_code_around_the_graphs_makes_is_told_so(look):
    torch.manual_seed(0)
    converted = fxamp.convert(Between(), torch.float16, opt_level="O2")
    found = look(converted)
    assert found.phase == "between graphs" and "code between two graphs" in str(found)
    assert found.module.split(".")[0] in ("left", "")


@pytest.mark.parametrize("look", [watched, found_in])
def test_what_is_made_behind_the_last_graph_is_seen(look):
    torch.manual_seed(0)
    assert look(fxamp.convert(Between(is_after=True), torch.float16, opt_level="O2")) is not None


def test_looking_changes_nothing():
    model = choosing()
    with torch.no_grad():
        model.get_submodule(taken(model)).up.weight.mul_(BIG)
    model.norm = nn.BatchNorm1d(16)
    converted = fxamp.convert(model, torch.float16, opt_level="O2")
    converted(batch(0))
    before, random = copy.deepcopy(converted.state_dict()), torch.get_rng_state()
    assert found_in(converted) is not None
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in converted.parameters())
    for name, value in converted.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("look", [watched, found_in])
def test_a_model_that_is_finite_has_nothing_to_name(look):
    assert look(fxamp.convert(choosing(), torch.float16, opt_level="O2")) is None


def test_an_error_that_no_bad_value_led_to_is_the_users():
    converted = fxamp.convert(choosing(), torch.float16, opt_level="O2")
    with pytest.raises(RuntimeError, match="shape"):
        fxamp.find_nan(converted, (torch.randn(8, 5),))


def test_an_index_made_of_a_bad_value_leads_to_the_part():
    class Indexing(Choosing):
        def forward(self, x):
            h = self.left(self.stem(x))
            return self.head(h[: int(h.sum().item())])  # no integer of NaN

    torch.manual_seed(0)
    model = Indexing(Residual)
    with torch.no_grad():
        model.left.up.weight[0, 0] = float("nan")
    found = fxamp.find_nan(fxamp.convert(model, torch.float16, opt_level="O2"), (batch(0),))
    assert found.phase == "parameter" and found.module.startswith("left")
