"""What casts, float32 and saved values cost, in bytes; and that the cut finds the cheapest colouring."""

import itertools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxamp import ir
from fxamp.passes import mincut
from fxamp.passes.alias import find_aliases
from fxamp.passes.colour import build_problem, one_variable_each
from fxamp.passes.costs import LAUNCH_BYTES, Costs, kept_by
from fxamp.passes.rules import apply_rules
from tests.language import DECIDE, captured, decided, node_of, policy, run_steps
from tests.passes.test_mincut import cost

X = torch.randn(2, 3, 8, requires_grad=True)


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


OPS = {
    "linear": lambda x, w: F.linear(x, w),
    "matmul": lambda x, w: torch.matmul(x, w),
    "mul": lambda x, w: x * w[0],
    "mul by a constant": lambda x, w: x * w[0].detach(),
    "div": lambda x, w: x / (w[0] + 2),
    "add": lambda x, w: x + w[0],
    "relu": lambda x, w: torch.relu(x),
    "gelu": lambda x, w: F.gelu(x),
    "silu": lambda x, w: F.silu(x),
    "tanh": lambda x, w: torch.tanh(x),
    "sigmoid": lambda x, w: torch.sigmoid(x),
    "exp": lambda x, w: torch.exp(x),
    "log": lambda x, w: torch.log(x.abs() + 1),
    "sqrt": lambda x, w: torch.sqrt(x.abs() + 1),
    "rsqrt": lambda x, w: torch.rsqrt(x.abs() + 1),
    "pow": lambda x, w: x.pow(2),
    "softmax": lambda x, w: torch.softmax(x, -1),
    "layer_norm": lambda x, w: F.layer_norm(x, (8,)),
    "hardswish": lambda x, w: F.hardswish(x),
    "leaky_relu": lambda x, w: F.leaky_relu(x),
    "softplus": lambda x, w: F.softplus(x),
    "cat": lambda x, w: torch.cat((x, x)),
    "mean": lambda x, w: x.mean(-1),
    "sum": lambda x, w: x.sum(-1),
    "max_pool1d": lambda x, w: F.max_pool1d(x, 2),
    "neg": lambda x, w: -x,
}


@pytest.mark.parametrize("name", OPS)
def test_what_an_op_keeps_is_what_autograd_saves(name):
    """Whether its first input and its result are saved, seen by autograd's own hooks."""
    weight = torch.randn(8, 8, requires_grad=True)
    setting = captured(lambda x, w: OPS[name](x, w), X, weight)
    run_steps(DECIDE, setting)
    op = name.split()[0]
    node = node_of(setting, op)
    expected = {
        "input" if value is node.all_input_nodes[0] else "result" if value is node else "other"
        for value in kept_by(node)
    }

    saved: set[int] = set()
    interpreter = torch.fx.Interpreter(torch.fx.GraphModule(setting.captured.root, setting.graph))
    seen: dict[str, torch.Tensor] = {}
    run_node = interpreter.run_node

    def recording(current):
        if current is node:
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.add(storage(t)) or t, lambda t: t)
            with hooks:
                seen["result"] = run_node(current)
            return seen["result"]
        value = run_node(current)
        if current is node.all_input_nodes[0]:
            seen["input"] = value
        return value

    interpreter.run_node = recording
    interpreter.run(X, weight)
    found = {key for key, value in seen.items() if storage(value) in saved}
    assert expected - {"other"} == found


def test_a_cast_costs_a_launch_and_its_bytes_each_way():
    setting = decided(lambda x: torch.relu(x), torch.randn(4, 8))
    x = node_of(setting, "input")
    assert Costs.of(setting.graph).cast(x) == LAUNCH_BYTES + 6 * 32
    setting = decided(lambda x: torch.relu(x), torch.randn(4, 8, requires_grad=True))
    assert Costs.of(setting.graph).cast(node_of(setting, "input")) == 2 * (LAUNCH_BYTES + 6 * 32)


def test_a_packed_weight_costs_its_bytes_and_a_table_a_launch_too():
    setting = decided(
        lambda m, t: m[1](m[0](t)), torch.tensor([1]), module=nn.ModuleList([nn.Embedding(5, 8), nn.Linear(8, 8)])
    )
    prices = Costs.of(setting.graph)
    table, weight = node_of(setting, "parameter"), node_of(setting, "parameter", 1)
    assert prices.cast(weight) == 2 * 6 * 64
    assert prices.cast(table) == 2 * (LAUNCH_BYTES + 6 * 40)


def test_views_and_gathers_cost_nothing_high():
    setting = decided(lambda x: torch.relu(x.view(32)), torch.randn(4, 8))
    prices = Costs.of(setting.graph)
    assert prices.high(node_of(setting, "view")) == 0
    assert prices.high(node_of(setting, "relu")) == 2 * 64


def test_without_shapes_only_casts_cost():
    setting = captured(lambda m, x: F.gelu(m(x)), X, module=nn.Linear(8, 8), preview=True)
    run_steps(DECIDE, setting)
    prices = Costs.of(setting.graph)
    assert prices.high(node_of(setting, "gelu")) == 0 and prices.kept(setting.graph) == []


def problem_of(function, *inputs, **options) -> mincut.Problem:
    setting = captured(function, *inputs, **options)
    run_steps(DECIDE[:3], setting)
    fit = setting.fit_of if hasattr(setting, "fit_of") else setting.is_normal
    ruling = apply_rules(setting.graph, setting.policy, fit)
    aliases = find_aliases(setting.graph)
    variables = one_variable_each(setting.graph, aliases)
    return build_problem(setting.graph, setting.policy, ruling, aliases, variables)


def random_function(seed: int):
    """A small graph of linear, deny, infer and clear ops in random order."""

    def forward(m, x):
        rng = random.Random(seed)
        values = [m[0](x)]
        for _ in range(7):
            kind, value = rng.choice(("linear", "exp", "gelu", "add", "mul", "relu", "view")), rng.choice(values)
            if kind == "linear":
                values.append(m[1](value))
            elif kind in ("add", "mul"):
                values.append(getattr(torch, kind)(value, rng.choice(values)))
            elif kind == "view":
                values.append(value.reshape(value.shape))
            else:
                values.append(getattr(torch, kind, None) or getattr(F, kind))
                values[-1] = values[-1](value)
        return tuple(values[-2:])

    return forward


@pytest.mark.parametrize("seed", range(40))
def test_the_cut_is_the_cheapest_colouring_bytes_and_all(seed):
    """Against all colourings of the free nodes; among equal ones it has the most low nodes."""
    module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    problem = problem_of(random_function(seed), X, module=module, chosen=policy(level="aggressive"))
    found = mincut.solve(problem)
    best = min(
        (price, sum(side == mincut.HIGH for side in sides))
        for sides in itertools.product((mincut.LOW, mincut.HIGH), repeat=len(problem.free))
        if (price := cost(problem, dict(zip(problem.free, sides, strict=True)))) is not None
    )
    assert (cost(problem, found), sum(side == mincut.HIGH for side in found.values())) == best


def test_the_result_does_not_depend_on_the_order_of_anything():
    module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    problem = problem_of(random_function(3), X, module=module)
    turned = mincut.Problem(
        problem.free[::-1],
        dict(reversed(problem.fixed.items())),
        problem.values[::-1],
        problem.high_cost,
        problem.implies[::-1],
    )
    assert mincut.solve(problem) == mincut.solve(turned)


def test_what_is_kept_of_a_graph():
    setting = captured(
        lambda m, x: (m[1](F.gelu(h := m[0](x))), h.exp()), X, module=nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    )
    run_steps(DECIDE, setting)
    kept = {
        ir.mark(entry.value).op: [ir.mark(n).op for n in entry.keepers]
        for entry in Costs.of(setting.graph).kept(setting.graph)
    }
    assert kept["linear"] == ["gelu"] and kept["exp"] == ["exp"] and kept["gelu"] == ["linear"]


def test_no_weight_is_kept_and_nothing_without_gradients():
    """A weight is there anyway."""
    layer = nn.Linear(8, 8)
    setting = decided(lambda m, x: torch.relu(m(x)), X, module=layer)
    assert kept_by(node_of(setting, "linear")) == [node_of(setting, "input")]
    layer.requires_grad_(False)
    setting = decided(lambda m, x: torch.relu(m(x)), X.detach(), module=layer)
    assert kept_by(node_of(setting, "linear")) == kept_by(node_of(setting, "relu")) == []


def test_running_high_costs_twice_with_a_backward():
    prices = {}
    for with_gradients in (True, False):
        setting = decided(lambda x: torch.relu(x), torch.randn(4, 8, requires_grad=with_gradients))
        prices[with_gradients] = Costs.of(setting.graph).high(node_of(setting, "relu"))
    assert prices == {True: 2 * 2 * 64, False: 2 * 64}


def test_a_low_value_that_is_read_inside_saves_its_bytes_in_forward():
    setting = decided(lambda x: torch.relu(x), torch.randn(4, 8, requires_grad=True))
    assert Costs.of(setting.graph).inside(node_of(setting, "input")) == LAUNCH_BYTES + 6 * 32 - 2 * 32
    setting = decided(lambda x: torch.relu(x), torch.randn(4, 8))
    assert Costs.of(setting.graph).inside(node_of(setting, "input")) == 0


@pytest.mark.parametrize("preview", [False, True])
def test_a_tied_table_is_cast_with_the_others(preview):
    """One that is gathered from alone is cast by itself, and costs more than what gathers from it in float32."""
    tables = nn.ModuleList([nn.Embedding(5, 8), nn.Embedding(5, 8)])

    def forward(m, t):
        return F.linear(m[0](t) + m[1](t), m[0].weight)

    setting = captured(forward, torch.tensor([1]), module=tables, preview=preview)
    run_steps(DECIDE, setting)
    prices = Costs.of(setting.graph)
    weights = {str(n.target): prices.cast(n) for n in setting.graph.nodes if ir.is_weight(n)}
    tied, alone = (LAUNCH_BYTES + 1,) * 2 if preview else (2 * 6 * 40, 2 * (LAUNCH_BYTES + 6 * 40))
    assert weights == {"module.0.weight": tied, "module.1.weight": alone}


def test_the_only_keeper_of_a_value_pays_for_it():
    module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    setting = captured(lambda m, x: m[1](F.gelu(m[0](x))), X, module=module)
    run_steps(DECIDE, setting)
    gelu = node_of(setting, "gelu")
    (price,) = problem_of(lambda m, x: m[1](F.gelu(m[0](x))), X, module=module).high_cost.values()
    assert price == Costs.of(setting.graph).high(gelu) + 2 * X.numel()


def precision_of_relus(count: int, rows: int) -> set[str]:
    """Of relus one after another, before and after which somebody reads float32."""

    def forward(m, x):
        h = last = m(x)
        for _ in range(count):
            last = torch.relu(last)
        return h.exp(), last.exp()

    with torch.device("meta"):
        setting = captured(forward, torch.empty(rows, 8), module=nn.Linear(8, 8))
    run_steps(DECIDE, setting)
    return {ir.mark(node).precision for node in setting.graph.nodes if ir.mark(node).op == "relu"}


def test_a_launch_is_worth_the_bytes_of_a_few_small_tensors():
    """Ten small relus move less in float32 than one more cast and its gradient's are worth; ten large ones more."""
    assert precision_of_relus(10, rows=512) == {"high"}
    assert precision_of_relus(10, rows=1 << 19) == {"low"}
    assert precision_of_relus(1, rows=1 << 19) == {"high"}
