"""Values are compared as they come: none is rounded for a comparison."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves as leaves

import fxamp

LOW = (torch.float16, torch.bfloat16)
OPS = ("lt", "le", "gt", "ge", "eq", "ne")


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.function = nn.Linear(64, 64, bias=False), function
        self.register_buffer("grid", torch.arange(-3.0, 9.0) * 0.4 - 1)

    def forward(self, x):
        return self.function(self.a(x).unsqueeze(-1), self.grid)


HALF_OPEN = {
    "&": lambda y, g: ((y >= g[:-1]) & (y < g[1:])).float(),
    "logical_and": lambda y, g: torch.logical_and(y >= g[:-1], y < g[1:]).float(),
    "product": lambda y, g: (y >= g[:-1]).float() * (y < g[1:]).float(),
    "dtype of the value": lambda y, g: ((y >= g[:-1]) & (y < g[1:])).to(y.dtype),
    "where": lambda y, g: torch.where(y >= g[:-1], torch.where(y < g[1:], 1.0, 0.0), 0.0),
    "not": lambda y, g: ((y >= g[:-1]) & ~(y >= g[1:])).float(),
    "functions": lambda y, g: (torch.ge(y, g[:-1]) & torch.lt(input=y, other=g[1:])).float(),
    "the other way round": lambda y, g: ((g[:-1] <= y) & (g[1:] > y)).float(),
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("level", ["strict", "balanced", "aggressive"])
@pytest.mark.parametrize("function", HALF_OPEN.values(), ids=HALF_OPEN)
def test_each_value_is_in_one_half_open_interval_as_under_autocast(function, level, dtype):
    torch.manual_seed(0)
    model, x = Net(function), torch.randn(512, 64)
    with torch.autocast("cpu", dtype):
        expected = model(x)
    found = fxamp.convert(copy.deepcopy(model), dtype, (x,), level=level)(x)
    assert torch.equal(found, expected.float())
    values = model.a(x)
    inside = (values > -2.1) & (values < 2.1)  # the outermost bounds are -2.2 and 2.2
    assert inside.sum() > 30_000 and (found.sum(-1)[inside] == 1).all()


@pytest.mark.parametrize("dtype", LOW)
def test_positions_are_told_apart(dtype):
    model, x = Net(lambda y, g: torch.arange(1000.0) == torch.round(y[:, :1, 0].abs() * 300)), torch.randn(64, 64)
    with torch.autocast("cpu", dtype):
        expected = model(x)
    assert torch.equal(fxamp.convert(model, dtype, (x,))(x), expected)


@pytest.mark.parametrize("op", OPS)
def test_operands_of_two_precisions_need_no_cast(op):
    x = torch.randn(8, 64)
    report = fxamp.report(fxamp.convert(Net(lambda y, g: getattr(torch, op)(y, g)), torch.float16, (x,)))
    assert report.casts == 1  # of x
    (row,) = [row for row in report.rows if row.op == op]
    assert row.precision == "none" and row.reason == "reads its operands as they come"


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("op", OPS)
def test_a_comparison_that_writes_into_a_value_gives_what_it_gave(op, dtype):
    def function(y, g):
        z = y * torch.ones(12)
        getattr(z, op + "_")(g)
        return z

    torch.manual_seed(0)
    model, x = Net(function), torch.randn(32, 64)
    found, expected = fxamp.convert(copy.deepcopy(model), dtype, (x,))(x), model(x)
    assert found.dtype == torch.float32 and (found != expected).float().mean() < 0.01


NUMBERS = {
    "user cast": lambda y, head: (p := y.float().sigmoid(), head(p), p > 0.5)[1:],
    "deny": lambda y, head: (p := y.exp(), head(p), p.le(1.0), p < 2.0)[1:],
    "softmax": lambda y, head: (p := y.softmax(-1), head(p), torch.ge(p, 1 / 64), p != 1.0)[1:],
    "input": lambda y, head: (p := y * 1.0, head(p), p < 0.3)[1:],
}


class WithHead(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.head, self.function = nn.Linear(64, 64), nn.Linear(64, 64), function

    def forward(self, x):
        return self.function(x if self.function is NUMBERS["input"] else self.a(x), self.head)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("level", ["strict", "balanced", "aggressive"])
@pytest.mark.parametrize("function", NUMBERS.values(), ids=NUMBERS)
def test_a_float32_value_that_a_gemm_reads_low_is_not_compared_low(function, level, dtype):
    torch.manual_seed(0)
    model, x = WithHead(function), torch.randn(512, 64)
    converted = fxamp.convert(copy.deepcopy(model), dtype, (x,), level=level)
    assert {row.precision for row in fxamp.report(converted).rows if row.op in OPS} == {"none"}
    with torch.autocast("cpu", dtype):
        autocast = model(x)[1:]
    for exact, ours, theirs in zip(model(x)[1:], converted(x)[1:], autocast, strict=True):
        assert (ours != exact).sum() <= 1.2 * (theirs != exact).sum() + 3


POSITIONS = {
    "argmax": lambda p: p.argmax(-1),
    "argmin": lambda p: torch.argmin(p, dim=-1),
    "argsort": lambda p: p.argsort(-1),
    "topk": lambda p: p.topk(4)[1],
    "values too": lambda p: torch.topk(p, 4),
    "sort": lambda p: p.sort(-1).indices,
    "max": lambda p: p.max(-1)[1],
    "min": lambda p: torch.min(p, dim=-1).indices,
    "median": lambda p: p.median(-1)[1],
    "kthvalue": lambda p: p.kthvalue(3)[1],
    "cummax": lambda p: p.cummax(-1)[1],
    "nonzero": lambda p: p.count_nonzero(-1),
    "integers": lambda p: p.long(),
    "bool": lambda p: p.bool(),
    "isin": lambda p: torch.isin(p, torch.linspace(0, 1, 33)),
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("level", ["strict", "balanced", "aggressive"])
@pytest.mark.parametrize("function", POSITIONS.values(), ids=POSITIONS)
def test_positions_are_those_of_the_value_and_not_of_its_low_copy(function, level, dtype):
    """The low copy is there, for the GEMM: reading it would cost nothing."""

    class Net(WithHead):
        def forward(self, x):
            p = self.a(x).float().sigmoid()
            return self.head(p), function(p)

    torch.manual_seed(0)
    model, x = Net(None), torch.randn(512, 64)
    converted = fxamp.convert(copy.deepcopy(model), dtype, (x,), level=level)
    with torch.autocast("cpu", dtype):
        expected = model(x)[1]
    for ours, theirs in zip(leaves(converted(x)[1]), leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype and (ours != theirs).float().mean() < 1e-3


@pytest.mark.parametrize("has_gradient", [False, True])
def test_values_alone_may_be_picked_low(has_gradient):
    """The largest of rounded values is the rounded largest; its gradient goes to one of those that are equal then."""
    x = torch.randn(8, 64)
    model = WithHead(lambda y, head: head(y.float().sigmoid().sort(-1)[0])).requires_grad_(has_gradient)
    rows = fxamp.report(fxamp.convert(model, torch.bfloat16, (x,))).rows
    assert [row.precision for row in rows if row.op == "sort"] == ["high" if has_gradient else "low"]


PICKS = {
    "sort": lambda v: v.sort(-1)[0],
    "topk": lambda v: v.topk(64, -1)[0],
    "median": lambda v: v.median(-1, keepdim=True)[0] + v.detach() * 0,
    "kthvalue": lambda v: v.kthvalue(3, -1, keepdim=True)[0] + v.detach() * 0,
    "max": lambda v: v.max(-1, keepdim=True).values + v.detach() * 0,
    "cummax": lambda v: v.cummax(-1)[0],
    "pool": lambda v: nn.functional.max_pool1d(v[:, None], 3, 1, 1)[:, 0],
}


@pytest.mark.parametrize("level", ["strict", "balanced"])
@pytest.mark.parametrize("pick", PICKS.values(), ids=PICKS)
def test_a_gradient_goes_to_the_place_that_was_picked_in_float32(pick, level):
    """Of values that are nearly equal: rounded, they are, and another one of them gets the gradient."""

    class Pick(WithHead):
        def forward(self, x):
            return self.head(pick(1 + 1e-3 * (x * self.weight)))

    torch.manual_seed(0)
    model, x = Pick(None), torch.randn(32, 64)
    model.weight = nn.Parameter(torch.rand(64))
    given, wanted = (copy.deepcopy(model) for _ in range(2))
    found = fxamp.convert(given, torch.bfloat16, (x,), level=level)
    direction = torch.randn(32, 64)
    (found(x) * direction).sum().backward()
    (wanted(x) * direction).sum().backward()
    distance = (found.weight.grad - wanted.weight.grad).norm() / wanted.weight.grad.norm()
    assert distance < 0.02


RELATED = {
    "its largest": lambda p: p == p.amax(-1, keepdim=True),
    "itself, clamped": lambda p: p.clamp(-1.0, 1.0) == p,
    "two parts of it": lambda p: p.abs() == p.relu(),
    "itself, sorted": lambda p: p.sort(-1).values == p.sort(-1, descending=True).values.flip(-1),
    "its mean": lambda p: p > p.mean(-1, keepdim=True),
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("level", ["strict", "balanced", "aggressive"])
@pytest.mark.parametrize("source", ["input", "gemm", "sum", "both"])
@pytest.mark.parametrize("function", RELATED.values(), ids=RELATED)
def test_a_value_and_what_was_made_of_it_are_compared_in_one_precision(function, source, level, dtype):
    sources = {
        "input": lambda m, x: x * 1.0,
        "gemm": lambda m, x: m.a(x) * 1.7,
        "sum": lambda m, x: x + m.a(x),
        "both": lambda m, x: m.a(x).exp() + m.a(x),
    }

    class Related(WithHead):
        def forward(self, x):
            p = sources[source](self, x)
            return function(p), self.head(p), self.head(p.clamp(-1.0, 1.0)), p.exp()

    torch.manual_seed(0)
    model, x = Related(None), torch.randn(256, 64)
    exact, found = model(x)[0], fxamp.convert(model, dtype, (x,), level=level)(x)[0]
    assert (exact != found).float().mean() < 0.04


def test_a_low_value_is_compared_with_a_number_as_under_autocast():
    model, x = Net(lambda y, g: (y > 0.3, y == 0.3, y < 1e5, y >= -float("inf"))), torch.randn(64, 64)
    with torch.autocast("cpu", torch.float16):
        expected = model(x)
    assert all(map(torch.equal, fxamp.convert(model, torch.float16, (x,))(x), expected))


@pytest.mark.parametrize("join", ["&", "|", "^", "not"])
def test_words_of_python_write_nothing(join):
    """`operator.and_` ends in an underscore as in-place methods do."""
    joined = {"&": lambda a, b: a & b, "|": lambda a, b: a | b, "^": lambda a, b: a ^ b, "not": lambda a, b: a & ~b}
    function = joined[join]
    x = torch.randn(8, 64)
    converted = fxamp.convert(Net(lambda y, g: function(y > 0, y < 1).float()), torch.float16, (x,))
    rows = fxamp.report(converted).rows
    assert not [row.reason for row in rows if "written in place" in row.reason]
    kept = x > 0
    mask = kept.clone()
    fxamp.convert(Masked(function), torch.float16, (x, mask))(x, mask)
    assert torch.equal(mask, kept)


class Masked(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.function = nn.Linear(64, 64), function

    def forward(self, x, mask):
        return self.a(x) * self.function(mask, x < 1)


class Asked(nn.Module):
    """`value` is made of probabilities, of a GEMM's result and of a weight; a GEMM reads it too.

    Args:
        asks: of softmax, where torch.autocast leaves it low: it does on a CPU, and does not on a GPU.
    """

    def __init__(self, value, question, asks=None):
        super().__init__()
        self.asks = asks
        self.a, self.head = nn.Linear(64, 64), nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.rand(64))
        self.value, self.question = value, question

    def forward(self, x):
        y = self.a(x)
        p = torch.softmax(y * 3, -1, dtype=self.asks)
        v = self.value(y, p, self.weight)
        return self.question(v), self.head(p), self.head(v)


VALUES = {
    "probabilities": lambda y, p, w: p,
    "probabilities, moved": lambda y, p, w: p + w,
    "probabilities, twice a step away": lambda y, p, w: (torch.sigmoid(p) * 2.5).view(-1, 8, 8).flatten(1),
    "scores, moved": lambda y, p, w: y.sigmoid() + w,
    "scores, weighed": lambda y, p, w: y * w,
    "scores, weighed, and a number": lambda y, p, w: y * w + 1,
    "scores": lambda y, p, w: y.sigmoid() * 1.7,
    "one of two": lambda y, p, w: torch.where(p > 0.01, p * 1.3, w),
    "in place": lambda y, p, w: (p + 1).mul_(w).add_(p),
}
QUESTIONS = {
    "argsort": lambda v: v.argsort(-1),
    "topk": lambda v: v.topk(4)[1],
    "values too": lambda v: torch.topk(v, 4)[1] + 0,
    "threshold": lambda v: v > 0.37,
    "bounds": lambda v: v.unsqueeze(-1) < torch.linspace(0, 2, 33),
    "integers": lambda v: (v * 100).long(),
    "round": lambda v: torch.round(v * 100),
    "floor": lambda v: (v * 100).floor() * 1.0,
    "sign": lambda v: torch.sign(v - 0.4),
    "bucketize": lambda v: torch.bucketize(v, torch.linspace(0, 1, 97)),
    "remainder": lambda v: v.remainder(0.1) > 0.05,
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_made_for_a_question_is_rounded_no_more_than_under_autocast(value, question, dtype):
    found, autocast = _wrong_answers(value, question, dtype)
    assert found <= 1.1 * autocast + 2


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_a_sum_of_float32_and_low_is_rounded_once_more_at_most(question, dtype):
    """What comes into such a sum may be a residual stream, which stays as low as it is."""
    found, autocast = _wrong_answers(lambda y, p, w: p + y, question, dtype)
    assert found <= 2 * autocast + 10


def _wrong_answers(value, question, dtype):
    """Of the converted model, and under autocast as it is on a GPU."""
    torch.manual_seed(0)
    model, x = Asked(value, question), torch.randn(256, 64)
    reference = Asked(value, question, torch.float32)
    reference.load_state_dict(model.state_dict())
    with torch.autocast("cpu", dtype):
        autocast = reference(x)[0]
    exact, found = model(x)[0], fxamp.convert(copy.deepcopy(model), dtype, (x,))(x)[0]
    return (found != exact).sum(), (autocast != exact).sum()


def _row(converted, name):
    return next(row for row in fxamp.report(converted).rows if row.name == name)


def test_a_values_question_is_its_reason():
    x = torch.randn(8, 64)
    converted = fxamp.convert(Asked(VALUES["probabilities, moved"], QUESTIONS["argsort"]), torch.float16, (x,))
    row = _row(converted, "add")
    assert (row.precision, row.reason_kind) == ("high", "position")
    assert row.reason == "what `argsort` (argsort) says of it is decided by the last bits, and softmax is float32"
    answer = str(fxamp.explain(converted, "add"))
    assert 'overrides={"add": "allow"}' in answer and "rounding changes positions" in answer
    lowered = fxamp.convert(
        Asked(VALUES["probabilities, moved"], QUESTIONS["argsort"]), torch.float16, (x,), overrides={"add": "allow"}
    )
    assert _row(lowered, "add").precision == "low"


class Stream(nn.Module):
    def __init__(self, question):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.begin, self.question = nn.Parameter(torch.rand(64)), question

    def forward(self, x):
        h = self.layers[0](x) + self.begin
        for layer in self.layers[1:]:
            h = h + layer(h).relu()
        return self.layers[0](h), self.question(h)


def test_a_question_of_a_stream_leaves_the_stream_low():
    """Behind a sum that adds something low stands the rest of the model."""
    x = torch.randn(8, 64)
    asked, alone = (
        fxamp.report(fxamp.convert(Stream(question), torch.float16, (x,)))
        for question in (lambda h: (h == 0).all(-1), lambda h: None)
    )
    assert asked.casts == alone.casts
    assert {row.precision for row in asked.rows if row.op == "add"} == {"low"}


def test_what_low_precision_holds_exactly_stays_where_it_is():
    """A mask is exact in any dtype: asking for it makes no node float32."""

    class Masked(Asked):
        def forward(self, x):
            mask = 1.0 - (x > 0).float()
            return self.head(self.a(x) * mask), mask == 0

    x = torch.randn(8, 64)
    rows = fxamp.report(fxamp.convert(Masked(None, None), torch.float16, (x,))).rows
    assert [row.precision for row in rows if row.op in ("sub", "rsub")] == ["low"]


def test_a_mask_in_the_dtype_of_a_value_leaves_the_value_low():
    """`new_zeros` reads no number: what is asked of the mask is not asked of the value."""

    class Windows(Asked):
        def forward(self, x):
            y = nn.functional.layer_norm(self.a(x), (64,))
            mask = y.new_zeros(64)
            mask[:8] = 1
            mask = mask.masked_fill(mask != 0, -100.0)
            return self.head(y) + mask

    x = torch.randn(8, 64)
    rows = fxamp.report(fxamp.convert(Windows(None, None), torch.float16, (x,))).rows
    assert [row.precision for row in rows if row.op == "layer_norm"] == ["low"]
