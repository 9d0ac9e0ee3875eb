"""A plan finds its nodes again after the code changed, and gives no decision to the wrong one."""

import random
import warnings

import pytest
import torch
from review_cases import FP16, Two
from torch import nn

import fxamp
from fxamp.review.match import Item, Place, match
from fxamp.review.plan import Plan, load_plan, plan_of
from fxamp.review.plan_diff import diff_plans
from fxamp.review.report import report

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def items(text, side="old"):
    """ "exp.a:high add.b" -> nodes called by their number: op, line, decision; `module/op.line` names a module."""
    made = []
    for number, word in enumerate(text.split()):
        word, _, decided = word.partition(":")
        module, _, rest = word.rpartition("/")
        op, _, line = rest.partition(".")
        made.append(Item(side, f"{number}", Place(module, op, line, "", ""), decided or f"d{number}"))
    return made


def pairs(old, new):
    found, unclear = match(items(old), items(new, "new"))
    return " ".join(f"{found.get(str(number), '-')}" for number in range(len(new.split()))), len(unclear)


TABLE = [
    # old, new, which old node each new one is, ambiguous old nodes
    ("lin.a exp.b add.c", "lin.a exp.b add.c", "0 1 2", 0),
    ("lin.a exp.b add.c", "lin.a exp.x exp.b add.c", "0 - 1 2", 0),  # an equal op before it
    ("lin.a exp.x exp.b add.c", "lin.a exp.b add.c", "0 2 3", 0),  # taken out again
    ("exp.a exp.b", "exp.b exp.a", "1 0", 0),  # changed places
    ("lin.a exp.b add.c", "lin.a exp.edited add.c", "0 1 2", 0),  # its line was edited
    ("lin.a exp.b add.c", "lin.a sin.b add.c", "0 - 2", 0),
    ("exp.a exp.a", "exp.a exp.a exp.a", "- - -", 2),  # a longer loop: any of three
    ("exp.a:low exp.a:low exp.a:low", "exp.a exp.a", "0 1", 0),  # the same decision, whichever is gone
    ("exp.a:low exp.a:low exp.a:high", "exp.a exp.a", "- -", 3),
    ("exp.a:low", "exp.a exp.a", "- -", 1),
    ("exp.a exp.a", "exp.a exp.a", "0 1", 0),
    ("exp.a mul.b exp.c", "exp.x mul.b exp.y exp.z", "0 1 - -", 0),  # which of y and z was c?
    ("exp.a mul.b", "mul.b exp.x", "1 -", 0),  # behind what it stood before: another one
    ("lin. exp. add.", "lin. exp. exp. add.", "0 - - 2", 1),  # without lines nothing tells them apart
    ("lin. exp. add.", "lin. exp. add.", "0 1 2", 0),
    ("m/exp.a n/exp.b", "m/exp.a k/exp.b", "0 1", 0),  # n is called k now
    ("m/exp.a n/exp.b", "n/exp.b m/exp.a", "1 0", 0),
    ("m/exp.a n/exp.b", "m/exp.a k/exp.b l/exp.b", "0 - -", 0),  # which of the two is n?
    ("l0/exp.a l1/exp.a l2/exp.a", "b0/exp.a b1/exp.a b2/exp.a", "0 1 2", 0),
    ("l0/exp.a l1/exp.a", "b0/exp.a b1/exp.a b2/exp.a", "- - -", 0),
    ("", "exp.a", "-", 0),
]


@pytest.mark.parametrize("old, new, expected, unclear", TABLE, ids=[f"{old} -> {new}" for old, new, *_ in TABLE])
def test_nodes_are_found_again(old, new, expected, unclear):
    assert pairs(old, new) == (expected, unclear)


def test_nothing_is_given_to_a_node_of_another_line_when_both_are_there():
    """Random edits of random sequences: a node whose line is in both, once, is itself or nothing."""
    rng = random.Random(0)
    for _ in range(300):
        lines = [f"{rng.choice(('exp', 'mul', 'add'))}.{number}" for number in range(rng.randint(1, 8))]
        edited = [line for line in lines if rng.random() < 0.8]
        for number in range(rng.randint(0, 3)):
            edited.insert(rng.randint(0, len(edited)), f"{rng.choice(('exp', 'mul', 'add'))}.new{number}")
        if rng.random() < 0.3:
            rng.shuffle(edited)
        found, unclear = match(items(" ".join(lines)), items(" ".join(edited), "new"))
        assert not unclear
        for name, was in found.items():
            line = edited[int(name)]
            assert line not in lines or lines[int(was)] == line
        kept = [line for line in edited if line in lines]
        assert {lines[int(was)] for was in found.values()} >= set(kept)
        assert len(set(found.values())) == len(found)


# ------------------------------------------------------------------------------------------------ on real models


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        y = torch.tanh(y)
        z = torch.tanh(self.b(y))
        return z + y


class Inserted(Plain):
    def forward(self, x):
        y = self.a(x)
        y = torch.tanh(torch.sin(y))
        w = torch.tanh(y * 0.5)
        z = torch.tanh(self.b(y))
        return z + y + w


class Renamed(nn.Module):
    def __init__(self, inner=Plain):
        super().__init__()
        self.inner = inner()
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.inner(x))


class RenamedAgain(nn.Module):
    def __init__(self):
        super().__init__()
        self.core = Plain()
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.core(x))


def converted(model, **more):
    return fxamp.convert(model, FP16, (X,), **more)


def decided(model, line):
    """Precisions of the nodes of a line, by op."""
    rows = [row for row in report(model).rows if not row.role and row.source]
    return {(row.module, row.op): row.precision for row in rows if line in open(row.source.rpartition(":")[0])
            .read().splitlines()[int(row.source.rpartition(":")[2]) - 1]}  # fmt: skip


def test_an_equal_op_put_in_before_does_not_shift_the_decisions(tmp_path):
    plan = report(converted(Plain(), overrides={"tanh": "deny"})).save_plan(tmp_path / "plan.json")
    before = decided(converted(Plain(), plan=plan), "self.b(y)")
    assert (
        before["", "tanh"] == "low"
        and decided(converted(Plain(), plan=plan), "y = torch.tanh(y)")["", "tanh"] == "high"
    )
    with pytest.warns(UserWarning) as said:
        after = converted(Inserted(), plan=plan)
    assert decided(after, "self.b(y)") == before
    assert decided(after, "y * 0.5")["", "tanh"] == decided(converted(Inserted()), "y * 0.5")["", "tanh"]
    assert ":tanh#1 is in the model and not in the plan" in str(said[0].message)
    assert ":sin#0 is in the model and not in the plan" in str(said[0].message)


class Product(Plain):
    def forward(self, x):
        y, z = self.a(x), self.b(x)
        w = y * z
        return self.a(w) + y


class Square(Plain):
    def forward(self, x):
        y, z = self.a(x), self.b(x)
        w = z * z
        return self.a(w) + y


class Swapped(Plain):
    def forward(self, x):
        y, z = self.a(x), self.b(x)
        w = z * y
        return self.a(w) + y


def test_an_edited_line_is_left_to_the_rules_where_the_plan_runs_it_low(tmp_path):
    """Between the same neighbours, of the same ops, and yet a square, which overflows from 256."""
    plan = report(converted(Product())).save_plan(tmp_path / "plan.json")
    assert decided(converted(Product(), plan=plan), "y * z")["", "mul"] == "low"
    with pytest.warns(UserWarning, match=":mul#0, low in the plan, stands on a line that was edited"):
        edited = converted(Square(), plan=plan)
    assert decided(edited, "z * z")["", "mul"] == "high"
    high = report(converted(Product(), overrides={"mul": "deny"})).save_plan(tmp_path / "high.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decided(converted(Swapped(), plan=high), "z * y")["", "mul"] == "high"  # which no rule would say


def test_a_renamed_module_keeps_its_decisions(tmp_path):
    plan = report(converted(Renamed(), overrides={"inner.b": "deny"})).save_plan(tmp_path / "plan.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = converted(RenamedAgain(), plan=plan)
    rows = {row.module: row.precision for row in report(again).rows if row.op == "linear"}
    assert rows == {"core.a": "low", "core.b": "high", "head": "low"}


A, B, C = nn.Linear, nn.Softmax, nn.Tanh


def stack(kinds):
    made = {A: lambda: nn.Linear(8, 8), B: lambda: nn.Softmax(-1), C: nn.Tanh}
    return nn.Sequential(*(made[kind]() for kind in kinds))


@pytest.mark.parametrize(
    "old, denied, new, found",
    [
        ([A, C, A, B, A], "2", [A, C, C, A, B, A], "3"),  # one was put in before it
        ([A, C, A, B, A], "4", [A, C, C, A, B, A], "5"),
        ([A, B, C, A], "3", [A, B, A], "2"),  # one was taken out
        ([A, B, A], "0", [C, C, A, B, A], "2"),
        ([A, B, A], "2", [A, B, A, C], "2"),
        ([A, C], "0", [B, A, A, C], None),  # which of both it was is not told
        ([A, A, C], "1", [A, A, C], "1"),
    ],
)
def test_a_module_put_into_a_sequential_does_not_shift_the_decisions(old, denied, new, found, tmp_path):
    plan = report(converted(stack(old), overrides={denied: "deny"})).save_plan(tmp_path / "plan.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = report(converted(stack(new), plan=plan))
    assert [row.module for row in again.rows if row.op == "linear" and row.precision == "high"] == [found] * bool(found)


def test_layers_that_are_called_in_another_order_keep_their_decisions(tmp_path):
    class Ordered(nn.Module):
        def __init__(self, order):
            super().__init__()
            self.layers, self.order = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), order

        def forward(self, x):
            for number in self.order:
                x = self.layers[number](x)
            return x

    plan = report(converted(Ordered((0, 1, 2)), overrides={"layers.0": "deny"})).save_plan(tmp_path / "plan.json")
    for order in [(1, 0, 2), (2, 1, 0), (1, 2, 0)]:
        rows = report(converted(Ordered(order), plan=plan)).rows
        assert [row.module for row in rows if row.op == "linear" and row.precision == "high"] == ["layers.0"]


def test_other_sizes_are_the_same_nodes(tmp_path):
    plan = report(converted(Plain(), overrides={"tanh": "deny"})).save_plan(tmp_path / "plan.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = fxamp.convert(Plain(), FP16, (torch.randn(16, 8),), plan=plan)
    assert decided(again, "y = torch.tanh(y)")["", "tanh"] == "high"


def test_a_loop_that_grew_is_ambiguous_and_said_to_be(tmp_path):
    def loop(count):
        def function(m, x):
            x = m.a(x)
            for _ in range(count):
                x = torch.nn.functional.gelu(x)
            return x

        return Two(function)

    first = converted(loop(3), overrides={"gelu_1": "deny"})
    plan = report(first).save_plan(tmp_path / "plan.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted(loop(3), plan=plan)
    with pytest.warns(UserWarning, match=r":gelu#1 of the plan may be any of 3 nodes of the model"):
        converted(loop(4), plan=plan)


def test_in_place_ops_are_found_again(tmp_path):
    def function(m, x):
        y = m.a(x)
        y.mul_(0.5)
        return m.b(y.add_(1.0))

    plan = report(converted(Two(function))).save_plan(tmp_path / "plan.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted(Two(function), plan=plan)


def test_several_graphs_of_dynamo_keep_their_decisions(tmp_path):
    class Broken(Plain):
        def forward(self, x):
            y = torch.tanh(self.a(x))
            torch._dynamo.graph_break()
            return torch.tanh(self.b(y))

    torch._dynamo.reset()
    first = converted(Broken(), capture="dynamo", overrides={"b": "deny"})
    plan = load_plan(report(first).save_plan(tmp_path / "plan.json"))
    assert len(plan.graphs) == 2
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the plan of")
        again = converted(Broken(), capture="dynamo", plan=plan)
    rows = [(row.module, row.precision) for row in report(again).rows if row.op == "linear"]
    assert rows == [("a", "low"), ("b", "high")]
    torch._dynamo.reset()


def test_plans_of_the_first_format_are_read(tmp_path):
    plan = plan_of(report(converted(Plain(), overrides={"tanh": "deny"})))
    old = Plan(**{**vars(plan), "places": {}})
    again = converted(Plain(), plan=old)
    assert decided(again, "y = torch.tanh(y)")["", "tanh"] == "high"
    (tmp_path / "plan.json").write_text(
        '{"fxamp_plan": 1, "model": "Plain", "low_dtype": "float16", "opt_level": "O1", "level": "balanced", '
        '"casts": 1, "weight_casts": 4, "graphs": {"g": {"a:linear#0": "high"}}}'
    )
    assert load_plan(tmp_path / "plan.json").graphs == {"g": {"a:linear#0": "high"}}


def test_a_diff_sees_the_same_nodes():
    old = plan_of(report(converted(Plain(), overrides={"tanh": "deny"})))
    new = plan_of(report(converted(Inserted())))
    changes = [str(change) for change in diff_plans(old, new)]
    assert ":tanh#1: - -> float32" in changes, "the one that was put in"
    assert not any("linear" in text or "tanh#2" in text for text in changes), changes
