"""Functions under torch.vmap: one node, with the numbers and gradients of the model as it is written."""

import copy
import random

import pytest
import torch
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

import fxamp
from fxamp.errors import CaptureError
from fxamp.model.engine import engine_of

BF16 = torch.bfloat16


class Around(nn.Module):
    """A layer, a function of its rows under vmap, and another layer."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.rand(8) + 0.5)
        self.register_buffer("offset", torch.rand(8))
        self.norm, self.drop, self.factor = nn.LayerNorm(8), nn.Dropout(0.5), 3.0
        self.function = function

    def forward(self, x):
        return self.last(self.function(self, self.first(x)))


def two_results(self, h):
    a, b = torch.vmap(lambda row: (row.sin(), row.sum()))(h)
    return a * b.unsqueeze(-1)


def containers(self, h):
    given = {"one": h, "other": (h.cos(), self.offset)}
    return torch.vmap(
        lambda held: {"sum": held["one"] * held["other"][0] + held["other"][1]},
        in_dims=({"one": 0, "other": (0, None)},),
    )(given)["sum"]


def other_dims(self, h):
    return torch.vmap(lambda column, row: column.mean() * row, in_dims=(1, None), out_dims=1)(h, self.offset[: len(h)])


def nested(self, h):
    product = lambda one, other: (one - 2 * other).square() * self.factor  # noqa: E731
    pairs = torch.vmap(torch.vmap(product, in_dims=(None, 0)), in_dims=(0, None))(h, h)
    return pairs.mean(1) + h


def written(self, h):
    other = h * 2
    torch.vmap(lambda row: row.mul_(self.scale))(other)
    return other + h


def shared_result(self, h):
    given, same = torch.vmap(lambda row: (row * 1.5, self.offset))(h)
    return given + same


def by_keyword(self, h):
    return torch.vmap(lambda row, *, weight: row * weight.sum(0))(h, weight=h.sigmoid())


def in_chunks(self, h):
    return torch.vmap(lambda row: row.softmax(0), chunk_size=2)(h)


def of_a_norm(self, h):
    return torch.vmap(self.norm)(h)


def of_a_constant(self, h):
    return torch.vmap(lambda number: number * self.scale)(torch.arange(3.0)).sum(0) + h


def of_what_the_data_decides(self, h):
    kept = h[h.sum(-1) > 0]
    return h + torch.vmap(lambda row: row.exp() * self.scale)(kept).sum(0)


FUNCTIONS = [
    *(two_results, containers, other_dims, nested, written, shared_result, by_keyword, in_chunks, of_a_norm),
    *(of_a_constant, of_what_the_data_decides),
]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_results_and_gradients_are_those_of_the_model_as_it_is_written(function, level):
    model = Around(function)
    x = torch.randn(5, 8)
    converted = fxamp.convert(copy.deepcopy(model), BF16, (x,), opt_level=level, capture="symbolic")
    for rows in (5, 7, 3):
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
        expected, given = model(x), converted(x)
        torch.testing.assert_close(given.float(), expected, rtol=0.03, atol=0.03)
        for each, result in ((model, expected), (converted, given)):
            each.zero_grad()
            result.float().square().sum().backward()
        for name, parameter in model.named_parameters():
            other = converted.get_parameter(name).grad
            assert (parameter.grad is None) == (other is None), name
            if other is not None:
                error = (other.float() - parameter.grad).norm() / parameter.grad.norm().clamp_min(1e-3)
                assert error < 0.05, (name, rows, float(error))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_in_float32_they_are_bit_for_bit_so(function):
    model, x = Around(function), torch.randn(5, 8)
    converted = fxamp.convert(copy.deepcopy(model), BF16, (x,), overrides={"*": "deny"}, capture="symbolic")
    for rows in (5, 7):
        x = torch.randn(rows, 8)
        assert torch.equal(converted(x), model(x))


def test_one_graph_serves_other_sizes_and_shows_the_function_by_its_name():
    model, x = Around(two_results), torch.randn(5, 8)
    converted = fxamp.convert(model, BF16, (x,), capture="symbolic")
    converted(torch.randn(9, 8))
    assert len(engine_of(converted).all_variants()) == 1
    (node,) = (row for row in fxamp.report(converted).rows if "two_results.<locals>.<lambda>" in row.op)
    assert node.precision == "high" and "test_vmapped.py:" in node.source


def distance(row, centre):
    return (row - centre).square().mean().reshape(1)


def by_name(self, h):
    return torch.vmap(distance, in_dims=(0, None))(h, self.scale) * h


def test_a_function_that_a_list_names_runs_low():
    model, x = Around(by_name), torch.randn(5, 8)
    lists = fxamp.OpLists.default().override(allow=[distance])
    low = fxamp.convert(copy.deepcopy(model), BF16, (x,), lists=lists, capture="symbolic")
    (node,) = (row for row in fxamp.report(low).rows if row.name == "distance")
    assert node.colour == "allow" and node.precision == "low"
    torch.testing.assert_close(low(x), model(x), rtol=0.05, atol=0.05)
    high = fxamp.convert(copy.deepcopy(model), BF16, (x,), capture="symbolic")
    assert not torch.equal(high(x), low(x))


class Masked(nn.Module):
    """A mask of (batch, row, column), made element by element from what one function says, as language models do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.qkv, self.head = nn.Embedding(32, 16), nn.Linear(16, 48), nn.Linear(16, 32)

    def forward(self, tokens, is_there):
        def may_look(b, i, j):
            return (j <= i) & is_there[b, j]

        for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
            may_look = torch.vmap(may_look, in_dims=dims)
        rows, length = tokens.shape
        places = torch.arange(length)
        with TransformGetItemToIndex():
            mask = may_look(torch.arange(rows), places, places)
        q, k, v = self.qkv(self.table(tokens)).chunk(3, -1)
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_mask_that_is_made_element_by_element(level):
    model = Masked()

    def batch(rows, length):
        tokens = torch.randint(0, 32, (rows, length))
        return tokens, torch.arange(length) < torch.randint(1, length + 1, (rows, 1))

    converted = fxamp.convert(copy.deepcopy(model), BF16, batch(2, 6), opt_level=level, capture="symbolic")
    for sizes in ((2, 6), (3, 9), (1, 4)):
        given = batch(*sizes)
        torch.testing.assert_close(converted(*given).float(), model(*given), rtol=0.03, atol=0.03)
    assert len(engine_of(converted).all_variants()) == 1
    report = fxamp.report(converted)
    assert {row.precision for row in report.rows if row.op in ("linear", "scaled_dot_product_attention")} == {"low"}
    assert {row.precision for row in report.rows if "may_look" in row.op} == {"none"}


def whole_module(self, h):
    return torch.vmap(self.drop, randomness="different")(h)


def draws(self, h):
    return torch.vmap(lambda row: row * random.random())(h)


def decides_on_sizes(self, h):
    return torch.vmap(lambda row: row * 2 if len(row) > 4 else row)(h)


def decides_on_data(self, h):
    return torch.vmap(lambda row: row * 2 if self.offset.sum() > 0 else row)(h)


def sets_an_attribute(self, h):
    def function(row):
        self.seen = row
        return row * 2

    return torch.vmap(function)(h)


def hands_out_a_sample(self, h):
    seen = []
    torch.vmap(lambda row: (seen.append(row), row)[1])(h)
    return h + seen[0]


def switches_gradients_off(self, h):
    def function(row):
        with torch.no_grad():
            scale = self.scale * 2
        return row * scale

    return torch.vmap(function)(h)


REFUSED = [whole_module, draws, decides_on_sizes, decides_on_data, switches_gradients_off]
WRONG_IN_EAGER = [sets_an_attribute, hands_out_a_sample]


@pytest.mark.parametrize("function", [*REFUSED, *WRONG_IN_EAGER], ids=lambda function: function.__name__)
def test_what_one_sample_cannot_tell_is_refused(function):
    line = "" if function is sets_an_attribute else r"test_vmapped\.py:\d+: "  # known when forward is over
    with pytest.raises(CaptureError, match=f"{line}(a function|a value|forward draws|Python)"):
        fxamp.convert(Around(function), BF16, (torch.randn(5, 8),), capture="symbolic")


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_what_is_refused_runs_as_it_is_written(function):
    model, x = Around(function), torch.randn(5, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    converted = fxamp.convert(model, BF16)  # Dynamo follows it, or leaves it
    results = []
    for each in (converted, model):
        random.seed(0), torch.manual_seed(0)
        results.append(each(x))
    torch.testing.assert_close(*results, rtol=0.03, atol=0.05)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def layers(self, h):
    return torch.vmap(lambda row: self.last(self.first(row).relu()) * 0.5 + row)(h)


def layers_and_a_norm(self, h):
    return torch.vmap(lambda row: self.norm(self.first(row)))(h)


def layers_and_an_exponential(self, h):
    return torch.vmap(lambda row: self.first(row).exp())(h)


def a_large_number(self, h):
    return torch.vmap(lambda row: self.first(row).masked_fill(row > 0, -1e9).clamp(-1.0, 1.0))(h)


def a_conversion(self, h):
    return torch.vmap(lambda row: self.first(row).double().square().float())(h)


def a_whole_number(self, h):
    return torch.vmap(lambda row: self.first(row) * 100000)(h)


def a_number_made_of_sizes(self, h):
    return torch.vmap(lambda row: self.first(row) * (row.shape[0] * 20000))(h)


def a_denominator(self, h):
    epsilon = torch.tensor(1e-8)
    return torch.vmap(lambda row: self.first(row) / (row.abs() + epsilon))(h * 0)


def a_small_addend(self, h):
    return torch.vmap(lambda row: ((self.first(row) + 1e-4) - self.first(row)) * 1e4)(h)


def a_product_with_itself(self, h):
    def squares(row):
        made = self.first(row * 1000)
        return made * made.view(-1)

    return torch.vmap(squares)(h)


def a_dot_product(self, h):
    return torch.vmap(lambda row: row @ row)(h * 300).unsqueeze(-1).expand(-1, 8)


def an_equation(self, h):
    return torch.vmap(lambda row: torch.einsum("i,i->", row, row))(h * 300).unsqueeze(-1).expand(-1, 8)


def whole_numbers(self, h):
    places = torch.arange(8) + 4097
    return torch.vmap(lambda row: (self.first(row) + places) - places)(h)


def a_bound(self, h):
    return torch.vmap(lambda row: self.first(row).gt(row))(h).float()


def without_autocast(self, h):
    def products(row):
        with torch.autocast("cpu", enabled=False):
            return self.first(row * 1e4)

    return torch.vmap(products)(h)


IN_FLOAT32 = [
    *(a_whole_number, a_number_made_of_sizes, a_denominator),
    *(a_small_addend, a_product_with_itself, a_dot_product, an_equation, whole_numbers, a_bound, without_autocast),
]


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
@pytest.mark.parametrize("function", IN_FLOAT32, ids=lambda function: function.__name__)
def test_what_low_numbers_would_destroy_keeps_the_function_in_float32(function, dtype):
    model = Bare(function)
    converted = fxamp.convert(copy.deepcopy(model), dtype, (torch.randn(5, 8),), capture="symbolic")
    assert _precision(converted) == "high"
    for rows in (5, 3):
        _check_alike(model, converted, torch.randn(rows, 8))


def a_buffer(self, h):
    return torch.vmap(lambda row: self.first(row) * self.offset)(h)


def a_number(self, h):
    return torch.vmap(lambda row: self.first(row) * self.factor)(h)


LARGE = torch.tensor(1e6)


def a_large_constant(self, h):
    return torch.vmap(lambda row: self.first(row) * LARGE)(h)


@pytest.mark.parametrize("function", [a_buffer, a_number, a_large_constant], ids=lambda function: function.__name__)
def test_what_float16_does_not_hold_now_takes_the_function_out_of_it(function):
    model = Bare(function)
    converted = fxamp.convert(copy.deepcopy(model), torch.float16)
    for number in (3.0, 1e6, 1e-6, 2.0):
        for each in (model, converted):
            each.offset.fill_(number)
            each.factor = number
        _check_alike(model, converted, torch.randn(3, 8))


class Bare(Around):
    """The same without the last layer, which would not hold what is large in float16."""

    def forward(self, x):
        return self.function(self, self.first(x))


def _precision(converted):
    return next(row.precision for row in fxamp.report(converted).rows if "<loc" in row.op)


def _check_alike(model, converted, x):
    expected = model(x).detach()
    largest = float(expected.abs().max())
    torch.testing.assert_close(converted(x).detach(), expected, rtol=0.03, atol=0.03 * largest)


def layers_inside_of_another(self, h):
    return torch.vmap(lambda one: torch.vmap(lambda row: self.first(row))(one))(h.unsqueeze(0)).squeeze(0)


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
@pytest.mark.parametrize(
    ("function", "precision"),
    [
        *((layers, "low"), (layers_inside_of_another, "low"), (layers_and_an_exponential, "high")),
        *((a_large_number, "high"), (a_conversion, "high")),
    ],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_layers_for_each_sample_run_low_where_nothing_beside_them_needs_float32(function, precision, dtype):
    model, x = Around(function), torch.randn(5, 8)
    converted = fxamp.convert(copy.deepcopy(model), dtype, (x,), capture="symbolic")
    (node,) = (row for row in fxamp.report(converted).rows if "<lambda>" in row.op)
    assert node.precision == precision, node.reason
    for rows in (5, 3):
        x = torch.randn(rows, 8)
        expected, given = model(x), converted(x)
        torch.testing.assert_close(given, expected, rtol=0.05, atol=0.05)
        for each, result in ((model, expected), (converted, given)):
            each.zero_grad()
            result.square().sum().backward()
        torch.testing.assert_close(converted.first.weight.grad, model.first.weight.grad, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("key", ["last", "la*"])
def test_an_override_of_a_module_that_the_function_calls_holds_for_the_function(key):
    low = lambda self, h: torch.vmap(lambda row: self.last(row).relu())(h)  # noqa: E731
    high = lambda self, h: torch.vmap(lambda row: self.last(row).exp() * 1e6)(h)  # noqa: E731
    for function, colour, precision in (
        *((low, "deny", "high"), (low, "infer", "high"), (low, "allow", "low")),
        *((high, "deny", "high"), (high, "allow", "high")),
    ):
        options = {"overrides": {key: colour}, "capture": "symbolic"}
        converted = fxamp.convert(Bare(function), torch.float16, (torch.randn(5, 8),), **options)
        assert _precision(converted) == precision


class Ensemble(nn.Module):
    """Many small networks at once, as torch.func writes it: one call for weights that are stacked."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        members = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(3)]
        stacked, _ = torch.func.stack_module_state(members)
        self.stacked = nn.ParameterDict({name.replace(".", "_"): value.detach() for name, value in stacked.items()})
        self.names = {name.replace(".", "_"): name for name in stacked}
        self.plain = [copy.deepcopy(members[0]).to("meta")]

    def forward(self, x):
        weights = {self.names[name]: value for name, value in self.stacked.items()}
        one = lambda held, given: torch.func.functional_call(self.plain[0], held, (given,))  # noqa: E731
        return torch.vmap(one, in_dims=(0, None))(weights, x).mean(0)


def test_an_ensemble_over_stacked_weights():
    model, x = Ensemble(), torch.randn(6, 8)
    converted = fxamp.convert(copy.deepcopy(model), BF16, (x,))
    torch.testing.assert_close(converted(x), model(x), rtol=0.03, atol=0.03)
    for each in (model, converted):
        each(x).square().sum().backward()
    for name, value in model.named_parameters():
        torch.testing.assert_close(converted.get_parameter(name).grad, value.grad, rtol=0.1, atol=0.05)


def test_vmap_outside_of_a_trace_is_torchs_own():
    converted = fxamp.convert(Around(nested), BF16, (torch.randn(3, 8),), capture="symbolic")
    given = torch.vmap(lambda row: row.sum())(torch.ones(3, 4))
    assert torch.equal(given, torch.full((3,), 4.0))
    rows = torch.randn(2, 3, 8)
    together = torch.vmap(lambda x: converted(x))(rows)
    torch.testing.assert_close(together, torch.stack([converted(x) for x in rows]), rtol=0.05, atol=0.1)


def test_a_checkpointed_function_computes_it_again():
    def checkpointed(self, h):
        return torch.utils.checkpoint.checkpoint(lambda value: two_results(self, value), h, use_reentrant=False)

    model, x = Around(checkpointed), torch.randn(5, 8)
    converted = fxamp.convert(copy.deepcopy(model), BF16, (x,), capture="symbolic")
    for each in (model, converted):
        each(x).square().sum().backward()
    torch.testing.assert_close(converted.first.weight.grad, model.first.weight.grad, rtol=0.05, atol=0.05)


def test_a_copy_and_a_compiled_model_give_the_same():
    model, x = Around(two_results), torch.randn(5, 8)
    converted = fxamp.convert(model, BF16, (x,), capture="symbolic")
    expected = converted(x)
    assert torch.equal(copy.deepcopy(converted)(x), expected)
    torch.testing.assert_close(torch.compile(converted, backend="aot_eager")(x), expected, rtol=0.02, atol=0.02)
