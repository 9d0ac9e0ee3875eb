"""Forwards that run as they are written are looked at: each module that they call as a graph, node by node."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.model.engine import engine_of
from fxamp.numerics.recording import record
from fxamp.numerics.run import call_of
from tests.choosing import Block, Choosing, batch

LEVELS = ("O1", "O2", "O3")


class Twice(Choosing):
    """Calls its first block a second time."""

    def forward(self, x):
        h = self.stem(x)
        return self.head(self.stem(self.left(h) if h.sum().item() > -1e9 else self.right(h)))


def twins(make=Twice, opt_level="O1", dtype=torch.bfloat16, **options):
    """(the fp32 model, a converted one with the same weights)"""
    torch.manual_seed(0)
    model = make()
    return model, fxamp.convert(copy.deepcopy(model), dtype, opt_level=opt_level, **options)


def squared(out):
    return out.float().square().mean()


def distance(one, other):
    return float((one - other).detach().double().norm() / one.detach().double().norm())


@pytest.mark.parametrize("is_called_before", [False, True])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_compare_tells_what_the_model_gives(opt_level, is_called_before):
    model, converted = twins(opt_level=opt_level)
    if is_called_before:
        converted(batch(1))
    found = fxamp.compare(model, converted, (batch(0),), squared)
    exact, mixed = model(batch(0)), converted(batch(0))
    assert found.output == pytest.approx(distance(exact, mixed), rel=1e-6)
    assert found.loss == pytest.approx((float(squared(exact)), float(squared(mixed))), rel=1e-6)
    squared(exact).backward()
    squared(mixed).backward()
    gradients = {name: weight.grad.float() for name, weight in converted.named_parameters() if weight.grad is not None}
    own = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert {row.name for row in found.weights} == own.keys() == gradients.keys()
    for row in found.weights:
        assert row.error == pytest.approx(distance(own[row.name], gradients[row.name]), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_every_call_of_a_part_has_rows_which_name_it(opt_level):
    model, converted = twins(opt_level=opt_level)
    found = fxamp.compare(model, converted, (batch(0),), squared)
    taken = "left"
    calls = {part: sum(row.part == part and row.name == "linear" for row in found.rows) for part in ("stem", taken)}
    assert calls == {"stem": 2, taken: 1}
    assert {row.module for row in found.rows if row.part == taken} == {
        taken,
        *(f"{taken}.{p}" for p in ("up", "norm", "down")),
    }
    assert any(row.part == "head" for row in found.rows)
    assert all(row.gradient is not None for row in found.rows)
    assert "part" in str(found) and taken in str(found)


class Routed(Choosing):
    """Sends rows to one of two blocks."""

    is_graph = False

    def forward(self, x):
        h = self.stem(x)
        goes_left = h[:, 0] > (0 if self.is_graph or h.sum().item() > -1e9 else 1)
        out = torch.zeros_like(h)
        out[goes_left] = self.left(h[goes_left]).to(out.dtype)
        out[~goes_left] = self.right(h[~goes_left]).to(out.dtype)
        return self.head(out)


class RoutedInAGraph(Routed):
    is_graph = True


class Filtered(Choosing):
    """Gives some rows alone."""

    def forward(self, x):
        h = self.stem(x)
        return self.head(self.left(h[h[:, 0] > 0]))


@pytest.mark.parametrize("make", [Routed, RoutedInAGraph])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_modules_that_get_other_rows_in_float32_have_no_rows_in_the_table(opt_level, make):
    model, converted = twins(make, opt_level)
    x = batch(0, 2000)
    found = fxamp.compare(model, converted, (x,), squared)
    assert any(row.part for row in found.rows) == (make is Routed)
    assert {row.module.split(".")[0] for row in found.rows if row.op == "linear"} == {"stem", "head"}
    assert found.output == pytest.approx(distance(model(x), converted(x)), rel=1e-6)
    assert found.underflows == ()
    assert fxamp.find_deny(model, converted, (x,), tolerance=1e-2).nodes


def test_outputs_of_other_sizes_are_no_error_that_can_be_told():
    model, converted = twins(Filtered)
    assert fxamp.compare(model, converted, (batch(0, 2000),)).output == float("inf")


class Normed(Twice):
    """Norms between its blocks, which autocast runs otherwise than a graph."""

    def __init__(self):
        super().__init__()
        self.fc, self.norms = nn.Linear(16, 16), nn.ModuleList([nn.GroupNorm(2, 16), nn.LayerNorm(16)])
        for norm in self.norms:
            nn.init.normal_(norm.weight)

    def forward(self, x):
        return super().forward(self.norms[1](self.norms[0](self.fc(x))))


@pytest.mark.parametrize("opt_level", LEVELS)
def test_layers_that_a_graph_would_run_otherwise_run_as_they_do(opt_level):
    model, converted = twins(Normed, opt_level)
    found = fxamp.compare(model, converted, (batch(0),))
    assert found.output == pytest.approx(distance(model(batch(0)), converted(batch(0))), rel=1e-6)


class Sensitive(Block):
    def forward(self, x):
        return super().forward(x) + ((x + 300.0) - 300.0)


class Planted(Choosing):
    def __init__(self):
        super().__init__()
        self.right = Sensitive()

    def forward(self, x):
        h = self.left(self.stem(x))
        return self.head(self.right(h) if h.sum().item() > -1e9 else h)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_what_find_deny_finds_holds_in_a_model_that_is_converted_with_it(opt_level):
    model, converted = twins(Planted, opt_level)
    before = fxamp.compare(model, converted, (batch(0),)).output
    found = fxamp.find_deny(model, converted, (batch(0),), tolerance=before / 2)
    assert found.is_met and found.nodes
    _, again = twins(Planted, opt_level, overrides=found.overrides)
    assert distance(model(batch(0)), again(batch(0))) == pytest.approx(found.error, rel=1e-3, abs=1e-7)
    assert fxamp.compare(model, again, (batch(0),)).output <= before / 2


class Hooked(nn.Module):
    """Nine tenths of the weights are in a block with a hook."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = nn.Sequential(Block(), Block()), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.norm(self.inner(x)))


def hooked():
    model = Hooked()
    model.inner.register_forward_hook(lambda module, args, output: None)
    return model


def test_what_stands_behind_hooks_is_compared_as_it_runs():
    model, converted = twins(hooked)
    found = fxamp.compare(model, converted, (batch(0),), squared)
    assert found.output == pytest.approx(distance(model(batch(0)), converted(batch(0))), rel=1e-6)
    rows = [row for row in found.rows if row.module.startswith("inner.0.")]
    assert {row.precision for row in rows if row.op == "linear"} == {"low"}


def test_the_op_that_overflows_behind_a_hook_is_named():
    _, converted = twins(hooked, dtype=torch.float16)
    with torch.no_grad():
        converted.inner[1].up.weight.mul_(1e5)
    found = fxamp.find_nan(converted, (batch(0),), squared)
    assert found.module.startswith("inner.1") and found.op == "linear"


@pytest.mark.parametrize("opt_level", LEVELS)
def test_looking_changes_nothing(opt_level):
    model, converted = twins(hooked if opt_level == "O1" else Twice, opt_level)
    squared(converted(batch(1))).backward()
    converted.zero_grad()
    graphs = [id(variant) for variant in engine_of(converted).graphs()]
    before, random = copy.deepcopy(converted.state_dict()), torch.get_rng_state()
    fxamp.compare(model, converted, (batch(0),), squared)
    fxamp.profile(converted, [(batch(0),)], squared, progress=False)
    assert torch.equal(random, torch.get_rng_state())
    assert [id(variant) for variant in engine_of(converted).graphs()] == graphs
    assert all(weight.grad is None for each in (model, converted) for weight in each.parameters())
    assert all(torch.equal(value, before[name]) for name, value in converted.state_dict().items())


class Checkpointed(Choosing):
    def forward(self, x):
        h = self.stem(x)
        block = self.left if h.sum().item() > -1e9 else self.right
        return self.head(checkpoint(block, h, use_reentrant=False))


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_what_a_backward_runs_again_is_no_further_turn(opt_level):
    model, converted = twins(Checkpointed, opt_level)
    found = fxamp.compare(model, converted, (batch(0),), squared)
    assert sum(row.part == "left" and row.name == "linear" for row in found.rows) == 1
    turns = [part.turn.path for part in record(call_of(converted, (batch(0),)), None, squared).parts.values()]
    assert turns == ["stem", "left", "head"]
    assert all(row.error < 0.05 for row in found.weights)


def test_ranges_of_parts_tell_whose_node_it_is():
    _, converted = twins(Choosing, "O2")
    ranges = fxamp.profile(converted, [(batch(0),)], progress=False)
    assert {"linear", "linear (2)"} <= ranges.nodes.keys()
    lines = [line.split() for line in str(ranges).splitlines()]
    assert lines[0][:4] == ["node", "op", "module", "line"]
    told = {" ".join(cells[:2]): cells[3] for cells in lines if cells[1:2] == ["(2)"]}
    assert told["linear (2)"] == ranges.nodes["linear (2)"].module


class Reentrant(Choosing):
    def forward(self, x):
        h = self.stem(x)
        block = self.left if h.sum().item() > -1e9 else self.right
        return self.head(checkpoint(block, h, use_reentrant=True))


@pytest.mark.parametrize("look", ["compare", "find_nan", "profile"])
def test_checkpoints_of_the_older_kind_are_refused_with_a_loss(look):
    model, converted = twins(Reentrant, "O2")
    looks = {
        "compare": lambda *loss: fxamp.compare(model, converted, (batch(0),), *loss),
        "find_nan": lambda *loss: fxamp.find_nan(converted, (batch(0),), *loss),
        "profile": lambda *loss: fxamp.profile(converted, [(batch(0),)], *loss, progress=False),
    }
    looks[look]()
    with pytest.raises(fxamp.OptionError, match="use_reentrant=False"):
        looks[look](squared)


def test_ranges_at_O2_are_of_all_parts_and_of_no_casts():
    _, converted = twins(opt_level="O2")
    found = fxamp.profile(converted, [(batch(0),), (batch(1),)], squared, progress=False)
    assert {node.op for node in found.nodes.values()} == {"linear", "layer_norm", "gelu", "add"}
    places = {(node.op, node.module): node for node in found.nodes.values()}
    assert {("linear", "stem.up"), ("linear", "left.up")} <= places.keys()
    assert places["linear", "stem.up"].values.total == 2 * places["linear", "left.up"].values.total
    assert places["linear", "stem.up"].gradients.total > 0


class Square(Block):
    def forward(self, x):
        return super().forward(x) / (x.square().sum(-1, keepdim=True) + 1e-9)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_audit_finds_what_is_in_a_part(opt_level):
    _, converted = twins(lambda: Choosing(Square), opt_level, torch.float16)
    found = fxamp.audit(converted, (batch(0),))
    assert {finding.pattern for finding in found.findings} >= {"epsilon", "square"}


class Around(Choosing):
    def forward(self, x):
        return super().forward(x) / (x.square().sum(-1, keepdim=True) + 1e-9)


def test_audit_at_O1_finds_what_is_around_the_parts_too():
    _, converted = twins(Around, dtype=torch.float16)
    assert "epsilon" in {finding.pattern for finding in fxamp.audit(converted, (batch(0),)).findings}


@pytest.mark.parametrize("opt_level", LEVELS)
def test_of_models_that_are_gone_a_look_keeps_nothing(opt_level):
    model, converted = twins(Checkpointed, opt_level)
    fxamp.compare(model, converted, (batch(0),), squared)
    fxamp.find_nan(converted, (batch(0),), squared)
    gone = [weakref.ref(each) for each in (model, converted, engine_of(converted))]
    del model, converted
    for _ in range(2):  # what an autograd graph held is free once that is
        gc.collect()
    assert [each() for each in gone] == [None, None, None]
