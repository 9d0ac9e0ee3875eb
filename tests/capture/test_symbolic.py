"""Symbolic capture: what a graph must hold, what cannot be held, and no trace on the model."""

import copy
import enum
import random
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.capture.tracer import SymbolicTracer
from fxamp.errors import CaptureError
from fxamp.model.engine import engine_of

# Numbers for which bf16 is exact: small integers.
EXACT = torch.arange(12.0).reshape(3, 4)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Model(nn.Module):
    """A linear layer with small integer weights, so that low precision is exact, and a body to be given."""

    def __init__(self, body) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        self.mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
        self.register_buffer("count", torch.zeros(()))
        self.body = body
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(4) * 2 + 1)
            self.fc.bias.copy_(torch.arange(4.0))

    def forward(self, x, *rest, **options):
        return self.body(self, x, *rest, **options)


def check_same(body, *inputs, calls=1, **options):
    """Converted and eager give the same, exactly, call after call, and leave the same buffers."""
    eager = Model(body)
    converted = fxamp.convert(copy.deepcopy(eager), dtype=torch.bfloat16, example_inputs=(inputs, options))
    for _ in range(calls):
        ours, theirs = converted(*inputs, **options), eager(*inputs, **options)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    for (name, left), right in zip(converted.named_buffers(), eager.buffers(), strict=True):
        assert torch.equal(left, right), name
    return converted


def test_inplace_operators_write_into_views():
    def body(self, x):
        y = self.fc(x)
        row = y[0]
        row += 1
        y[1] = 5
        y[:, 2] *= 2
        return y

    check_same(body, EXACT)


def test_inplace_write_into_the_input_reaches_the_caller():
    def body(self, x):
        x += 1
        return self.fc(x)

    mine, theirs = EXACT.clone(), EXACT.clone()
    converted = fxamp.convert(Model(body), example_inputs=(EXACT.clone(),))
    torch.testing.assert_close(converted(mine), Model(body)(theirs), rtol=0, atol=0)
    assert torch.equal(mine, theirs)
    assert not torch.equal(mine, EXACT)


def test_a_deny_op_in_place_on_a_low_value_is_seen_by_every_reader():
    def body(self, x):
        y = self.fc(x) * 0
        view = y.view(-1)
        y.exp_()
        return y + 1, view

    check_same(body, EXACT)


def test_a_buffer_written_in_place_moves_at_each_call():
    def body(self, x):
        self.count.add_(1)
        return self.fc(x) + self.count

    check_same(body, EXACT, calls=3)


def test_none_bool_and_string_arguments_select_their_own_graph():
    def body(self, x, mask=None, negate=False, mode="sum"):
        y = self.fc(x)
        if mask is not None:
            y = y * mask
        if negate:
            y = -y
        return y.sum() if mode == "sum" else y

    converted = check_same(body, EXACT)
    eager = Model(body)
    for options in ({"mask": torch.ones(4) * 2}, {"negate": True}, {"mode": "all"}, {"mask": None}):
        torch.testing.assert_close(converted(EXACT, **options), eager(EXACT, **options), rtol=0, atol=0)


class Way(enum.IntEnum):
    THERE = 1
    BACK = 2


class Side(enum.Enum):
    LEFT = "left"
    RIGHT = "right"

    def __eq__(self, other):  # so that it cannot be hashed
        return self is other


@pytest.mark.parametrize(
    "kind", [Way, Side, enum.Flag("Bit", "A B"), enum.Enum("Weight", {"A": 0.5, "B": 2.0}, type=float)]
)
def test_members_of_an_enum_select_their_own_graph(kind):
    one, other = kind

    def body(self, x, which=one):
        y = self.fc(x)
        return y if which is one else y + EXACT

    converted, eager = check_same(body, EXACT), Model(body)
    for options in ({"which": other}, {"which": one}):
        torch.testing.assert_close(converted(EXACT, **options), eager(EXACT, **options), rtol=0, atol=0)
    assert {variant.captured.method for variant in engine_of(converted).all_variants()} == {"symbolic"}


def test_a_combination_of_flags_has_no_name_in_a_graph():
    bits = enum.Flag("Bit", "A B")

    def body(self, x, which=bits.A):
        return self.fc(x) if bits.A in which else x

    converted = fxamp.convert(Model(body), torch.bfloat16, capture="symbolic")
    with pytest.raises(CaptureError, match="an argument of type Bit"):
        converted(EXACT, bits.A | bits.B)


def test_containers_come_and_go():
    def body(self, batch, pair):
        a, (b, c) = batch["a"], pair
        return {"out": [self.fc(a), (b + c, a)], "none": None, "n": 3}

    check_same(body, {"a": EXACT}, (EXACT, [EXACT * 2][0]))


def test_sizes_stay_symbolic():
    def body(self, x):
        b, t, c = x.shape
        y = self.fc(x.reshape(b * t, c)).view(b, t, -1)
        return y.reshape(b, -1) + torch.arange(t * 4)

    converted = check_same(body, EXACT[None])
    other = torch.arange(40.0).reshape(2, 5, 4)
    torch.testing.assert_close(converted(other), Model(body)(other), rtol=0, atol=0)
    assert len(engine_of(converted).all_variants()) == 1


def test_a_decision_on_a_shape_binds_the_graph_to_the_shapes():
    def body(self, x):
        return self.fc(x) if x.size(0) > 2 else self.fc(x) + 100

    converted = check_same(body, EXACT)
    torch.testing.assert_close(converted(EXACT[:2]), Model(body)(EXACT[:2]), rtol=0, atol=0)
    assert len(engine_of(converted).all_variants()) == 2


def test_loops_over_tensors_and_shapes():
    def body(self, x):
        total = 0
        for row in x:
            total = total + self.fc(row)
        for step in range(x.size(0)):
            total = total + step
        return total + len(x)

    check_same(body, EXACT)


def test_isinstance_sees_a_tensor():
    def body(self, x):
        return self.fc(x) if isinstance(x, torch.Tensor) else 1 / 0

    check_same(body, EXACT)


def test_tensors_made_in_forward_are_made_again():
    def body(self, x):
        noise = torch.rand(4)
        steps = torch.arange(x.size(0), device=x.device)[:, None]
        return self.fc(x) * 0 + noise + steps, torch.zeros(2, dtype=x.dtype), x.new_ones(1)

    eager = Model(body)
    converted = fxamp.convert(copy.deepcopy(eager), dtype=torch.bfloat16, example_inputs=(EXACT,))
    torch.manual_seed(0)
    first, second = converted(EXACT), converted(EXACT)
    assert not torch.equal(first[0], second[0])
    torch.manual_seed(0)
    torch.testing.assert_close(first, eager(EXACT), rtol=0, atol=0)


def test_plain_tensor_attributes_and_constants_are_values():
    constant = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def body(self, x):
        return self.fc(x) * self.mask + constant

    check_same(body, EXACT)


def test_no_grad_regions_cut_the_gradient_where_eager_does():
    def body(self, x):
        with torch.no_grad():
            frozen = self.fc(x)
        return self.fc(x) + frozen

    eager = Model(body)
    converted = fxamp.convert(copy.deepcopy(eager), dtype=torch.bfloat16, example_inputs=(EXACT,))
    converted(EXACT).sum().backward()
    eager(EXACT).sum().backward()
    assert torch.equal(converted.fc.weight.grad, eager.fc.weight.grad)
    assert torch.is_grad_enabled()


def test_an_error_inside_a_no_grad_region_leaves_gradients_on():
    def body(self, x, other):
        with torch.no_grad():
            y = x @ other
        return self.fc(y)

    converted = fxamp.convert(Model(body), example_inputs=(EXACT, torch.ones(4, 4)))
    with pytest.raises(RuntimeError):
        converted(EXACT, torch.ones(3, 4))
    assert torch.is_grad_enabled()


def test_a_region_without_autocast_stays_fp32():
    def body(self, x):
        with torch.autocast("cpu", enabled=False):
            y = self.fc(x)
        return self.fc(y)

    converted = fxamp.convert(Model(body), dtype=torch.bfloat16, example_inputs=(EXACT,))
    rows = [row for row in fxamp.report(converted).rows if row.op == "linear"]
    assert [row.precision for row in rows] == ["high", "low"]
    assert rows[0].reason_kind == "user region"


def inferred(self, x):
    with torch.inference_mode():
        y = self.fc(x)
    return y + 1


@pytest.mark.parametrize(
    ("body", "culprit"),
    [
        (lambda self, x: self.fc(x) if self.fc(x).mean() > 0 else x, "bool"),
        (lambda self, x: self.fc(x)[int(x.argmax())], "int"),
        (lambda self, x: self.fc(x) * x.sum().item().__float__(), "float"),
        (lambda self, x: (self.fc.eval(), self.fc(x))[1], "sets attribute 'fc.training'"),
        (lambda self, x: self.fc(x) * random.random(), "random module"),
        (lambda self, x: (torch.manual_seed(3), self.fc(x))[1], "torch random numbers"),
        (lambda self, x: self.fc(x) * (2 if x.is_leaf else 3), "autograd or memory layout"),
        (lambda self, x: self.fc(x) * (2 if x._base is None else 3), "autograd or memory layout"),
        (lambda self, x: self.fc(x) * (lambda found: 2 if found is None else 3)(x.grad_fn), "look at .grad_fn"),
        (lambda self, x: self.fc(x) * (2 if x.is_contiguous() else 3), "autograd or memory layout"),
        (lambda self, x: self.fc(x) * (2 if x.stride()[0] > 3 else 3), "autograd or memory layout"),
        (lambda self, x: self.fc(x) * (2 if x.requires_grad == self.training else 3), "autograd or memory layout"),
        (lambda self, x: self.fc(x) * next(self.parameters()).data, "reads .data of a tensor"),
        (lambda self, x: self.fc(x) * next(self.parameters()).tolist()[0][0], "reads the numbers of a tensor"),
        (lambda self, x: inferred(self, x), "torch.inference_mode inside forward"),
    ],
)
def test_what_a_graph_cannot_hold_is_named(body, culprit):
    model = Model(body)
    before, state, drawn = dict(model.__dict__), random.getstate(), torch.get_rng_state()
    with pytest.raises(CaptureError, match=culprit):
        fxamp.convert(model, example_inputs=(EXACT,), capture="symbolic")
    assert model.__dict__ == before
    assert random.getstate() == state and torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("ask", [lambda x: x.is_leaf, lambda x: x.is_contiguous(), lambda x: x.stride()[0] > 3])
def test_example_inputs_are_not_asked_for_where_they_would_not_help(ask):
    with pytest.raises(CaptureError, match="autograd or memory layout") as error:
        fxamp.convert(Model(lambda self, x: self.fc(x) * (2 if ask(x) else 3)), capture="symbolic")(EXACT)
    assert "example_inputs" not in str(error.value)


def test_an_attribute_that_no_tensor_has_is_none_wherever_it_is_handed():
    def factor(name):
        return 2 if name is None else 3

    model = Model(lambda self, x: self.fc(x) * factor(x.name))
    converted = fxamp.convert(model, example_inputs=(EXACT,), capture="symbolic")
    torch.testing.assert_close(converted(EXACT), model(EXACT), rtol=0.02, atol=0.02)


def test_what_cannot_be_followed_is_tried_once(monkeypatch):
    traces = []
    trace = SymbolicTracer.trace
    monkeypatch.setattr(SymbolicTracer, "trace", lambda *given: (traces.append(1), trace(*given))[1])
    converted = fxamp.convert(Model(lambda self, x: self.fc(x) if self.fc(x).mean() > 0 else x))
    converted(EXACT)
    before = len(traces)
    converted(EXACT)
    converted(EXACT + 1)
    assert len(traces) == before > 0


def test_a_preview_makes_room_for_the_first_graph():
    converted = fxamp.convert(Model(lambda self, x: self.fc(x)), dtype=torch.bfloat16)
    engine = engine_of(converted)
    assert [variant.is_preview for variant in engine.all_variants()] == [True]
    converted(EXACT)
    assert not engine.previews and len(engine.all_variants()) == 1


def test_a_preview_takes_inputs_to_be_where_the_weights_are():
    converted = fxamp.convert(Model(lambda self, x: self.fc(x) if x.device.type == "cpu" else x), dtype=torch.bfloat16)
    assert [row.op for row in fxamp.report(converted).rows].count("linear") == 1


def test_more_sizes_than_graphs_are_left_to_dynamo():
    def body(self, x):
        return self.fc(x) + len(range(x.size(0)))

    sizes = range(1, 3 + 16)
    model = Model(body)
    strict = fxamp.convert(copy.deepcopy(model), dtype=torch.bfloat16, example_inputs=(EXACT,), capture="symbolic")
    with pytest.raises(CaptureError, match="Model asked for more than 16 graphs: its forward decides on sizes"):
        for size in sizes:
            strict(torch.ones(size, 4))
    converted = fxamp.convert(copy.deepcopy(model), dtype=torch.bfloat16, example_inputs=(EXACT,))
    for size in sizes:
        torch.testing.assert_close(converted(torch.ones(size, 4)), model(torch.ones(size, 4)), rtol=0, atol=0)


def test_a_leaf_module_type_as_root_can_be_converted():
    norm = nn.BatchNorm1d(4)
    eager = copy.deepcopy(norm)
    converted = fxamp.convert(norm, example_inputs=(EXACT,))
    torch.testing.assert_close(converted(EXACT), eager(EXACT), rtol=0, atol=0)
    assert torch.equal(norm.running_mean, eager.running_mean)


def test_tied_weights_are_read_once_and_stay_tied():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens):
            return self.head(self.table(tokens))

    model = Tied()
    eager = copy.deepcopy(model)
    converted = fxamp.convert(model, dtype=torch.bfloat16, example_inputs=(torch.arange(5),))
    converted(torch.arange(5)).sum().backward()
    eager(torch.arange(5)).sum().backward()
    assert model.head.weight is model.table.weight
    # a bf16 sum of at most ten numbers of N(0, 1)
    torch.testing.assert_close(model.table.weight.grad, eager.table.weight.grad, rtol=2**-6, atol=2**-5)


def test_multihead_attention_is_low():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x, mask=None):
            return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]

    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 5, 8)
    mask = torch.triu(torch.full((5, 5), float("-inf")), 1)
    converted = fxamp.convert(model, dtype=torch.bfloat16, example_inputs=(x,))
    for call in ((x,), (x, mask)):
        torch.testing.assert_close(converted(*call), model(*call), rtol=0, atol=2**-6)
    assert any(
        row.op == "multi_head_attention_forward" and row.precision == "low" for row in fxamp.report(converted).rows
    )


def test_a_graph_module_of_the_users_own_is_accepted():
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    converted = fxamp.convert(traced, dtype=torch.bfloat16, example_inputs=(EXACT,))
    assert isinstance(converted, torch.fx.GraphModule)
    assert list(converted.state_dict()) == list(traced.state_dict())
    torch.testing.assert_close(converted(EXACT), traced(EXACT), rtol=2**-6, atol=2**-6)
    assert fxamp.report(converted).low_precision_nodes > 0


def test_functional_inplace_activation():
    def body(self, x):
        y = self.fc(x)
        F.relu(y, inplace=True)
        return y

    check_same(body, EXACT - 5)


@pytest.mark.parametrize(
    "move",
    [
        lambda y, x: y.to("cpu"),
        lambda y, x: y.to(x.device),
        lambda y, x: y.to(device=x.device, non_blocking=True),
        lambda y, x: y.to(x.device, x.dtype),
        lambda y, x: y.cpu(),
    ],
)
def test_moving_a_value_to_a_device_is_no_cast(move):
    converted = check_same(lambda self, x: self.fc(move(self.fc(x), x)), EXACT % 2)
    assert [row.precision for row in fxamp.report(converted).rows if row.op == "linear"] == ["low", "low"]


def test_named_tuples_come_back_as_such():
    def body(self, x):
        return Pair(self.fc(x), x), torch.max(self.fc(x), 1)

    converted = check_same(body, EXACT)
    assert type(converted(EXACT)[0]) is Pair


def test_tensors_that_torch_makes_in_its_default_dtype_feed_gemms():
    def body(self, x):
        return self.fc(x) @ torch.ones(4, 4) @ torch.eye(4) + torch.full((4,), 2.0)

    check_same(body, EXACT % 2)


def test_tensors_of_traced_sizes_in_traced_dtypes():
    def body(self, x):
        zeros = torch.zeros(x.size(0), x.size(1), dtype=x.dtype, device=x.device)
        return self.fc(x) + zeros + torch.ones(x.size(0), 1, dtype=x.dtype) + torch.full((x.size(0), 4), 2.0)

    converted = check_same(body, EXACT)
    assert converted(EXACT[:2]).shape == (2, 4)
    assert len(engine_of(converted).all_variants()) == 1


def test_questions_about_ranks_and_dtypes_bind_a_graph_to_nothing():
    def body(self, x):
        if x.dim() == 2 and x.dtype == torch.float32 and x.device.type == "cpu" and x.ndim < 4:
            return self.fc(x)
        return x

    converted = check_same(body, EXACT)
    assert not engine_of(converted).all_variants()[0].captured.decisions


def test_a_graph_for_each_number_of_rows_is_refused_at_o2_with_a_remedy_that_helps_there():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return torch.stack([self.fc(row) for row in x])

    converted = fxamp.convert(Rows(), torch.bfloat16, (torch.randn(1, 4),), "O2", capture="symbolic")
    for many in range(1, 17):
        converted(torch.randn(many, 4))
    with pytest.raises(CaptureError, match="Pad the inputs to a few sizes, or use opt_level='O1', which Dynamo can"):
        converted(torch.randn(17, 4))


class AsksForTensors(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x) if isinstance(x, torch.Tensor) else x


def test_a_preview_takes_for_a_tensor_what_it_does_not_know():
    """Weights that O2 stores low, and names of nodes that overrides have, are those of the way that tensors take."""
    converted = fxamp.convert(AsksForTensors(), dtype=torch.bfloat16, opt_level="O2")
    assert converted.fc.weight.dtype == torch.bfloat16
    converted = fxamp.convert(AsksForTensors(), dtype=torch.bfloat16, overrides={"fc": "deny"})
    x = torch.randn(2, 8)
    assert torch.equal(converted(x), converted.fc(x))
