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


def test_the_call_of_a_part_is_no_node_of_the_part():
    title = f"symbolic, {GRAPH}"
    plan = planned(
        {title: {"a:pkg.Block#0": "high", ":add#0": "low"}, f"a: {title}": {"a.fc:linear#0": "low"}},
        {f"a: {title}": ("a",)},
    )
    assert plan.within("a").graphs == {title: {"fc:linear#0": "low"}}


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


# ------------------------------------------------------------------------------------------- graphs of one title


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.scale, self.b = nn.Linear(16, 16), nn.Parameter(torch.ones(16)), nn.Linear(16, 16)

    def forward(self, x):
        return self.b(torch.relu(self.a(x) * self.scale) * 1e-6)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))
        with torch.no_grad():
            self.blocks[1].scale.fill_(1e6)  # which float16 does not hold: this block has a graph of its own

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def gradients(model, *args):
    model.zero_grad()
    out = model(X, *args)
    squared(out).backward()
    return [out.detach(), *(parameter.grad for parameter in model.parameters())]


def assert_equal(one, other, *args):
    for mine, theirs in zip(gradients(one, *args), gradients(other, *args), strict=True):
        assert torch.equal(mine, theirs)


def test_blocks_whose_weights_decide_replay_as_they_were(silent, tmp_path):
    options = {"example_inputs": (X,), "boundaries": "blocks"}
    first = trained(fxamp.convert(Stack(), FP16, **options))
    assert len(fxamp.report(first).titles) == 3
    plan = fxamp.report(first).save_plan(tmp_path / "plan.json")
    again = trained(fxamp.convert(Stack(), FP16, plan=plan, **options))
    assert_equal(again, first)


def test_graphs_that_a_number_tells_apart_replay_as_they_were(silent, tmp_path):
    class Multiplied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x, factor):
            return self.b((self.a(x) * factor).tanh())

    first = fxamp.convert(Multiplied(), FP16)
    for factor in (1.0, 1e6):
        gradients(first, factor)
    plan = fxamp.report(first).save_plan(tmp_path / "plan.json")
    again = fxamp.convert(Multiplied(), FP16, plan=plan)
    for factor in (1.0, 1e6):
        assert_equal(again, first, factor)
        assert again(X, factor).isfinite().all()


# --------------------------------------------------------------------------------------------------- what is stored


class Unsqueezed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear, self.gru = nn.Conv1d(1, 2, 3, padding=1), nn.Linear(16, 16), nn.GRU(16, 8, 1)

    def forward(self, x):
        h = self.conv(x[:, None]).sum(1)
        h = self.linear(self.linear(h).relu())
        return torch.cat([self.gru(h[None])[0][0], h[:, :8]], -1)


@pytest.mark.parametrize("denied", ["experts.1.conv", "experts.1.linear", "experts.1.gru", "experts.1"])
def test_at_o2_a_plan_stores_what_it_was_saved_from(denied, silent, tmp_path):
    def made(**options):
        model = Experts(number=2)
        torch.manual_seed(1)
        model.experts = nn.ModuleList(Unsqueezed() for _ in range(2))
        return trained(fxamp.convert(model, FP16, opt_level="O2", **options))

    first = made(overrides={denied: "deny"})
    plan = fxamp.report(first).save_plan(tmp_path / "plan.json")
    again = made(plan=plan)
    stored = {name: parameter.dtype for name, parameter in first.named_parameters()}
    assert {name: parameter.dtype for name, parameter in again.named_parameters()} == stored
    assert {stored[name] for name in stored if name.startswith(f"{denied}.") and "weight" in name} == {torch.float32}
    assert_equal(again, first)
    allowed = made(plan=plan, overrides={denied: "allow"})  # which is stronger than a plan
    low = [name for name, parameter in allowed.named_parameters() if parameter.dtype == FP16]
    assert f"{denied}.weight" in low or "experts.1.linear.weight" in low


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("is_given", [True, False], ids=["example", "none"])
def test_a_plan_replays_behind_hooks(opt_level, is_given, silent, tmp_path):
    def made(**options):
        model = Net()
        for block in model.blocks:
            block.register_forward_hook(lambda module, given, out: None)
        options |= {"example_inputs": (X,)} if is_given else {}
        return trained(fxamp.convert(model, FP16, opt_level=opt_level, **options))

    first = made(overrides={"blocks.2": "deny", "a": "deny"})
    plan = fxamp.report(first).save_plan(tmp_path / "plan.json")
    again = made(plan=plan)
    assert_equal(again, first)


def test_ranges_decide_behind_hooks(silent):
    model = Stack()
    for block in model.blocks:
        block.register_forward_hook(lambda module, given, out: None)
    with torch.no_grad():
        model.blocks[1].scale.fill_(3e5)
        model.blocks[1].a.weight.mul_(1e3)
    ranges = fxamp.profile(copy.deepcopy(model), [X], squared, progress=False)
    converted = trained(fxamp.convert(model, FP16, ranges=ranges))
    assert kinds(converted, "mul")["blocks.1"] == "ranges"


def test_at_o3_a_plan_and_ranges_decide(silent, tmp_path):
    first = fxamp.convert(Net(), FP16, (X,), opt_level="O3", overrides={"blocks.1": "deny"})
    plan = fxamp.report(first).save_plan(tmp_path / "plan.json")
    again = fxamp.convert(Net(), FP16, (X,), opt_level="O3", plan=plan)
    assert decided(again) == decided(first) and torch.equal(again(X), first(X))
    model = Net()
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(1e6)
    ranges = fxamp.profile(copy.deepcopy(model), [X], squared, progress=False)
    assert kinds(fxamp.convert(model, FP16, (X,), opt_level="O3", ranges=ranges))["blocks.1.up"] == "ranges"


def test_a_plan_of_blocks_decides_in_one_graph(silent, tmp_path):
    first = trained(fxamp.convert(Net(), FP16, (X,), boundaries="blocks", overrides={"blocks.1.up": "deny"}))
    plan = fxamp.report(first).save_plan(tmp_path / "plan.json")
    again = decided(trained(fxamp.convert(Net(), FP16, (X,), plan=plan)), "linear")
    assert [module for (module, _), precision in again.items() if precision == "high"] == ["blocks.1.up"]


# ---------------------------------------------------------------------------------------------- what does not fit


def test_modules_that_are_gone_are_told(fresh_dynamo, tmp_path, caplog):
    first = trained(fxamp.convert(Experts(number=4), FP16, overrides={"experts.3.0": "deny"}))
    plan = fxamp.report(first).save_plan(tmp_path / "plan.json")
    model = Experts(number=4)
    with torch.no_grad():
        model.experts[3][0].weight.mul_(1e6)
    ranges = fxamp.profile(model, [X], squared, progress=False)
    with caplog.at_level(logging.WARNING, "fxamp"):
        trained(fxamp.convert(Experts(number=3), FP16, plan=plan))
        trained(fxamp.convert(Experts(number=3), FP16, ranges=ranges))
    said = [record.getMessage() for record in caplog.records]
    assert any("the plan of Experts speaks of modules that this model has not (experts.3.0" in text for text in said)
    assert any("by the ranges float16 does not hold" in text and "of experts.3.0" in text for text in said)


def test_a_plan_of_nothing_is_refused(fresh_dynamo, tmp_path):
    with pytest.raises(OptionError, match="no graph of Experts is there yet"):
        fxamp.report(fxamp.convert(Experts(), FP16)).save_plan(tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


def test_the_same_ranges_read_from_a_file_are_no_other_option(tmp_path):
    ranges = fxamp.profile(Net(), [X], squared, progress=False)
    ranges.save(tmp_path / "ranges.json")
    converted = fxamp.convert(Net(), FP16, (X,), opt_level="O2", ranges=ranges)
    assert fxamp.convert(converted, FP16, opt_level="O2", ranges=tmp_path / "ranges.json") is converted


def test_a_diff_looks_at_equal_modules_by_themselves(fresh_dynamo, tmp_path, capsys):
    paths = []
    for denied in (("1", "2"), ("1", "3")):
        overrides = {f"experts.{number}.0": "deny" for number in denied}
        converted = trained(fxamp.convert(Experts(), FP16, overrides=overrides))
        paths.append(str(fxamp.report(converted).save_plan(tmp_path / f"{denied[1]}.json")))
    assert main(["diff", *paths]) == 1
    said = capsys.readouterr().out
    assert "experts.2.0:linear#0: float32 -> low" in said and "experts.3.0:linear#0: low -> float32" in said
    assert "experts.1.0" not in said and "experts.0.0" not in said


def test_a_graph_of_another_title_leaves_nothing_open(tmp_path):
    """What was edited in the plan of training is not held against that of evaluation."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.0), nn.Linear(16, 3))
    converted = fxamp.convert(model, FP16, (X,))
    converted(X)
    converted.eval()(X)
    path = fxamp.report(converted).save_plan(tmp_path / "plan.json")
    read = json.loads(path.read_text())
    training = next(title for title in read["graphs"] if title.endswith("training"))
    assert len(read["graphs"]) == 2
    read["graphs"][training]["2:linear#0"] = "high"
    path.write_text(json.dumps(read))
    again = fxamp.convert(copy.deepcopy(model), FP16, (X,), plan=path).train()
    again(X)
    again.eval()(X)
    report = fxamp.report(again)
    found = {
        report.titles[row.graph].rpartition(", ")[2]: row.precision for row in report.rows if row.module == "2"
        and row.op == "linear"
    }  # fmt: skip
    assert found == {"training": "high", "evaluation": "low"}


def test_a_diff_tells_what_is_stored_otherwise(tmp_path, capsys):
    converted = fxamp.convert(Net(), FP16, (X,), opt_level="O2")
    first = fxamp.report(converted).save_plan(tmp_path / "first.json")
    read, second = json.loads(first.read_text()), tmp_path / "second.json"
    second.write_text(json.dumps(read | {"parameters": read["parameters"] | {"a.weight": "high"}}))
    assert main(["diff", str(first), str(first)]) == 0
    capsys.readouterr()
    assert main(["diff", str(first), str(second)]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["parameters:", "  a.weight: low -> float32"]
    for parameters, said in (({"a.weight": "half"}, "a.weight is 'half'. Allowed: low, high"), ([1], "is a list, not")):
        second.write_text(json.dumps(read | {"parameters": parameters}))
        with pytest.raises(OptionError, match="parameters") as raised:
            load_plan(second)
        assert said in str(raised.value)
