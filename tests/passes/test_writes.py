"""No write is ever lost: programs of views and writes do in mixed precision exactly what they do in float32.

All numbers are small integers (|v| <= 64) and all weights signed permutations, so every value is exact in float16
and in bfloat16, and results are compared bit by bit.
"""

import operator

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fxamp import ir
from fxamp.inplace import mutated
from tests.language import (
    BF16,
    DECIDE,
    FP16,
    FP32,
    PIPELINE,
    SETTLE_WRITES,
    assert_precision,
    assert_rewrites,
    assert_same,
    assert_untouched,
    captured,
    decided,
    policy,
    run_graph,
    run_steps,
)

SWAP = torch.tensor([[0.0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, -1, 0]])
SMALL = (-8, 8)


def _mask_write(v, i, j):
    v[i][v[j] > 0] = 1.0


def _row_write(v, i, j):
    v[i][1] = v[j][2]


def _column_write(v, i, j):
    v[i][:, 0] = v[j][1]


def _item_write(parts):
    parts[1].neg_()


def _no_grad_write(v, i, j):
    with torch.no_grad():
        v[i].sub_(v[j]).clamp_(*SMALL)


def _in_place_operator(function):
    def step(v, i, j):
        v[i] = function(v[i], v[j])
        v[i].clamp_(*SMALL)

    return step


def _append(make):
    return lambda v, i, j: v.append(make(v[i], v[j]))


STEPS = {
    "linear": _append(lambda a, b: F.linear(a, SWAP)),
    "matmul": _append(lambda a, b: a.clamp(-2, 2) @ b.clamp(-2, 2)),
    "add": _append(lambda a, b: (a + b).clamp(*SMALL)),
    "mul": _append(lambda a, b: (a * b.sign()).clamp(*SMALL)),
    "relu": _append(lambda a, b: a.relu()),
    "cumsum": _append(lambda a, b: a.cumsum(0).clamp(*SMALL)),
    "cat": _append(lambda a, b: torch.cat((a[:2], b[2:]))),
    "clone": _append(lambda a, b: a.clone()),
    "zeros": _append(lambda a, b: a.new_zeros(4, 4)),
    "view": _append(lambda a, b: a.view(16).view(4, 4)),
    "transpose": _append(lambda a, b: a.t()),
    "reshape": _append(lambda a, b: torch.reshape(input=a, shape=(4, 4))),
    "detach": _append(lambda a, b: a.detach()),
    "float": _append(lambda a, b: a.float()),
    "half": _append(lambda a, b: a.half().neg_().float()),
    "broadcast": _append(lambda a, b: torch.broadcast_tensors(a, b)[1]),
    "rejoined": _append(lambda a, b: torch.cat(b.chunk(2))),
    "where": _append(lambda a, b: torch.where(a > b, a, b)),
    "relu_": lambda v, i, j: v[i].relu_(),
    "add_": lambda v, i, j: v[i].add_(v[j]).clamp_(*SMALL),
    "pow_": lambda v, i, j: v[i].pow_(2).clamp_(*SMALL),
    "masked_fill_": lambda v, i, j: v[i].masked_fill_(v[j] > 2, 3.0),
    "copy_": lambda v, i, j: v[i].copy_(v[j]),
    "fill_": lambda v, i, j: v[i].fill_(2.0),
    "addmm_": lambda v, i, j: v[i].addmm_(v[j].clamp(-2, 2), SWAP).clamp_(*SMALL),
    "out": lambda v, i, j: torch.neg(v[j], out=v[i]),
    "mm out": lambda v, i, j: torch.mm(v[j].clone(), SWAP, out=v[i]),
    "relu inplace": lambda v, i, j: F.relu(v[i], inplace=True),
    "iadd": _in_place_operator(operator.iadd),
    "imul": _in_place_operator(lambda a, b: operator.imul(a, b.sign())),
    "imatmul": lambda v, i, j: v.append(operator.imatmul(v[i].clamp_(-2, 2), SWAP)),
    "set row": _row_write,
    "set column": _column_write,
    "set mask": _mask_write,
    "chunk": lambda v, i, j: _item_write(v[i].chunk(2)),
    "split": lambda v, i, j: _item_write(torch.split(v[i], 1, dim=1)),
    "unbind": lambda v, i, j: _item_write(v[i].unbind(0)),
    "no_grad": _no_grad_write,
    "index_copy_": lambda v, i, j: v[i].index_copy_(0, torch.tensor([2]), v[j][:1].clone()),
}


class Writes(nn.Module):
    """A random program over two inputs, a buffer and a fresh value; every value it made is an output."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.register_buffer("state", torch.arange(16.0).view(4, 4) % 5 - 2)

    def forward(self, x, y):
        values = [x, y, self.state, F.linear(x, SWAP)]
        for name, i, j in self.steps:
            STEPS[name](values, i % len(values), j % len(values))
        return tuple(value.clone() for value in values)


def check(steps, chosen):
    """Run a program as it is and rewritten, and compare outputs, inputs and the buffer."""
    x, y = torch.arange(16.0).view(4, 4) % 7 - 3, torch.arange(16.0).flip(0).view(4, 4) % 4 - 1
    module = Writes(steps)
    plain = Writes(steps)
    given = (x.clone(), y.clone())
    try:
        expected = plain(*given)
    except RuntimeError:  # overlapping memory, a view that cannot be: no program
        hypothesis.reject()
    setting = captured(lambda m, a, b: m(a, b), x, y, module=module, chosen=chosen)
    run_steps(PIPELINE, setting)
    found, values, state = run_graph(setting, x, y)
    assert_same(found, expected)
    assert_same(values, given)
    assert_same(state["module.state"], plain.state)


programs = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=10
)


@pytest.mark.parametrize("level", ["balanced", "aggressive", "strict"])
@pytest.mark.parametrize("low", [FP16, BF16])
def test_writes_are_never_lost(level, low):
    @hypothesis.settings(max_examples=80, deadline=None, derandomize=True, database=None)
    @hypothesis.given(programs)
    def run(steps):
        check(steps, policy(low, level=level))

    run()


@pytest.mark.parametrize("name", sorted(STEPS))
def test_every_kind_of_step(name):
    """Each step on the fresh GEMM result, on an input, on a buffer and on a view, then read by a GEMM and a deny."""
    for target in (3, 0, 2):
        tail = [("linear", target, 0), ("cumsum", target, 0), ("linear", 4, 0)]
        check([("transpose", target, 0), (name, target, 1), *tail], policy())
        check([("view", target, 0), ("linear", 4, 0), (name, 4, 1), *tail], policy())


@pytest.mark.parametrize("override", ["allow", "deny", "infer", "clear"])
def test_overrides_lose_no_write_either(override):
    @hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @hypothesis.given(programs)
    def run(steps):
        check(steps, policy(overrides={"module": override}))

    run()


# ------------------------------------------------------------------------------------------------ examples

X, W = torch.rand(4, 4), torch.rand(4, 4)


def test_a_low_result_that_a_deny_op_writes_is_copied_first():
    def before(x, w):
        y = F.linear(x, w)
        y.exp_()
        return y + 1.0

    def after(x, w):
        y = F.linear(x, w).clone()
        y.exp_()
        return y + 1.0

    assert_rewrites((*DECIDE[:2], SETTLE_WRITES), before, after, X, W)


def test_a_low_result_that_an_infer_op_writes_stays():
    def before(x, w):
        return F.linear(F.relu(F.linear(x, w), inplace=True).mul_(0.5), w)

    assert_untouched((*DECIDE[:2], SETTLE_WRITES), before, X, W)


@pytest.mark.parametrize(
    "before, after",
    [
        (lambda x, w: x.addmm_(w, w) + 1.0, lambda x, w: x.copy_(x.addmm(w, w)) + 1.0),
        (lambda x, w: torch.mm(w, w, out=x) + 1.0, lambda x, w: x.copy_(torch.mm(w, w)) + 1.0),
    ],
)
def test_a_gemm_in_place_on_the_caller_s_value_is_computed_aside(before, after):
    assert_rewrites((*DECIDE[:2], SETTLE_WRITES), before, after, X, W)


def test_a_cast_is_made_again_after_a_write():
    def before(x, w, y):
        first = F.linear(y, w)
        y.add_(1.0)
        return first + F.linear(y, w)

    def after(x, w, y):
        small, weight = y.to(BF16), w.to(BF16)
        first = F.linear(small, weight)
        y.add_(1.0)
        again = y.to(BF16)
        return (first + F.linear(again, weight)).to(FP32)

    assert_rewrites(PIPELINE, before, after, X, W, X)


def test_a_cast_made_without_gradients_is_not_shared_with_a_reader_that_needs_them():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4, 4))

        def forward(self, x):
            with torch.no_grad():
                target = F.linear(x, self.weight)
            return F.linear(x, self.weight) - target

    module = Two()
    setting = captured(lambda m, x: m(x), X, module=module)
    run_steps(PIPELINE, setting)
    casts = [node for node in setting.graph.nodes if ir.mark(node).role == "weight cast"]
    assert len(casts) == 2
    result, _, _ = run_graph(setting, X)
    result.sum().backward()
    assert module.weight.grad is not None


@pytest.mark.parametrize(
    "view", [lambda v: v[:1], lambda v: v.unsqueeze(0), lambda v: v.to(FP32), lambda v: F.relu_(v), lambda v: v.mT]
)
def test_what_is_written_into_a_result_is_seen_in_the_one_it_is_a_view_of(view):
    def function(x, w):
        value = F.linear(x, w)
        part = view(value)
        return value, part, F.linear(part, w), F.linear(value, w)

    x = torch.arange(16.0).view(4, 4)
    setting = captured(function, x, SWAP)
    run_steps(PIPELINE, setting)
    results, expected = run_graph(setting, x, SWAP)[0], function(x, SWAP)
    for each in (results, expected):
        each[1].add_(1)
    assert_same(results[:2], expected[:2])


@pytest.mark.parametrize("level", ["balanced", "aggressive"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_result_that_is_a_view_of_an_input_stays_one(place, level):
    def function(*inputs):
        part = inputs[place].mT
        return part, F.linear(part, inputs[1]), F.linear(*inputs)

    setting = captured(function, X.clone(), W.clone(), chosen=policy(level=level))
    run_steps(PIPELINE, setting)
    inputs = X.clone(), W.clone()
    part = run_graph(setting, *inputs)[0][0]
    assert torch.equal(part, inputs[place].mT)  # and not rounded


def test_results_side_by_side_in_one_memory_stay_low():
    """Keys and values of one projection, say: a write into one is nothing to the other."""
    setting = captured(lambda x, w: (*(parts := F.linear(x, w).chunk(2)), F.linear(parts[0], w)), X.clone(), W.clone())
    run_steps(PIPELINE, setting)
    assert_precision(setting, {"chunk": "low", "getitem": "low"})


def test_an_inplace_module_of_a_graph_writes():
    """nn.Dropout stays a call_module; its `inplace` is read from the module."""
    setting = captured(lambda m, x, w: m(F.linear(x, w)), X, W, module=nn.Dropout(0.0, inplace=True))
    run_steps(DECIDE, setting)
    dropout = next(node for node in setting.graph.nodes if ir.mark(node).op == "dropout")
    assert mutated(dropout) == [dropout.args[0]]


@pytest.mark.parametrize(
    "function, written",
    [
        (lambda x, w: x.add_(w), 0),
        (lambda x, w: operator.iadd(x, w), 0),
        (lambda x, w: operator.imatmul(x, w), None),  # tensors have no __imatmul__: x @= w makes a new value
        (lambda x, w: torch.ops.aten.add_.Tensor(x, w), 0),
        (lambda x, w: torch.add(x, x, out=w), 1),
        (lambda x, w: F.relu(w, True), 1),
        (lambda x, w: F.leaky_relu(w, inplace=True), 1),
        (lambda x, w: F.batch_norm(x, w[0], w[1], training=True), None),
        (lambda x, w: F.embedding(torch.tensor([1]), w, max_norm=1.0), 1),
        (lambda x, w: torch.add(x, w), None),
    ],
)
def test_what_counts_as_a_write(function, written):
    setting = captured(function, X.clone(), W.clone())
    inputs = [node for node in setting.graph.nodes if node.op == "placeholder"]
    found = {target for node in setting.graph.nodes for target in mutated(node)}
    assert found & set(inputs) == (set() if written is None else {inputs[written]})


def test_a_size_that_is_counted_on_is_no_write():
    def function(x, w):
        y = F.linear(x, w)
        rows = y.shape[0]
        rows += 1
        stream = torch.cat([y, torch.ones(rows, 4)])
        stream = stream + F.linear(F.layer_norm(stream, (4,)), w)
        return stream + F.linear(F.layer_norm(stream, (4,)), w)

    setting = decided(function, X, W, chosen=policy(low=BF16))
    assert not [node for node in setting.graph.nodes if mutated(node)]
    assert_precision(setting, {"linear": "low list", "cat": "high stream"})
