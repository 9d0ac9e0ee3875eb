"""Plans and ranges where parts of a model are graphs by themselves: replayed, and honest about what no graph holds."""

import copy
import json
import logging
import warnings

import pytest
import torch
from torch import nn

import fxamp
from fxamp.cli import main
from fxamp.errors import FxampWarning, OptionError
from fxamp.review.plan import Plan, load_plan
from tests.choosing import Block, Choosing, Experts, batch

FP16 = torch.float16
X = batch(0, 64)


def squared(output):
    return output.float().square().mean()


def trained(model, calls=3):
    for _ in range(calls):
        squared(model(X)).backward()
        model.zero_grad()
    return model


def decided(model, *ops):
    rows = fxamp.report(model).rows
    return {(row.module, row.op): row.precision for row in rows if not row.role and (row.op in ops or not ops)}


def kinds(model, op="linear"):
    return {row.module: row.reason_kind for row in fxamp.report(model).rows if row.op == op}


@pytest.fixture
def silent(fresh_dynamo):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxampWarning)
        yield


class Net(nn.Module):
    """Blocks, and something around them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.a(x).tanh()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("is_given", [True, False], ids=["example", "none"])
@pytest.mark.parametrize("denied", ["experts.*.0", "experts.1.0", "experts.2", "inside", None])
def test_a_plan_replays_on_parts(opt_level, is_given, denied, silent, tmp_path):
    options = {"opt_level": opt_level, "example_inputs": (X,) if is_given else None}
    overrides = {denied: "deny"} if denied else None
    first = trained(fxamp.convert(Experts(), FP16, overrides=overrides, **options))
    plan = fxamp.report(first).save_plan(tmp_path / "plan.json")
    again = trained(fxamp.convert(Experts(), FP16, plan=plan, **options))
    assert decided(again) == decided(first)
    assert set(kinds(again).values()) == {"plan"}
    assert fxamp.report(again).titles == fxamp.report(first).titles  # equal parts share a graph as before
    assert torch.equal(again(X), first(X))
    fxamp.report(again).save_plan(tmp_path / "again.json")
    assert main(["diff", str(plan), str(tmp_path / "again.json")]) == 0


@pytest.mark.parametrize("boundaries", ["blocks", ["blocks.1"], [Block, "head"]], ids=str)
@pytest.mark.parametrize("are_saved_with", [True, False])
def test_a_plan_replays_with_boundaries(boundaries, are_saved_with, silent, tmp_path):
    """Also one of a single graph."""
    overrides = {"blocks.1.up": "deny", "head": "deny", "tanh": "deny"}
    given = {"boundaries": boundaries} if are_saved_with else {}
    first = trained(fxamp.convert(Net(), FP16, (X,), overrides=overrides, **given))
    plan = fxamp.report(first).save_plan(tmp_path / "plan.json")
    again = trained(fxamp.convert(Net(), FP16, (X,), plan=plan, boundaries=boundaries))
    found, expected = decided(again), decided(first)
    assert found == {node: expected.get(node, found[node]) for node in found}
    assert found["head", "linear"] == found["", "tanh"] == "high"
    assert set(kinds(again).values()) == {"plan"}
    assert torch.equal(again(X), first(X))


def test_ranges_decide_in_blocks(silent):
    model = Net()
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(1e6)
    ranges = fxamp.profile(copy.deepcopy(model), [X], squared, progress=False)
    converted = trained(fxamp.convert(copy.deepcopy(model), FP16, (X,), ranges=ranges, boundaries="blocks"))
    found = kinds(converted)
    assert found["blocks.1.up"] == "ranges" and found["blocks.0.up"] == found["head"] == "list"
    expected = model(X)
    assert (converted(X) - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_ranges_decide_in_parts(opt_level, silent):
    model = Experts()
    with torch.no_grad():
        model.inside.weight.mul_(1e6)  # a layer that would run under autocast by itself; the norm behind it undoes it
        model.experts[1][0].weight.mul_(3e5)
        model.experts[1][2].weight.mul_(1e-3)
    ranges = fxamp.profile(copy.deepcopy(model), [X], squared, progress=False)
    assert {node.module for name, node in ranges.nodes.items() if name in ranges.deny()} == {
        "inside", "experts.1.0", "experts.1.1",
    }  # fmt: skip
    converted = trained(fxamp.convert(copy.deepcopy(model), FP16, opt_level=opt_level, ranges=ranges))
    found = kinds(converted)
    assert found["inside"] == found["experts.1.0"] == "ranges" and found["experts.0.0"] == "list"
    expected = model(X)
    assert (converted(X) - expected).norm() <= 1e-2 * expected.norm()
    dtypes = {name: parameter.dtype for name, parameter in converted.named_parameters() if name.endswith("0.weight")}
    if opt_level == "O2":
        assert dtypes["experts.1.0.weight"] == torch.float32 and dtypes["experts.0.0.weight"] == FP16


class Asks(Choosing):
    asks = False

    def forward(self, x):
        h = self.stem(x).exp()
        if self.asks and h.sum().item() < 0:
            h = -h
        return self.head(self.left(h))


def test_what_a_plan_says_of_nodes_that_no_graph_holds_is_told(fresh_dynamo, tmp_path, caplog):
    torch.manual_seed(0)
    model = Asks()
    whole = trained(fxamp.convert(copy.deepcopy(model), FP16, overrides={"left.up": "deny"}))
    plan = fxamp.report(whole).save_plan(tmp_path / "plan.json")
    model.asks = True
    with caplog.at_level(logging.WARNING, "fxamp"), pytest.warns(FxampWarning):  # of its preview
        again = trained(fxamp.convert(model, FP16, plan=plan, opt_level="O2"))
    assert kinds(again)["left.up"] == "plan" and decided(again)["left.up", "linear"] == "high"
    (said,) = (record.getMessage() for record in caplog.records if "the plan of Asks speaks of" in record.getMessage())
    assert "1 node that no graph holds (:exp#0)" in said and "under torch.autocast" in said


def test_what_ranges_say_of_nodes_that_no_graph_holds_is_told(fresh_dynamo, caplog):
    torch.manual_seed(0)
    model = Asks()
    model.asks = True
    with torch.no_grad():
        model.stem.down.bias.fill_(13.0)
    ranges = fxamp.profile(copy.deepcopy(model), [X], squared, progress=False)
    assert "h" in ranges.deny()  # it has the name of the variable that it is given to
    with caplog.at_level(logging.WARNING, "fxamp"):
        trained(fxamp.convert(model, FP16, ranges=ranges))
    (said,) = (record.getMessage() for record in caplog.records if "by the ranges" in record.getMessage())
    assert "h at test_plans_of_parts.py:" in said and "which no graph holds" in said


def test_messages_name_nodes_as_the_model_has_them(fresh_dynamo, tmp_path):
    plan = fxamp.report(trained(fxamp.convert(Experts(), FP16))).save_plan(tmp_path / "plan.json")
    changed = Experts()
    changed.experts[3][1] = nn.Tanh()
    with pytest.warns(FxampWarning) as said:
        trained(fxamp.convert(changed, FP16, plan=plan))
    (text,) = {str(each.message) for each in said}
    assert "experts.3.1:gelu#0 is in the plan and not in the model" in text
    assert "experts.3.1:tanh#0 is in the model and not in the plan" in text


GRAPH = "forward(float32 tensor of 2 dimensions)"


def planned(graphs, blocks):
    return Plan("Net", "float16", "O1", "balanced", 0, 0, graphs, {}, blocks)


def test_a_plan_of_a_part():
    plan = planned(
        {
            f"symbolic, {GRAPH}": {"a:linear#0": "low", "ab:linear#0": "high", "a.b:add#1": "low", ":add#0": "high"},
            f"a.x and 1 like it: symbolic, {GRAPH}": {"a.x.fc:linear#0": "low", "a.x:exp#0": "high"},
        },
        {f"a.x and 1 like it: symbolic, {GRAPH}": ("a.x", "a.y")},
    )
    whole = plan.within("a")
    assert whole.graphs == {
        f"symbolic, {GRAPH}": {":linear#0": "low", "b:add#1": "low"},
        f"x and 1 like it: symbolic, {GRAPH}": {"x.fc:linear#0": "low", "x:exp#0": "high"},
    }
    assert list(whole.blocks.values()) == [("x", "y")] and whole.path == "a"
    for part in (plan.within("a.y"), whole.within("y")):
        assert part.graphs == {f"symbolic, {GRAPH}": {"fc:linear#0": "low", ":exp#0": "high"}}
        assert not part.blocks and part.path == "a.y" and part.content == plan.within("a.x").content
    assert plan.within("a.y.fc").graphs == {f"symbolic, {GRAPH}": {":linear#0": "low"}}
    assert not plan.within("c").graphs


def test_a_plan_of_parts_is_read_as_it_was_written(fresh_dynamo, tmp_path):
    plan = fxamp.report(trained(fxamp.convert(Experts(), FP16))).save_plan(tmp_path / "plan.json")
    assert list(load_plan(plan).blocks.values()) == [tuple(f"experts.{number}" for number in range(4))]
    single = fxamp.report(fxamp.convert(Net(), FP16, (X,))).save_plan(tmp_path / "single.json")
    assert "blocks" not in json.loads(single.read_text())


@pytest.mark.parametrize(
    "blocks, said",
    [
        (3, "blocks is 3, not a table of modules by graph"),
        ({"symbolic": ["a"]}, "blocks: there is no graph 'symbolic'"),
        ({"TITLE": "a"}, "is 'a', not a list of modules"),
        ({"TITLE": []}, "is a list, not a list of modules"),
        ({"TITLE": [3]}, "not a list of modules"),
    ],
)
def test_a_plan_whose_parts_were_edited_wrongly(blocks, said, tmp_path):
    path = fxamp.report(fxamp.convert(Net(), FP16, (X,))).save_plan(tmp_path / "plan.json")
    read = json.loads(path.read_text())
    title = next(iter(read["graphs"]))
    blocks = {key.replace("TITLE", title): value for key, value in blocks.items()} if type(blocks) is dict else blocks
    path.write_text(json.dumps({**read, "blocks": blocks}))
    with pytest.raises(OptionError, match="Mend it, or save the plan again") as raised:
        load_plan(path)
    assert said in str(raised.value)
